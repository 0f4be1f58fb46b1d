"""The parts of pre-training by themselves: batches, learning rate, the inner loop, models, genomes, families."""

import math

import numpy as np
import pytest
import torch

from edt import EDT, hypercube
from fleet.config import Wrong
from tests.small import MODEL, config
from train.batches import Tokens, batch, owned, shuffled
from train.genome import Genome, inherited, read
from train.loop import Learner, NotFinite, rate
from train.model import built, described, flat, layout_of, same_shapes

# -- batches -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 64, 1000])
def test_a_shuffle_is_a_permutation_and_another_key_another_one(count):
    once = [shuffled(place, count, (1, 2)) for place in range(count)]
    assert sorted(once) == [*range(count)]
    assert count < 10 or once != [shuffled(place, count, (1, 3)) for place in range(count)] != [*range(count)]


def test_slots_own_different_sequences_and_all_of_them():
    c = config(population_size=3, inner_steps=5, max_generations=4, warm_start_steps=2, gradient_accumulation=2)
    numbers = [
        int(n)
        for round in range(5)
        for step in range(2 if round == 0 else 5)
        for slot in range(3)
        for part in range(2)
        for n in owned(c, slot, round, step, part)
    ]
    assert sorted(numbers) == [*range(c.sequences)]


def test_a_genome_that_may_train_longer_still_has_batches_of_its_own():
    c = config(mutation_probability=0.5)
    first, second = ({int(n) for s in range(c.allotted_steps) for n in owned(c, 0, r, s, 0)} for r in (1, 2))
    assert c.allotted_steps == 6 and not first & second


def test_windows_cover_the_tokens_and_share_only_their_ends():
    tokens = Tokens(np.arange(33), 9)
    assert [tokens.get(n).tolist() for n in range(tokens.windows)] == [[*range(8 * n, 8 * n + 9)] for n in range(4)]


def test_within_an_epoch_no_sequence_comes_twice_and_then_all_come_again():
    tokens = Tokens(np.arange(17), 3)
    seen = [tuple(batch([tokens], [1.0], np.array([n]), 7)[0].tolist()) for n in range(16)]
    assert sorted(seen[:8]) == sorted(seen[8:]) and len({*seen}) == 8 and seen[:8] != seen[8:]


def test_sources_are_drawn_by_their_weights():
    sources = [Tokens(np.full(99, n), 3) for n in range(3)]
    drawn = batch(sources, [1.0, 2.0, 5.0], np.arange(4000), 1)[:, 0]
    shares = [(drawn == n).float().mean().item() for n in range(3)]
    assert shares == pytest.approx([1 / 8, 2 / 8, 5 / 8], abs=0.03)


# -- the inner loop ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule, last", [("cosine", 0.1), ("linear", 0.1), ("constant", 1.0)])
def test_the_learning_rate_rises_and_falls(schedule, last):
    c = config(lr_schedule=schedule, lr=1.0, warmup_steps=10, warm_start_steps=0, inner_steps=10, max_generations=10)
    assert [rate(c, 0), rate(c, 9), rate(c, 10)] == pytest.approx([0.1, 1.0, 1.0])
    assert rate(c, 100) == pytest.approx(last) and rate(c, 55) >= rate(c, 56) >= last


def plain(model, batches, lr):
    """The same training as anybody would write it."""
    decaying = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decaying, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))
    model.train()
    for tokens in batches:
        optimizer.zero_grad()
        logits = model(input_ids=tokens[:, :-1]).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def some_batches(count=5, seed=1):
    dice = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 257, (4, 17), generator=dice) for _ in range(count)]


@pytest.mark.parametrize("tied", [True, False])
def test_the_loop_trains_as_plain_pytorch_does(tied):
    entry = {"config": {**MODEL["config"], "tie_word_embeddings": tied}}
    ours, theirs = (built(entry, 257, 3) for _ in range(2))
    learner = Learner(ours, config())
    [*learner.train(([tokens] for tokens in some_batches()), [1e-3] * 5)]
    plain(theirs, some_batches(), 1e-3)
    assert torch.allclose(learner.vector, flat(theirs, learner.layout), atol=2e-6)


