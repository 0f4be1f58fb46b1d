"""Whatever evolution comes to, the merge engine takes it: genomes of all four users, at any strength."""

import itertools
import math

import numpy as np
import pytest
import torch

from evomerge.config import EvolutionSettings, MergeSettings
from evomerge.techniques import recipes
from evomerge.variation import Pool, Scored, first, next_generation
from merge.evolve.search_config import MergeGenome
from merge.evolve.search_space import GENES, Space
from merge.merge_recipe import merge_of
from merge.methods import METHODS
from merge.methods.checks import check_shares
from merge.methods.weighted_sums import slerp_all
from merge.parameters import MENDERS, check_names, resolved, within
from merge.tensor_group import Group, in_memory
from train import pretraining_genome as pretraining
from train.member import posttraining_genome
from train.posttrain.posttrain_config import PosttrainConfig
from train.training_config import TrainConfig

NAMES = ("model.embed_tokens.weight", "model.layers.{}.self_attn.q_proj.weight", "model.layers.{}.mlp.up_proj.weight")
STRENGTHS = (0.5, 10.0)


def passes(recipe: dict) -> list[tuple[str, dict]]:
    """The engine's own checks, for all tensors of models with few layers and with many."""
    said, found = merge_of(recipe, ""), []
    check_names(said)
    method = METHODS[said.method]
    for part in said.slices:
        base = (part.base_model or said.base_model) if method.base != "none" else None
        others = [one for one in part.inputs if one.model != base]
        for layers, name in itertools.product((1, 2, 7), NAMES):
            for n in range(layers):
                named = [name.format(n)] * len(others)
                t = n / (layers - 1) if layers > 1 else 1.0
                found.append((said.method, resolved(said, part.parameters, others, named[0], named, t)))
    return found


def makes_something(method: str, told: dict) -> None:
    """It is merged for real."""
    rng = torch.Generator().manual_seed(7)
    several = [in_memory(torch.randn(6, 8, generator=rng)) for _ in range(4)]
    each = [value for key, value in told.items() if METHODS[method].params[key].each]
    count = len(each[0]) if each else METHODS[method].most or 2
    base = None if METHODS[method].base == "none" else several[3]
    group = Group((6, 8), several[:count], base, "x", tuple(map(str, range(count))))
    merged = torch.cat([*METHODS[method].load()(group, told)])
    assert merged.shape == (6, 8) and torch.isfinite(merged).all(), (method, told)


# -- post-training: curves that are bent -------------------------------------------------------------------------------

LIKELY = {"weight": [0.1, 0.6, 0.5], "density": [0.9, 0.4, 0.6], "t": [0, 0.5, 1], "gamma": 0.02, "lambda": 1.2}


def stepped(value, first: float):
    """A list jumps at split points from one value to the next."""
    if not isinstance(value, list):
        return value
    return {"split": [first + n / 10 for n in range(len(value) - 1)], "value": value}


CURVES = {
    **{"plain": lambda key, value: value},
    **{"flat": lambda key, value: value[1] if isinstance(value, list) else value},
    **{"filters": lambda key, value: [{"filter": "mlp", "value": value}, {"value": 0.5 if key != "epsilon" else 0.2}]},
    **{"other-filters": lambda key, value: [{"filter": f"{'mlp' if key == 'epsilon' else 'self'}", "value": value},
                                            {"value": 0.5 if key != "epsilon" else 0.2}]},
    **{"steps": lambda key, value: stepped(value, 0.3)},
    **{"other-steps": lambda key, value: stepped(value, 0.7 if key == "epsilon" else 0.2)},
    **{"no-catch-all": lambda key, value: [{"filter": "mlp", "value": value}] if key == "epsilon" else value},
    **{"text": lambda key, value: str(value) if isinstance(value, float) else value},
}  # fmt: skip


