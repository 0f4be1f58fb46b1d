"""Muon and AdamW on flat vectors: against references, and where a model's numbers lie for them."""

import pytest
import torch
from torch import Tensor

from tests.small import MODEL, config
from tests.test_training_parts import some_batches
from train.learner import Learner
from train.model import built, layout_of
from train.optimizers import MuonPlus, layouts_of, orthogonal
from train.vector_layout import VectorLayout


def reference(matrix: Tensor) -> Tensor:
    """The polynomial in float64, of one matrix at a time, as its author wrote it down."""
    a, b, c = 3.4445, -4.7750, 2.0315
    found = matrix.double() / matrix.double().norm()
    for _ in range(5):
        gram = found @ found.T
        found = a * found + (b * gram + c * gram @ gram) @ found
    return found


@pytest.mark.parametrize("shape", [(8, 8), (8, 24), (24, 8), (96, 256), (2, 3)])
def test_the_polynomial_is_that_of_its_author(shape):
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    found = orthogonal(matrices)
    for mine, matrix in zip(found, matrices, strict=True):
        assert torch.allclose(mine.double(), reference(matrix), atol=1e-5)
    values = torch.linalg.svdvals(found)
    assert values.max() < 1.3 and values.median() > 0.6


def test_zeros_stay_zeros():
    assert not orthogonal(torch.zeros(2, 4, 6)).any()


def muon_of_torch(model, batches, lr):
    """torch.optim.Muon for the layers' matrices, torch.optim.AdamW for all others."""
    layers = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    words = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" not in name]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": words, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    both = (
        torch.optim.Muon(layers, lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95)),
    )
    model.train()
    for tokens in batches:
        model.zero_grad()
        logits = model(input_ids=tokens[:, :-1]).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in both:
            optimizer.step()


@pytest.mark.parametrize("shape", [(8, 8), (8, 24), (24, 8), (96, 256)])
def test_muon_plus_moves_rows_equally_far_before_and_after_the_polynomial(shape):
    matrix = torch.nn.Linear(*shape[::-1], bias=False, dtype=torch.float32)
    before, slope = matrix.weight.detach().clone(), torch.randn(shape, generator=torch.Generator().manual_seed(1))
    layout = layout_of(torch.nn.Sequential(matrix))
    vector = before.flatten().clone()
    optimizer = MuonPlus(vector, slope.flatten().clone(), layout, config(weight_decay=0.0), lambda m, _: orthogonal(m))
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.step()
    moved = (before - vector.view(shape)).double() / 0.2
    rows = slope.double() / slope.double().norm(dim=1, keepdim=True)
    wanted = reference(rows)
    wanted *= shape[1] ** 0.5 / wanted.norm(dim=1, keepdim=True)
    assert torch.allclose(moved, wanted, atol=1e-4)
    assert torch.allclose(moved.square().mean(dim=1), torch.ones(shape[0], dtype=torch.float64), atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_is_that_of_torch_within_the_rounding_of_bf16(tied):
    """torch's works in bf16 always: its matrices are right to two or three digits."""
    entry = {"config": {**MODEL["config"], "tie_word_embeddings": tied}}
    ours, theirs, start = (built(entry, 257, 3) for _ in range(3))
    learner = Learner(ours, config(inner_optimizer="muon", betas=(0.9, 0.95), clip=1.0))
    [*learner.train(([tokens] for tokens in some_batches(1)), [1e-2])]
    muon_of_torch(theirs, some_batches(1), 1e-2)
    before = dict(start.named_parameters())
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        moved, wanted = (each.detach() - before[name].detach() for each in (mine, other))
        rough = 0.08 if "layers" in name and mine.ndim == 2 else 1e-4
        assert (moved - wanted).norm() <= rough * wanted.norm(), name


def test_matrices_of_one_shape_lie_side_by_side_and_words_are_none_of_them():
    entry = {"config": {**MODEL["config"], "num_hidden_layers": 2, "tie_word_embeddings": False}}
    model = built(entry, 257, 1)
    layout = layout_of(model)
    assert [(s.count, s.rows, s.columns) for s in layout.stacks] == [(8, 32, 32), (2, 32, 48), (4, 48, 32)]
    names = list(layout.shapes)
    assert all("layers" in name and "weight" in name for name in names[: layout.within])
    assert {*names[layout.within : layout.within + 2]} == {"model.embed_tokens.weight", "lm_head.weight"}
    assert {*names} == {name for name, _ in model.named_parameters()}
    vector = torch.arange(layout.size, dtype=torch.float32)
    for stack in layout.stacked(vector[: layout.hidden]):
        for matrix in stack:
            assert any(torch.equal(matrix, view) for view in layout.views(vector).values())


def test_experts_are_matrices_too():
    shape = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    layout = layout_of(built({"config": {**MODEL["config"], **shape}}, 257, 1))
    assert sum(stack.count for stack in layout.stacks) == 4 + 1 + 4 + 4, "attention, router, and two for each expert"


def test_muon_keeps_one_moment_of_what_it_moves():
    learner = Learner(built(MODEL, 257, 3), config(inner_optimizer="muon"))
    layout = learner.layout
    assert len(learner.vectors["average"]) == layout.size
    assert len(learner.vectors["square"]) == layout.size - layout.hidden == learner.layouts["square"].size
    whole = layouts_of(layout, config(inner_optimizer="adamw"))
    assert whole["square"].size == layout.size


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "muon+"])
def test_it_can_be_put_down_and_taken_up(optimizer):
    c = config(inner_optimizer=optimizer)
    whole, first, second = (Learner(built(MODEL, 257, 3), c) for _ in range(3))
    [*whole.train(([each] for each in some_batches(6)), [1e-3] * 6)]
    [*first.train(([each] for each in some_batches(6)[:3]), [1e-3] * 3)]
    for kind in second.vectors:
        with second.filling(kind) as room:
            room.copy_(first.buffer(kind))
    second.load_optimizer_state(first.state())
    [*second.train(([each] for each in some_batches(6)[3:]), [1e-3] * 3, first.summed_loss())]
    assert torch.equal(second.vector, whole.vector) and second.summed_loss() == whole.summed_loss()
    first.reset_optimizer()
    assert first.state()["steps"] == 0 and not any(first.vectors[kind].any() for kind in ("average", "square"))


def test_where_there_is_nothing_for_adamw():
    """Adapters are matrices only."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3, bias=False))
    layout = layout_of(model)
    assert layout.hidden == layout.size == 12 and isinstance(layout.outside, VectorLayout) and not layout.outside.shapes