def test_parts_of_a_batch_make_one_step():
    one, two = (Learner(built(MODEL, 257, 3), config()) for _ in range(2))
    (tokens,) = some_batches(1)
    [*one.train([[tokens]], [1e-3])]
    [*two.train([[*tokens.split(2)]], [1e-3])]
    assert torch.allclose(one.vector, two.vector, atol=1e-6)


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed"])
def test_mixed_precision_learns_and_keeps_fp32(precision):
    learner = Learner(built(MODEL, 257, 3), config(precision=precision))
    tokens = some_batches(1) * 30
    before = float(learner.loss(tokens[0]).detach())
    [*learner.train(([each] for each in tokens), [1e-2] * 30)]
    assert learner.vector.dtype == torch.float32 and float(learner.loss(tokens[0]).detach()) < before - 0.5
    assert bool(learner.state()["scaling"]) == (precision == "fp16-mixed")


@pytest.mark.slow
def test_a_compiled_model_learns_the_same():
    one, two = (Learner(built(MODEL, 257, 3), config(compile=compile)) for compile in (False, True))
    for learner in (one, two):
        [*learner.train(([each] for each in some_batches(3)), [1e-3] * 3)]
    assert torch.allclose(one.vector, two.vector, atol=1e-5)


def test_the_optimizer_can_be_put_down_and_taken_up():
    whole, first, second = (Learner(built(MODEL, 257, 3), config()) for _ in range(3))
    [*whole.train(([each] for each in some_batches(6)), [1e-3] * 6)]
    [*first.train(([each] for each in some_batches(6)[:3]), [1e-3] * 3)]
    second.start(first.vector)
    for mine, theirs in zip(second.moments, first.moments, strict=True):
        mine.copy_(theirs)
    second.recall(first.state())
    [*second.train(([each] for each in some_batches(6)[3:]), [1e-3] * 3, first.summed_loss())]
    assert torch.equal(second.vector, whole.vector) and second.summed_loss() == whole.summed_loss()
    first.forget()
    assert first.state()["steps"] == 0 and not any(map(torch.any, first.moments))


def test_a_loss_that_is_not_finite_is_noticed():
    learner = Learner(built(MODEL, 257, 3), config())
    learner.vector[5] = math.nan
    with pytest.raises(NotFinite):
        [*learner.train(([each] for each in some_batches() * 5), [1e-3] * 25)]


# -- models ------------------------------------------------------------------------------------------------------------


def test_fresh_weights_follow_from_the_seed():
    one, again, other = (flat(m := built(MODEL, 257, seed), layout_of(m)) for seed in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other)


def test_matrices_come_first_and_everything_once():
    model = built(MODEL, 257, 1)
    layout = layout_of(model)
    assert layout.size == sum(p.numel() for p in model.parameters())
    assert layout.decaying == sum(p.numel() for p in model.parameters() if p.ndim >= 2)
    learner = Learner(model, config())
    assert model.get_input_embeddings().weight.data_ptr() == learner.vector.data_ptr()
    assert model.lm_head.weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("preset, least, most", [("14m", 9e6, 11e6), ("60m", 95e6, 110e6), ("150m", 210e6, 220e6)])
def test_presets_are_as_large_as_they_should_be(preset, least, most):
    with torch.device("meta"):
        model = built(preset, 32000, 1)
    assert least < sum(p.numel() for p in model.parameters()) < most


def test_different_shapes_are_named():
    wide = {"config": {**MODEL["config"], "intermediate_size": 64}}
    with pytest.raises(Wrong, match=r"mlp.gate_proj.weight: \[48, 32\] in a, \[64, 32\] in b"):
        same_shapes(layout_of(built(MODEL, 257, 1)), layout_of(built(wide, 257, 1)), "a", "b")


@pytest.mark.parametrize("kind", ["bert", "t5", "vit", "nonsense"])
def test_what_is_no_causal_model_is_refused(kind):
    with pytest.raises(Wrong, match="causal|nonsense"):
        described({"config": {"model_type": kind}})