def told(method: str, curves: str) -> dict:
    params = METHODS[method].params
    epsilon = {"text": 0.05, "plain": [0.05, 0.1, 0.02, 0.01], "flat": None}.get(curves, [0.05, 0.1])
    likely = {**LIKELY, **({"epsilon": epsilon} if epsilon is not None else {})}
    usual = {key: likely.get(key, param.default) for key, param in params.items() if key in likely or curves == "plain"}
    return {key: value if isinstance(value, bool) else CURVES[curves](key, value) for key, value in usual.items()}


@pytest.mark.parametrize("method", [name for name in METHODS if name != "passthrough"])
def test_curves_of_post_training_stay_within_what_methods_allow(method):
    for curves, strength in itertools.product(CURVES, STRENGTHS):
        c = PosttrainConfig(
            algorithm="edt-evomerge", initial_population=("a", "b", "c"), mutation="sft", mutation_datasets=("d", "e"),
            mutation_strength=strength, crossover_evolves=True, mutation_probability=0.8,
            crossover={"method": method, **({"base_model": "z"} if METHODS[method].base == "required" else {}),
                       **told(method, curves)},
        )  # fmt: skip
        rng = np.random.default_rng(len(curves))
        population = [posttraining_genome.unmutated(c), *(posttraining_genome.first_genome(c, rng) for _ in range(3))]
        for _ in range(4):
            pairs = [rng.choice(4, 2, replace=False) for _ in range(4)]
            population = [posttraining_genome.child(c, [population[n] for n in pair], rng) for pair in pairs]
            for genome in population:
                checked = passes(posttraining_genome.crossed(c, ["a", "b"], genome, "z"))
                assert all(0.1 <= genome["rate"] <= 10 for genome in population)
        makes_something(*checked[-1])


def test_della_ran_out_of_its_limits_in_most_runs():
    """What it was mended for: both curves on their own leave the other's room."""
    bent = {"density": [0.97, 0.5, 0.02], "epsilon": [0.15, 0.6, 0.1]}
    with pytest.raises(ValueError, match="must lie in"):
        passes(of("della", bent))
    (mended,) = within("della", [bent])
    passes(of("della", mended))
    assert mended["density"] == bent["density"] and mended["epsilon"] == [0.99 * (1 - 0.97), 0.99 * 0.5, 0.99 * 0.02]


def of(method: str, parameters: dict) -> dict:
    models = [{"model": name, "parameters": {"weight": 0.5}} for name in "ab"]
    return {"merge_method": method, "base_model": "z", "models": models, "parameters": parameters}


# -- the merge search: any point ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", GENES)
def test_every_point_of_a_search_is_a_recipe_that_passes(method):
    kinds = [
        *({"normalize": True}, {"layer_granularity": 1}, {"allow_negative_weights": True}),
        {"layer_granularity": 2, "smooth": True, "filters": ("mlp",)},
        {"layer_granularity": 2, "smooth": True, "normalize": False},
        *({"layer_splits": 3}, {"layer_splits": 1, "filters": ("mlp",)}),
    ]
    rng, made = np.random.default_rng(3), 0
    for kind in kinds:
        try:
            based = {"base_model": "z"} if METHODS[method].base == "required" and method != "slerp" else {}
            models = ("a", "b") if method == "nuslerp" else ("a", "b", "c")
            space = Space(MergeGenome(models=models, merge_method=method, **based, **kind), 4)
        except ValueError:
            continue  # a kind that this method does not know
        for strength in (1e-9, 0.5, 1e9):
            points = strength * rng.standard_normal((3, space.size))
            edges = [np.zeros(space.size), np.ones(space.size), -np.ones(space.size), rng.integers(-1, 2, space.size)]
            for point in [*points, *edges, np.resize([1.0, -1.0], space.size)]:
                checked, made = passes(space.recipe(point)), made + 1
        makes_something(*checked[-1])
    assert made > 20


