"""Formulas, recipes, breeding: the pure part of evomerge; and merges of merges."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from evomerge import formula, variation
from evomerge.config import EvolutionSettings, MergeSettings, ModelReference
from evomerge.formula import Blend, Formula, Step, in_words, leaves, lighter, makeup
from evomerge.model_builder import ModelBuilder
from evomerge.techniques import MEAN, MERGED, recipes
from evomerge.tournament import ended_after
from evomerge.variation import Child, Pool, Scored, crossed, mutated, next_generation, ranked
from merge.engine import MergeOptions
from merge.merge_recipe import merge_of
from merge.merging import merge
from merge.tensor_files import UserError
from tests import merging
from tests.tournaments import models
from train.parent_selection import winner

NAMES = ("a", "b", "c")
WHERE = {"a": "/a", "b": "/b", "c": "/c"}


def pool(method: str = "ps_dfs", layers: int = 6, **settings) -> Pool:
    return Pool(MergeSettings(merge_method=method, **settings), NAMES, layers)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def blend(technique: str = "linear", of: tuple = ("a", "b"), **more) -> Blend:
    return Blend(technique=technique, of=of, shares=more.pop("shares", ((0.5,),) * len(of)), **more)


# -- the first generation ---------------------------------------------------------------------------------------------


def test_the_first_eight_are_all_combinations_of_the_techniques():
    made = variation.first(pool(), 8, 1)
    assert sorted(map(in_words, made)) == sorted(
        f"{a}+{b}+{c}" for a in ("linear", "slerp") for b in ("ties", "dare") for c in ("frankenmerge", "dfs")
    )
    assert all(set(one.models) == set(NAMES) for one in made)


@pytest.mark.parametrize("method", ["ps", "dfs", "ps_dfs"])
def test_no_two_of_the_first_make_the_same_model(method):
    for seed in range(40):
        made = [variation.weights_of(one) for one in variation.first(pool(method, layers=3), 8, seed)]
        assert all(one not in made[:n] for n, one in enumerate(made)), (seed, made)


def test_ps_has_two_settings_of_weights_for_each_pair():
    made = variation.first(pool("ps"), 8, 1)
    assert Counter(map(in_words, made)) == {f"{a}+{b}": 2 for a in ("linear", "slerp") for b in ("ties", "dare")}
    assert len({one.model_dump_json() for one in made}) == 8
    assert all(not one.path for one in made)


def test_dfs_has_eight_paths_and_no_blends():
    made = variation.first(pool("dfs", techniques=("dfs",)), 8, 1)
    assert all(one.blend is None and one.scaled for one in made)
    assert len({one.path for one in made}) == 8
    assert len({step.model for one in made for step in one.path}) == 3


def test_fewer_techniques_are_used_more_often_with_other_weights():
    made = variation.first(pool(techniques=("slerp", "dare", "dfs")), 8, 1)
    assert {in_words(one) for one in made} == {"slerp+dare+dfs"} and len({one.model_dump_json() for one in made}) == 8


def test_two_models_are_enough():
    where = {"a": "/a", "b": "/b"}
    for one in variation.first(Pool(MergeSettings(), ("a", "b"), 4), 8, 1):
        assert set(one.models) <= {"a", "b"}
        assert {name for each in recipes(one, where, "").values() for name in named(each)} <= {"/a", "/b"}


def named(recipe: dict) -> set[str]:
    """The models of a recipe, but for stages before it."""
    inputs = [*recipe.get("models", []), *(one for each in recipe.get("slices", []) for one in each["sources"])]
    return {each["model"] for each in inputs if each["model"].startswith("/")}


def test_the_seed_decides():
    assert (
        variation.first(pool("dfs"), 8, 1) == variation.first(pool("dfs"), 8, 1) != variation.first(pool("dfs"), 8, 2)
    )


# -- children ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ps", "dfs", "ps_dfs"])
def test_a_mutant_differs_and_keeps_what_it_is_made_of(method):
    e = EvolutionSettings(mutation_rate=0.05)  # even if nothing is hit at first
    for n, one in enumerate(variation.first(pool(method), 8, 1)):
        mutant = mutated(one, pool(method), e, rng(n))
        assert mutant != one and (mutant.blend is None) == (one.blend is None)
        assert bool(mutant.path) == bool(one.path) and mutant == mutated(one, pool(method), e, rng(n))


def test_mutants_of_mutants_stay_within_bounds():
    a, e = pool(layers=4), EvolutionSettings(mutation_rate=1, mutation_strength=5)
    for first in (variation.first(a, 8, 1)[n] for n in (0, 3, 5)):
        one = first
        for n in range(60):
            one = mutated(one, a, e, rng(n))
            assert 2 <= len(one.path) <= 6 and all(0 <= step.layer < 4 for step in one.path)
            for node in _blends(one.blend):
                assert 0 < node.density <= 1 and 0 < node.strength <= 4
                assert all(0 < share for shares in node.shares for share in shares)


def _blends(node):
    if isinstance(node, Blend):
        yield node
        for each in node.of:
            yield from _blends(each)


def test_each_setting_of_mutation_makes_a_difference():
    one = variation.first(pool(), 8, 1)[1]

    def distance(**e) -> float:
        settings = EvolutionSettings(**{"mutation_rate": 0.5, **e})
        shares = [mutated(one, pool(), settings, rng(n)).blend.shares[0][0] for n in range(50)]
        return sum(abs(np.log(share / one.blend.normed[0][0])) for share in shares)

    assert distance(mutation_strength=0.1) < distance(mutation_strength=0.6)
    assert distance(mutation_rate=0.1) < distance(mutation_rate=0.9)
    noisy = mutated(one, pool(), EvolutionSettings(weight_noise=0.1), rng())
    assert noisy.noise == 0.1 and mutated(one, pool(), EvolutionSettings(), rng()).noise == 0
    longest = [len(_grown(one, pool(longest_path=x)).path) for x in (1, 2)]
    assert longest[0] <= 6 < longest[1]
    assert len(variation.first(pool(points=5), 1, 1)[0].blend.shares[0]) == 5
    assert variation.first(pool(density=0.3), 1, 1)[0].blend.density == 0.3


def _grown(one: Formula, a: Pool) -> Formula:
    best = one
    for n in range(200):
        one = mutated(one, a, EvolutionSettings(mutation_rate=1), rng(n))
        best = max(best, one, key=lambda each: len(each.path))
    return best


def test_a_child_of_two_is_a_merge_of_them():
    one, other = variation.first(pool(), 8, 1)[:2]
    child, technique = crossed(one, other, pool(), EvolutionSettings(), rng())
    assert child.blend.of == (one.blend, other.blend) and technique == child.blend.technique
    assert {*child.path} <= {*one.path, *other.path}


def test_children_of_paths_have_their_parents_layers():
    one, other = (Formula(path=tuple(Step(model=name, layer=n) for n in range(6)), scaled=True) for name in "ab")
    for n in range(10):
        child, technique = crossed(one, other, pool("dfs"), EvolutionSettings(), rng(n))
        assert child.blend is None and {*child.path} <= {*one.path, *other.path}
        assert child.path not in (one.path, other.path) and technique == "dfs"
    assert crossed(one, one, pool("dfs"), EvolutionSettings(), rng())[0] != one  # nothing is made twice


def test_formulas_do_not_grow_for_ever():
    one, e = variation.first(pool(), 8, 1)[0], EvolutionSettings()
    for n in range(12):
        one = crossed(one, one, pool(), e, rng(n))[0]
        assert len([*leaves(one.blend)]) <= formula.MOST
    assert len([*leaves(one.blend)]) > 6


def test_the_heavier_part_of_a_large_blend_is_kept():
    small, large = blend(), blend(of=("a", "b", "c"))
    node = blend(of=(small, large), shares=((0.1,), (0.9,)))
    assert lighter(node, 5) == node and lighter(node, 4) == large and lighter(node, 1) == "a"


# -- who is chosen ----------------------------------------------------------------------------------------------------


def population(*scores: float | None) -> list[Scored]:
    made = variation.first(pool(), len(scores), 1)
    return [Scored(f"1/m{n}", one, score) for n, (one, score) in enumerate(zip(made, scores, strict=True))]


def test_the_best_first_failures_last():
    assert [one.id for one in ranked(population(1.0, None, 3.0, 1.0))] == ["1/m2", "1/m0", "1/m3", "1/m1"]
    equal = ranked(population(*[1.0] * 12))
    assert [one.id for one in equal] == [f"1/m{n}" for n in range(12)]


def test_larger_tournaments_are_won_by_better_ones():
    place = [np.mean([winner(8, size, rng(n)) for n in range(300)]) for size in (1, 2, 4, 8)]
    assert place[0] > place[1] > place[2] > place[3] == 0
    assert 3 < place[0] < 4


def test_a_generation_has_the_elite_mutants_of_winners_and_merges_of_the_lower_half():
    there = population(8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0)
    children = next_generation(there, pool(), EvolutionSettings(elite=2), [1, 2])
    assert [one.parents for one in children if one.carried] == [("1/m0",), ("1/m1",)]
    mutants = [one for one in children if one.technique == "mutation"]
    merges = [one for one in children if len(one.parents) == 2]
    assert len(children) == 8 and len(mutants) == 4 and len(merges) == 2
    assert all(parent in ("1/m4", "1/m5", "1/m6", "1/m7") for one in merges for parent in one.parents)
    assert next_generation(there, pool(), EvolutionSettings(elite=2), [1, 2]) == children
    assert next_generation(there, pool(), EvolutionSettings(elite=2), [1, 3]) != children
    assert len([one for one in next_generation(there, pool(), EvolutionSettings(elite=4), [1, 2]) if one.carried]) == 4
    assert len(next_generation(there, pool(), EvolutionSettings(population_size=12), [1, 2])) == 12


def test_who_alone_solves_something_is_a_parent():
    there = population(0.9, 0.9, 0.9, 0.9, 0.3, 0.2, 0.1, 0.1)
    solved = [{"t": [1, 1, 1, 0]}] * 4 + [{"t": [0, 0, 0, 1]}] + [{"t": [0, 0, 0, 0]}] * 3
    there = [replace(one, solved=each) for one, each in zip(there, solved, strict=True)]

    def born(**keys) -> list[Child]:
        settings = EvolutionSettings(elite=1, population_size=8, **keys)
        return [child for n in range(40) for child in next_generation(there, pool(), settings, [n], {"t": 1.0})]

    mutants = [
        [one.parents for one in born(selection=how) if one.technique == "mutation"] for how in ("score", "niches")
    ]
    by_score, by_niche = (each.count(("1/m4",)) for each in mutants)
    assert by_niche > 1.5 * by_score
    pairs = {frozenset(one.parents) for one in born(mates="attraction") if len(one.parents) == 2}
    crowd = {f"1/m{n}" for n in range(4)}
    assert pairs and all(len(pair & crowd) < 2 for pair in pairs), "they have nothing to add to each other"


def test_nothing_is_made_twice():
    there = population(8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0)
    for seed in range(20):
        children = next_generation(there, pool(), EvolutionSettings(mutation_rate=0.05), [seed])
        made = [variation.weights_of(one.formula) for one in children]
        old = [variation.weights_of(one.formula) for one in there[2:]]
        assert all(one not in made[:n] and one not in old for n, one in enumerate(made))


def test_who_failed_has_no_children():
    there = population(None, 7.0, None, None, None, None, None, None)
    children = next_generation(there, pool(), EvolutionSettings(), [1, 2])
    assert {parent for one in children for parent in one.parents} == {"1/m1"} and len(children) == 8


@pytest.mark.parametrize("scores, ended", [
    ([], None), ([[1], [2]], None), ([[1], [1], [1]], 3), ([[1], [2], [2]], None), ([[1], [2], [2], [2]], 4),
    ([[1], [2], [3], [4], [5]], 5), ([[1], []], 2), ([[1], [0], [2]], None),
])  # fmt: skip
def test_patience_and_an_end(scores, ended):
    assert ended_after(EvolutionSettings(patience=2, num_generations=5), scores) == ended


# -- formulas as data -------------------------------------------------------------------------------------------------


def test_a_formula_survives_json():
    for one in variation.first(pool(), 8, 1):
        assert Formula.model_validate(json.loads(one.model_dump_json())) == one


@pytest.mark.parametrize("what", [
    {}, {"path": [{"layer": 0}]}, {"blend": {"technique": "linear", "of": ["a"], "shares": [[1]]}},
    {"blend": {"technique": "magic", "of": ["a", "b"], "shares": [[1], [1]]}},
    {"blend": {"technique": "slerp", "of": ["a", "b", "c"], "shares": [[1], [1], [1]]}},
    {"blend": {"technique": "linear", "of": ["a", "b"], "shares": [[1], [1, 2]]}},
    {"blend": {"technique": "linear", "of": ["a", "b"], "shares": [[0], [0]]}},
    {"blend": {"technique": "linear", "of": ["a", "b"], "shares": [[-1], [2]]}},
    {"blend": {"technique": "ties", "of": ["a", "b"], "shares": [[1], [1]], "density": 2}},
    {"blend": "a", "path": [{"model": "b", "layer": -1}]}, {"blend": "a", "more": 1},
])  # fmt: skip
def test_what_is_no_formula_is_refused(what):
    with pytest.raises(ValidationError):
        Formula.model_validate(what)


def test_how_much_of_each_model_is_in_it():
    one = Formula(blend=blend(of=(blend(), "c"), shares=((1.0,), (3.0,))))
    assert makeup(one) == pytest.approx({"a": 1 / 8, "b": 1 / 8, "c": 3 / 4})
    half = Formula(blend=one.blend, path=(Step(layer=0), Step(model="a", layer=1)))
    assert makeup(half) == pytest.approx({"a": 1 / 16 + 1 / 2, "b": 1 / 16, "c": 3 / 8})


def test_the_stages_of_a_recipe_come_in_their_order():
    found = recipes(variation.first(pool(), 8, 1)[0], WHERE, "/base")
    assert [each["merge_method"] for each in found.values()] == ["linear", "ties", "passthrough"]
    assert [*found][-1] == MERGED and found["blend"]["base_model"] == "/base"
    without = recipes(variation.first(pool(), 8, 1)[0], WHERE, "")
    assert without["blend"]["base_model"] == MEAN and without[MEAN]["merge_method"] == "linear"


def test_steps_in_a_row_are_one_slice():
    path = (Step(layer=0), Step(layer=1), Step(model="a", layer=2), Step(layer=3, scale=0.5), Step(layer=4, scale=0.5))
    found = recipes(Formula(blend="b", path=path), WHERE, "")[MERGED]["slices"]
    assert [each["sources"][0]["layer_range"] for each in found] == [[0, 2], [2, 3], [3, 5]]
    assert [each["sources"][0]["model"] for each in found] == ["/b", "/a", "/b"]
    assert found[2]["sources"][0]["parameters"] == {"residual": 0.5}


@pytest.mark.parametrize("text", [
    "{", "[]", '{"models": {}}', '{"formula": {"blend": "a"}, "models": {}, "base": ""}',
    '{"formula": {"blend": "a"}, "models": ["a"], "base": ""}', '{"formula": 3, "models": {}, "base": ""}',
])  # fmt: skip
def test_a_broken_file_beside_a_model_is_refused(tmp_path, text):
    (tmp_path / formula.FILE).write_text(text)
    with pytest.raises(UserError, match="evomerge.json"):
        formula.read(tmp_path)


# -- made -------------------------------------------------------------------------------------------------------------


def builder(there: list[ModelReference], **more) -> ModelBuilder:
    return ModelBuilder({model.name: model.path for model in there}, "", threads=1, **more)


def test_a_merge_of_merges_is_what_their_folders_would_give(tmp_path):
    there = models(tmp_path)
    names = tuple(model.name for model in there)
    where = {model.name: model.path for model in there}
    one = variation.first(Pool(MergeSettings(), names, 4), 8, 1)[5]
    with builder(there) as shop:
        shop.write(one, tmp_path / "at once")
    for name, recipe in recipes(one, where, "").items():  # each stage in a folder of its own, as names say
        text = json.dumps(recipe)
        for stage in ("stage-1", "stage-2", "blend", MEAN):
            text = text.replace(f'"{stage}"', f'"{tmp_path}/{stage}"')
        merge(merge_of(json.loads(text), ""), tmp_path / name)
    whole, parts = merging.weights(tmp_path / "at once"), merging.weights(tmp_path / MERGED)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_techniques_make_models(tmp_path, tied, dtype):
    """Grouped-query attention, tied and untied embeddings, whole and half numbers; in memory as in folders."""
    there = models(tmp_path, dtype=dtype, tie_word_embeddings=tied)
    names = tuple(model.name for model in there)
    ways = [Pool(MergeSettings(merge_method=method), names, 4) for method in ("ps", "dfs", "ps_dfs")]
    chosen = ((0, 3), (0, 1), (1, 2, 4, 7))  # each technique of a stage beside each of another one
    formulas = [variation.first(way, 8, 1)[n] for way, numbers in zip(ways, chosen, strict=True) for n in numbers]
    e = EvolutionSettings(mutation_rate=0.9, weight_noise=0.01)
    children = [mutated(formulas[n], ways[2], e, rng(3)) for n in (1, 5)]
    tokens = torch.arange(12)[None]
    with builder(there) as shop, torch.no_grad():
        for n, one in enumerate([*formulas, *children]):
            live = shop.model(one)
            said = live.model(tokens).logits
            shop.write(one, tmp_path / f"out{n}")
            folder = merging.AutoModelForCausalLM.from_pretrained(tmp_path / f"out{n}", dtype="auto")
            assert folder.dtype == dtype and folder.config.num_hidden_layers == max(len(one.path), 4 * (not one.path))
            assert torch.isfinite(said).all() and torch.equal(folder(tokens).logits, said), in_words(one)
            assert formula.read(tmp_path / f"out{n}") == (one, {name: shop.models[name] for name in one.models}, "")


def test_noise_is_scaled_to_each_tensors_spread(tmp_path):
    there = models(tmp_path)
    plain, noisy = Formula(blend="model0"), Formula(blend="model0", noise=0.1, seed=3)
    with builder(there) as shop:
        for name, one in (("plain", plain), ("noisy", noisy), ("again", noisy)):
            shop.write(one, tmp_path / name)
        shop.write(noisy.model_copy(update={"seed": 4}), tmp_path / "other")
    found = {name: merging.weights(tmp_path / name) for name in ("plain", "noisy", "again", "other")}
    for name, tensor in found["plain"].items():
        by = (found["noisy"][name] - tensor).std() / tensor.std()
        assert by == pytest.approx(0.1, rel=0.3) and torch.equal(found["noisy"][name], found["again"][name])
        assert not torch.equal(found["noisy"][name], found["other"][name])


def test_a_scale_acts_on_what_a_layer_adds(tmp_path):
    there = models(tmp_path, 1)
    path = tuple(Step(layer=n, scale=1.0 if n else 0.0) for n in range(4))
    skipped = tuple(Step(layer=n) for n in range(1, 4))
    with builder(there) as shop, torch.no_grad():
        one = shop.model(Formula(blend="model0", path=path, scaled=True)).model(torch.arange(8)[None]).logits
        other = shop.model(Formula(blend="model0", path=skipped)).model(torch.arange(8)[None]).logits
    assert torch.allclose(one, other, atol=1e-5)


def test_what_comes_before_the_last_stage_is_forgotten_tensor_by_tensor(tmp_path):
    there = models(tmp_path)
    names = tuple(model.name for model in there)
    one = variation.first(Pool(MergeSettings(), names, 4), 8, 1)[0]
    with builder(there) as shop:
        said, made, donors = shop.planned(one)
        held = []

        def look(bytes: int, total: int) -> None:
            caches = [each.done.__self__ for donor in donors._open.values() for each in donor.tensors.values()
                      if getattr(each.done, "__self__", None) is not None]  # fmt: skip
            held.append(sum(map(len, caches)))

        merge(said, tmp_path / "out", how=MergeOptions(threads=1), donors=donors, progress=look)
    assert max(held) <= 3 and held[-1] == 0  # the blend, the first stage, the mean


def test_a_path_goes_through_several_models(tmp_path):
    there = models(tmp_path)
    path = tuple(Step(model=f"model{n % 3}", layer=n) for n in range(4))
    with builder(there) as shop:
        shop.write(Formula(path=path), tmp_path / "out")
    out = merging.weights(tmp_path / "out")
    for n in range(4):
        name = f"model.layers.{n}.mlp.down_proj.weight"
        assert torch.equal(out[name], merging.weights(tmp_path / f"model{n % 3}")[name])


@pytest.mark.parametrize("called", ["merged", "blend", MEAN, "stage-1", "model merged", "with-noise", "without-noise"])
def test_a_model_may_be_called_like_a_stage(tmp_path, called):
    """A folder is easily called `merged`."""
    there = models(tmp_path, 2)
    for name in ("usual", called):
        inner = Blend(technique="ties", of=("other", name), shares=((1.0,), (1.0,)))
        whole = Blend(technique="linear", of=(inner, name), shares=((1.0,), (1.0,)))
        path = (Step(layer=0), Step(model=name, layer=1), Step(layer=2), Step(model="other", layer=3))
        with ModelBuilder({"other": there[0].path, name: there[1].path}, "", threads=1) as shop:
            shop.write(Formula(blend=name), tmp_path / f"{name} alone")
            shop.write(Formula(blend=whole, path=path, noise=0.1), tmp_path / f"{name} blended")
    for kind in ("alone", "blended"):
        one, other = (merging.weights(tmp_path / f"{name} {kind}") for name in ("usual", called))
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