# -- genomes and families ----------------------------------------------------------------------------------------------


def test_a_child_inherits_from_the_fittest():
    fit, unfit = {"loss": 1.0, "genome_rate": 2.0, "genome_length": 0.75}, {"loss": 2.0, "genome_rate": 0.5}
    assert inherited(config(), 0, 1, [unfit, fit]) == Genome(2.0, 0.75)
    assert read({}, 2) == Genome(1.0, 1.0, (1.0, 1.0))


def test_mutations_are_as_likely_and_as_far_as_said():
    c = config(mutation_probability=0.5, mutation_strength=0.1)
    drawn = [inherited(c, slot, 1, [{}]).rate for slot in range(400)]
    changed = [math.log(rate) for rate in drawn if rate != 1.0]
    assert 0.4 < len(changed) / 400 < 0.6 and 0.08 < np.std(changed) < 0.12
    assert inherited(c, 3, 1, [{}]) == inherited(c, 3, 1, [{}]) != inherited(c, 4, 1, [{}])
    far = inherited(config(mutation_probability=1.0, mutation_strength=10.0), 1, 1, [{}])
    assert 0.25 <= far.rate <= 4 and 0.5 <= far.length <= 1.5 and far.steps(4) <= 6


@pytest.mark.parametrize("population, size", [(2, 2), (4, 2), (8, 4), (8, 2), (16, 4), (1, 1)])
def test_a_hypercube_reaches_everybody(population, size):
    reached = {k: {k} for k in range(population)}
    for generation in range(2, 2 + max(1, (population - 1).bit_length())):
        groups = [hypercube(k, generation, population, size) for k in range(population)]
        assert all(len(group) == min(size, population) and k in group for k, group in enumerate(groups))
        assert all(groups[member] == groups[k] for k in range(population) for member in groups[k])
        reached = {k: set().union(*(reached[p] for p in groups[k])) for k in range(population)}
    assert all(len(found) == population for found in reached.values())


@pytest.mark.parametrize("selection, size", [("hypercube", 4), ("matching", 4), ("matching", 2)])
def test_everybody_is_a_parent_equally_often(selection, size):
    edt = EDT(config(population_size=8, selection=selection, group_size=size))
    families = [edt.families(generation) for generation in range(2, 6)]
    for family in families:
        parents = [parent for group in family.values() for parent in group]
        assert sorted(parents) == sorted([*range(8)] * size)
    assert families[0] != families[1]


def test_fitness_decides_who_is_chosen():
    edt = {how: EDT(config(population_size=8, selection=how, group_size=2)) for how in ("rank", "tournament", "random")}

    class M:
        def __init__(self, k):
            self.id = f"1/m{k}"

    pool, counts = [M(k) for k in range(8)], {}
    for how, each in edt.items():
        drawn = [id for n in range(500) for id in each.choose(pool, np.random.default_rng(n))]
        counts[how] = drawn.count("1/m0") / drawn.count("1/m7") if drawn.count("1/m7") else math.inf
        assert all(len({*each.choose(pool, np.random.default_rng(n))}) == 2 for n in range(20)), "two different parents"
    assert counts["random"] == pytest.approx(1.0, abs=0.3) and min(counts["rank"], counts["tournament"]) > 3


def test_dropout_follows_from_the_seed():
    """Two learners with the same seed before a step lose the same neurons, whatever was drawn before."""
    entry = {"config": {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "resid_pdrop": 0.3}}
    one, two = (Learner(built(entry, 257, 3), config()) for _ in range(2))
    (tokens,) = some_batches(1)
    for learner, seed in ((one, 7), (two, 7)):
        torch.rand(3 if learner is one else 5)
        learner.seed(seed)
        [*learner.train([[tokens]], [1e-3])]
    assert torch.equal(one.vector, two.vector)
    two.seed(8)
    one.seed(7)
    assert [*one.train([[tokens]], [1e-3])] == [*two.train([[tokens]], [1e-3])]
    assert not torch.equal(one.vector, two.vector)