# -- tournaments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strength", STRENGTHS)
def test_formulas_of_tournaments_pass(strength):
    settings = MergeSettings(points=3)
    e = EvolutionSettings(population_size=12, mutation_rate=1.0, mutation_strength=strength)
    pool, rng = Pool(settings, ("a", "b", "c"), 4), np.random.default_rng(5)
    formulas = first(pool, e.population_size, 1)
    for generation in range(5):
        for formula in formulas:
            for recipe in recipes(formula, {name: name for name in "abc"}, "").values():
                checked = passes(recipe)
        ranked = [Scored(f"{generation}/m{n}", each, float(rng.random())) for n, each in enumerate(formulas)]
        formulas = [child.formula for child in next_generation(ranked, pool, e, [1, generation])]
    assert checked


# -- pre-training ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strength", STRENGTHS)
def test_genomes_of_pre_training_stay_near(strength):
    c = TrainConfig(algorithm="edt", mutation_probability=1.0, mutation_strength=strength, datasets=("a", "b"))
    parents = [{}]
    for round in range(1, 60):
        genomes = [pretraining.inherited(c, slot, round, parents) for slot in range(4)]
        for genome in genomes:
            assert 0.25 <= genome.rate_factor <= 4
            assert all(0.1 <= share <= 10 for share in genome.shares)
        parents = [{**genome.metrics(), "loss": float(n)} for n, genome in enumerate(genomes)]
    rng = np.random.default_rng(1)
    for count in (1, 2, 4, 64):
        shares = [float(x) for x in rng.dirichlet(np.ones(count))]
        check_shares({"weight": shares})
        assert torch.isfinite(slerp_all([torch.randn(4) for _ in shares], shares)).all()


# -- the one function --------------------------------------------------------------------------------------------------


def test_what_is_allowed_stays_as_it_is():
    for method, spec in METHODS.items():
        for curves in CURVES:
            given = told(method, curves)
            if "epsilon" in given or "density" not in given or "epsilon" not in spec.params:
                given = {key: value for key, value in given.items() if key not in ("density", "epsilon")}
                assert repr(within(method, [given])) == repr([given])
    for density, epsilon in (([0.5, 0.9], [0.4, 0.05]), (0.5, 0.49), ([0.3, 0.5], 0.2), (0.4, [0.1, 0.2, 0.3])):
        assert within("della", [{"density": density, "epsilon": epsilon}]) == [{"density": density, "epsilon": epsilon}]
    assert within("della", [{"density": 0.5}]) == [{"density": 0.5}] and within("della", [{}]) == [{}]
    assert within("della", [{"density": 0.9}])[0]["epsilon"] == pytest.approx(0.099)
    assert within("linear", [{"weight": -2}, {"weight": 0}]) == [{"weight": -2}, {"weight": 0}]
    assert within("linear", [{"weight": 0.0}] * 2, {"normalize": False}) == [{"weight": 0.0}] * 2


def test_weights_that_cancel_each_other_out_count_by_their_size():
    mended = within("linear", [{"weight": [0.5, 0.3]}, {"weight": [0.5, -0.3]}])
    assert mended == [{"weight": [0.5, 0.3]}, {"weight": [0.5, 0.3]}]
    (one, other) = within("karcher", [{"weight": [0.0, -1.0]}, {"weight": 0.0}])
    check_shares({"weight": (one["weight"][0], other["weight"])})
    check_shares({"weight": (one["weight"][1], other["weight"])})


def test_numbers_without_a_limit_go_only_so_far():
    (found,) = within("ties", [{"weight": [1e300, -math.inf], "lambda": 1e9, "density": "-3", "normalize": True}])
    assert found == {"weight": [100.0, -100.0], "lambda": 100.0, "density": 0, "normalize": True}
    assert within("karcher", [{"max_iter": 0.7}])[0]["max_iter"] == 1


def test_every_relation_between_parameters_has_what_mends_it():
    checks = {spec.check for spec in METHODS.values()}
    assert {check for check in checks if check.__name__ != "<lambda>"} == {*MENDERS}
