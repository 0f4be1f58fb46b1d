"""The parts of pre-training by themselves: batches, learning rate, the inner loop, models, genomes, families."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from diloco import DiLoCo
from edt import EDT
from fleet.plan_format import recipes_in, record_of
from fleet.recipe import check
from fleet.run_config import UserError
from tests.small import MODEL, config
from train.batches import TokenFile, batch, owned, shuffled
from train.learner import Learner, rate
from train.model import built, described, flat, layout_of, same_shapes
from train.parent_selection import hypercube
from train.pretraining_genome import Genome, inherited, read
from train.seeds import mixed
from train.training_commands import found_from, prepare
from train.training_config import alone
from train.verdicts import NotFinite

# -- batches -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 64, 1000])
def test_a_shuffle_is_a_permutation_and_another_key_another_one(count):
    once = [shuffled(place, count, (1, 2)) for place in range(count)]
    assert sorted(once) == [*range(count)]
    assert count < 10 or once != [shuffled(place, count, (1, 3)) for place in range(count)] != [*range(count)]


def test_slots_own_different_sequences_and_all_of_them():
    c = config(population_size=3, inner_steps=5, max_generations=90, first_inner_steps=2, gradient_accumulation=2)
    numbers = [
        int(n)
        for round in range(1, 91)
        for step in range(c.steps_in(round))
        for slot in range(3)
        for part in range(2)
        for n in owned(c, slot, round, step, part)
    ]
    assert sorted(numbers) == [*range(c.sequences)]


@pytest.mark.parametrize("size", range(2, 17))
def test_whatever_the_population_somebody_is_met(tmp_path, size):
    """Or it is refused: a group of one would only look like evolution."""
    c = config(population_size=size, group_size=0)
    assert c.parents_of_a_child > 1
    if size % c.parents_of_a_child:
        with pytest.raises(UserError, match=f"POPULATION_SIZE is {size}, not a multiple of GROUP_SIZE 2 .chosen."):
            prepare(c, tmp_path)
    else:
        assert all(len(group) > 1 for group in EDT(c).group_slots(2).values())
    assert config(population_size=size, selection="rank").parents_of_a_child == min(4, size)


def test_windows_cover_the_tokens_and_share_only_their_ends():
    tokens = TokenFile(np.arange(33), 9)
    assert [tokens.get(n).tolist() for n in range(tokens.windows)] == [[*range(8 * n, 8 * n + 9)] for n in range(4)]


def test_within_an_epoch_no_sequence_comes_twice_and_then_all_come_again():
    tokens = TokenFile(np.arange(17), 3)
    seen = [tuple(batch([tokens], [1.0], np.array([n]), 7)[0].tolist()) for n in range(16)]
    assert sorted(seen[:8]) == sorted(seen[8:]) and len({*seen}) == 8 and seen[:8] != seen[8:]


def test_sources_are_drawn_by_their_weights():
    sources = [TokenFile(np.full(99, n), 3) for n in range(3)]
    drawn = batch(sources, [1.0, 2.0, 5.0], np.arange(4000), 1)[:, 0]
    shares = [(drawn == n).float().mean().item() for n in range(3)]
    assert shares == pytest.approx([1 / 8, 2 / 8, 5 / 8], abs=0.03)


# -- rounds ------------------------------------------------------------------------------------------------------------


def test_rounds_grow_by_a_twentieth_of_what_came_before():
    c = config(inner_steps=16, first_inner_steps=1, max_generations=200)
    lengths = [c.steps_in(round) for round in range(1, 201)]
    assert lengths == sorted(lengths) and {*lengths} == {*range(1, 17)} and lengths[-80:] == [16] * 80
    assert [c.steps_before(round + 1) for round in range(200)] == [sum(lengths[:round]) for round in range(200)]
    for round, length in enumerate(lengths):
        assert length == min(16, max(1, sum(lengths[:round]) // 20))
    assert c.total_steps == sum(lengths)


@pytest.mark.parametrize("first", [5, 16, 1000])
def test_rounds_may_begin_longer(first):
    c = config(inner_steps=16, first_inner_steps=first, max_generations=90)
    assert c.steps_in(1) == min(first, 16) and c.steps_in(90) == 16
    assert first < 16 or [c.steps_before(n) for n in range(1, 91)] == [16 * n for n in range(90)]


@pytest.mark.parametrize("rounds, first", [(200, 1), (74, 1), (73, 2), (60, 2), (16, 8), (1, 8)])
def test_a_first_round_that_nobody_chose_is_the_least_that_grows_far_enough(tmp_path, rounds, first):
    c = found_from(config(inner_steps=8, first_inner_steps=0, max_generations=rounds), tmp_path)
    assert c.first_inner_steps == first and c.steps_in(rounds) == 8
    assert first == 1 or c.model_copy(update={"first_inner_steps": first - 1}).steps_in(rounds) < 8


def test_very_long_rounds_are_counted_at_once():
    c = config(inner_steps=10**7, first_inner_steps=1, max_generations=90_000)
    assert c.steps_in(90_000) == 10**7 and c.total_steps > 8 * 10**11


# -- the inner loop ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule, last", [("cosine", 0.1), ("linear", 0.0), ("constant", 1.0), ("trapezoid", 0.0)])
def test_the_learning_rate_rises_and_falls(schedule, last):
    c = config(lr=1.0, warmup_steps=10, **{**alone(100), "lr_schedule": schedule})
    assert [rate(c, 0), rate(c, 9), rate(c, 10)] == pytest.approx([0.1, 1.0, 1.0])
    assert rate(c, 100) == pytest.approx(last) and rate(c, 55) >= rate(c, 56) >= last
    assert schedule != "trapezoid" or [rate(c, 64), rate(c, 82)] == pytest.approx([1.0, 0.5])


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
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 257, (4, 17), generator=rng) for _ in range(count)]


@pytest.mark.parametrize("tied", [True, False])
def test_the_loop_trains_as_plain_pytorch_does(tied):
    entry = {"config": {**MODEL["config"], "tie_word_embeddings": tied}}
    ours, theirs = (built(entry, 257, 3) for _ in range(2))
    learner = Learner(ours, config(inner_optimizer="adamw", clip=1.0))
    [*learner.train(([tokens] for tokens in some_batches()), [1e-3] * 5)]
    plain(theirs, some_batches(), 1e-3)
    assert torch.allclose(learner.vector, flat(theirs, learner.layout), atol=2e-6)


def test_losses_add_up_exactly_wherever_a_training_was_interrupted():
    """Of ranks that share a model, each goes on with the mean of what all had added up."""
    learner, rng = Learner(built(MODEL, 257, 3), config()), torch.Generator().manual_seed(1)
    losses = (5 * torch.rand(2, 30, generator=rng)).float()

    def added(rank: int, first: int, last: int, total: float) -> float:
        learner.begin(total)
        for loss in losses[rank, first:last]:
            learner.total += loss
        return float(learner.total)

    calm = sum(added(rank, 0, 30, 0.0) for rank in range(2)) / 2
    assert calm == math.fsum(losses.double().flatten().tolist()) / 2
    for step in range(1, 30):
        so_far = sum(added(rank, 0, step, 0.0) for rank in range(2)) / 2
        assert sum(added(rank, step, 30, so_far) for rank in range(2)) / 2 == calm


def test_parts_of_a_batch_make_one_step():
    one, two = (Learner(built(MODEL, 257, 3), config()) for _ in range(2))
    (tokens,) = some_batches(1)
    [*one.train([[tokens]], [1e-3])]
    [*two.train([[*tokens.split(2)]], [1e-3])]
    assert torch.allclose(one.vector, two.vector, atol=1e-6)


def test_z_loss_keeps_the_logits_sums_near_one_and_counts_in_no_evaluation():
    plain, kept = (Learner(built(MODEL, 257, 3), config(z_loss=z)) for z in (0.0, 0.1))
    tokens = some_batches(1)[0]
    assert plain.eval_loss(tokens) == kept.eval_loss(tokens)
    logits = kept.model(input_ids=tokens[:, :-1]).logits
    nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    wanted = nats + 0.1 * logits.exp().sum(-1).log().square().mean()
    assert torch.allclose(kept.loss(tokens), wanted) and torch.allclose(kept.loss(tokens, [tokens] * 2), wanted / 2)
    for learner in (plain, kept):
        [*learner.train(([tokens] for _ in range(20)), [1e-2] * 20)]
    far, near = (each.model(input_ids=tokens).logits.logsumexp(-1).abs().mean() for each in (plain, kept))
    assert near < far - 1


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
    first = learner.vector[learner.layout.hidden :]
    assert model.get_input_embeddings().weight.data_ptr() == first.data_ptr()
    assert model.lm_head.weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("preset, least, most", [("14m", 9e6, 11e6), ("60m", 95e6, 110e6), ("150m", 210e6, 220e6)])
def test_presets_are_as_large_as_they_should_be(preset, least, most):
    with torch.device("meta"):
        model = built(preset, 32000, 1)
    assert least < sum(p.numel() for p in model.parameters()) < most


def test_different_shapes_are_named():
    wide = {"config": {**MODEL["config"], "intermediate_size": 64}}
    with pytest.raises(UserError, match=r"mlp.down_proj.weight: \[32, 48\] in a, \[32, 64\] in b"):
        same_shapes(layout_of(built(MODEL, 257, 1)), layout_of(built(wide, 257, 1)), "a", "b")


@pytest.mark.parametrize("kind", ["bert", "t5", "vit", "nonsense"])
def test_what_is_no_causal_model_is_refused(kind):
    with pytest.raises(UserError, match="causal|nonsense"):
        described({"config": {"model_type": kind}})


# -- genomes and families ----------------------------------------------------------------------------------------------


def test_a_child_inherits_from_the_fittest():
    fit, unfit = {"loss": 1.0, "genome_rate": 2.0}, {"loss": 2.0, "genome_rate": 0.5}
    assert inherited(config(), 0, 2, [unfit, fit]) == Genome(2.0)
    assert read({}, 2) == Genome(1.0, (1.0, 1.0))


def test_members_begin_with_rates_that_lie_evenly():
    c = config(population_size=4, lr_spread=8.0)
    assert [inherited(c, slot, 1, [{}]).rate_factor for slot in range(4)] == pytest.approx(
        [8**-0.5, 8 ** (-1 / 6), 8 ** (1 / 6), 8**0.5]
    )
    assert inherited(config(population_size=1, lr_spread=8.0), 0, 1, [{}]) == Genome()
    assert inherited(config(population_size=4), 3, 1, [{}]) == Genome()


def test_mutations_are_as_likely_and_as_far_as_said():
    c = config(mutation_probability=0.5, mutation_strength=0.1)
    drawn = [inherited(c, slot, 2, [{}]).rate_factor for slot in range(400)]
    changed = [math.log(rate) for rate in drawn if rate != 1.0]
    assert 0.4 < len(changed) / 400 < 0.6 and 0.08 < np.std(changed) < 0.12
    assert drawn == [inherited(c, slot, 2, [{}]).rate_factor for slot in range(400)] and len({*drawn}) > 150
    far = inherited(config(mutation_probability=1.0, mutation_strength=10.0), 1, 2, [{}])
    assert 0.25 <= far.rate_factor <= 4


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
    families = [edt.group_slots(generation) for generation in range(2, 6)]
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
        drawn = [id for n in range(500) for id in each.pick_parents(pool, np.random.default_rng(n))]
        counts[how] = drawn.count("1/m0") / drawn.count("1/m7") if drawn.count("1/m7") else math.inf
        assert all(len({*each.pick_parents(pool, np.random.default_rng(n))}) == 2 for n in range(20)), (
            "two different parents"
        )
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


@pytest.mark.parametrize("slots", [8, 16])
def test_diloco_plans_many_slots(slots):
    """A plan is checked as it was made, before anybody has read it: its shards name the same changes once."""
    c = config(algorithm="diloco", population_size=slots)
    ground = DiLoCo(c).plan(0, None)
    plan = DiLoCo(c).plan(1, SimpleNamespace(plan=lambda round: ground))
    found = recipes_in(record_of(plan))
    check(1, found)
    assert [recipe.parents for recipe in found] == [recipe.parents for recipe in plan]


def test_seeds_of_dropout_are_the_same_in_every_python():
    """Runs that were begun when hash() gave them go on with the same."""
    assert mixed(1, 7, 3, 25) == 6283318096337725456 and mixed(2**63 - 1, 0, 0, 0) == 7571275679603839956
    assert mixed(1, 7, 3, 25) != mixed(1, 7, 3, 26)
