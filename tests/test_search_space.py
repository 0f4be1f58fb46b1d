"""The search for the best merge, in itself: points and the recipes they stand for, and CMA-ES as a pure function."""

from typing import get_args

import numpy as np
import pytest

from fleet.run_config import UserError
from merge import layer_splits
from merge.evolve.cma_es import CmaState, Generation, Search
from merge.evolve.records import text_of
from merge.evolve.search_config import METHODS, MergeGenome
from merge.evolve.search_space import Space
from merge.merge_recipe import merge_of, parse
from tests.searching import space


@pytest.mark.parametrize("method", get_args(METHODS))
def test_every_method_has_a_recipe_that_the_engine_reads(method):
    for more in ({}, {"layer_granularity": 2}, {"layer_splits": 1}):
        one = space(method, **more)
        assert one.size == len(one.start()) == np.prod(one.shape) + ("layer_splits" in more)
        rng = np.random.default_rng(0)
        for _ in range(20):
            recipe = one.recipe(rng.normal(size=one.size))
            read = parse(text_of(recipe))
            assert read.method == method and len(read.slices) == (2 if more else 1)
            assert merge_of(recipe, "").slices == read.slices  # text and data say the same, to the bit


def test_the_layout_of_coordinates():
    one = space("ties", 6, layer_granularity=3, filters=("mlp",))
    assert one.shape == (2, 3, 2, 2)
    recipe = one.recipe([float(n) / 100 for n in range(one.size)])
    second = recipe["slices"][1]["sources"][2]
    assert second["model"] == "c" and second["layer_range"] == [3, 6]
    assert second["parameters"] == {
        "weight": [{"filter": "mlp", "value": 0.20}, {"value": 0.22}],
        "density": [{"filter": "mlp", "value": 0.21}, {"value": 0.23}],
    }
    assert recipe["base_model"] == "base" and "parameters" not in recipe


def test_weights_and_densities_are_brought_into_their_ranges():
    point = [-0.5, -1.5, 0.25, 0.5, 0.0, -0.25]
    given = [each["parameters"] for each in space("ties").recipe(point)["models"]]
    assert given == [
        {"weight": 0.5, "density": 1.0},
        {"weight": 0.25, "density": 0.5},
        {"weight": 0.0, "density": 0.25},
    ]
    given = space("ties", allow_negative_weights=True).recipe(point)["models"][0]["parameters"]
    assert given == {"weight": -0.5, "density": 1.0}


def test_every_field_of_the_genome_changes_the_recipe():
    plain = space("linear").recipe([0.1, 0.2, 0.3])
    assert [each["parameters"]["weight"] for each in plain["models"]] == [0.1, 0.2, 0.3]
    assert space("linear", normalize=False).recipe([0.1, 0.2, 0.3])["parameters"] == {"normalize": False}
    assert space("linear", tokenizer_source="union").recipe([0.1, 0.2, 0.3])["tokenizer_source"] == "union"
    assert (plain["dtype"], plain.get("out_dtype")) == ("float32", None)
    typed = space("linear", dtype="bfloat16", out_dtype="float16").recipe([0.1, 0.2, 0.3])
    assert (typed["dtype"], typed["out_dtype"]) == ("bfloat16", "float16")
    smooth = space("linear", layer_granularity=2, smooth=True).recipe([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert [each["parameters"]["weight"] for each in smooth["models"]] == [[0.1, 0.4], [0.2, 0.5], [0.3, 0.6]]
    assert "base_model" not in plain and space("ties").recipe([0.1] * 6)["base_model"] == "base"


def test_slerp_takes_the_two_strongest_of_each_group():
    recipe = space("slerp", layer_granularity=2).recipe([0.1, -0.6, 0.2, 0.5, 0.5, 0.1])
    first, second = recipe["slices"]
    assert (first["base_model"], [each["model"] for each in first["sources"]]) == ("b", ["b", "c"])
    assert first["parameters"]["t"] == pytest.approx(0.25) and second["parameters"]["t"] == 0.5
    assert [each["model"] for each in second["sources"]] == ["a", "b"]


def test_starting_points():
    assert space("linear").start() == [1 / 3] * 3
    assert space("ties").start() == [1 / 3, 0.7] * 3
    assert space("linear").start(5) == space("linear").start(5) != space("linear").start(6)


def test_a_granularity_that_does_not_divide_the_layers():
    with pytest.raises(
        UserError, match=r"layer_granularity is 4, which does not divide the models' 6 layers.*1, 2, 3, 6"
    ):
        space("linear", 6, layer_granularity=4)


def test_split_points_are_coordinates_behind_all_others():
    one = space("linear", 6, layer_splits=2)
    assert one.size == 3 * 3 + 2 and one.start()[-2:] == [1 / 3, 2 / 3]
    weights = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]

    def parts(*places: float) -> list[tuple[list[int], float]]:
        recipe = one.recipe([*weights, *places])
        first = (each["sources"][0] for each in recipe["slices"])
        return [(each["layer_range"], each["parameters"]["weight"]) for each in first]

    assert parts(0.3, 0.7) == [([0, 2], 0.1), ([2, 4], 0.4), ([4, 6], 0.7)]
    assert parts(0.7, 0.3) == parts(0.3, 0.7)
    assert parts(0.2, 0.6) == [([0, 1], 0.1), ([1, 3], 0.4), ([3, 6], 0.7)]  # a layer at a split point lies behind it
    assert parts(0.5, 0.55) == [([0, 3], 0.1), ([3, 6], 0.7)]  # no layer between the two
    assert parts(-0.2, 7) == [([0, 1], 0.1), ([1, 5], 0.4), ([5, 6], 0.7)]
    assert [each["parameters"]["weight"] for each in one.recipe([*weights, 0, 0])["models"]] == [0.7, 0.8, 0.9]


def test_every_place_between_two_layers_is_equally_likely():
    places = np.linspace(0, 1, 10_001)[1:]
    first = [behind for each in places for _, _, behind in layer_splits.parts([each], 6)[:1]]
    assert {n: first.count(n) for n in range(7)} == {0: 0, **dict.fromkeys(range(1, 6), 2000), 6: 0}


def test_slerp_takes_the_two_strongest_between_split_points():
    recipe = space("slerp", layer_splits=1).recipe([0.1, -0.6, 0.2, 0.5, 0.5, 0.1, 0.4])
    first, second = recipe["slices"]
    assert [each["layer_range"] for each in first["sources"]] == [[0, 2]] * 2
    assert [each["layer_range"] for each in second["sources"]] == [[2, 4]] * 2
    assert (first["base_model"], second["base_model"]) == ("b", "a")


def test_more_split_points_than_places_between_layers():
    assert space("linear", 3, layer_splits=2).size == 11
    with pytest.raises(UserError, match="layer_splits is 3; between the models' 3 layers are 2 places"):
        space("linear", 3, layer_splits=3)


def bowl(point) -> float:
    return -sum((x - 0.8) ** 2 for x in point)


def run_search(one: Search, generations: int, score=bowl) -> list[Generation]:
    past: list[Generation] = []
    for _ in range(generations):
        points = one.next(past)
        past.append(Generation(points, [score(point) for point in points]))
    return past


def test_the_search_finds_its_way_and_is_a_pure_function(tmp_path, monkeypatch):
    one = Search((0.3,) * 4, 1 / 6, 0, 3)
    whole = run_search(one, 30)
    assert max(whole[-1].scores) > -1e-3 > max(whole[0].scores)
    np.random.seed(99)  # others' randomness plays no part, neither does a file of commands that lies about
    np.random.rand(17)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cma_signals.in").write_text("{'maxiter': 0, 'ftarget': 1e9}")
    told = CmaState(one)
    for n in (0, 1, 7, 24):
        assert Search((0.3,) * 4, 1 / 6, 0, 3).next(whole[:n]) == [list(point) for point in whole[n].points]
        for _ in range(2):  # nor if it is the same process that heard the generations before, or is asked twice
            assert one.next(whole[:n], told) == [list(point) for point in whole[n].points]
    assert Search((0.3,) * 4, 1 / 6, 0, 4).next([]) != Search((0.3,) * 4, 1 / 6, 0, 3).next([])
    assert Search((0.3,) * 4, 1 / 6, 0, 0).next([]) == Search((0.3,) * 4, 1 / 6, 0, 0).next([])  # 0 is no clock


def candidates_until(layers: int, boundary: int, seed: int, **how) -> int:
    """It is one model before a boundary and another one behind it: how many a search tries until it is nearly there."""
    one = Space(MergeGenome(models=("a", "b"), merge_method="linear", **how), layers)
    wanted, search, past = np.arange(layers) < boundary, Search(tuple(one.start()), 1 / 6, 0, seed), []
    told = CmaState(search)

    def score(point) -> float:
        shares = []
        for part in merge_of(one.recipe(point), "").slices:
            first, second = (each.parameters["weight"][0].values[0] for each in part.inputs)
            begin, end = part.inputs[0].layers or (0, layers)
            shares += [first / (first + second)] * (end - begin)
        return -float(np.square(np.array(shares) - wanted).mean())

    while not past or max(past[-1].scores) < -0.01:
        points = search.next(past, told)
        past.append(Generation(points, [score(point) for point in points]))
    return sum(len(each.points) for each in past)


@pytest.mark.parametrize("boundary", [3, 7, 18])
def test_split_points_find_a_boundary_with_fewer_candidates_than_layers_with_weights_of_their_own(boundary):
    found = [candidates_until(24, boundary, seed, layer_splits=1) for seed in range(3)]
    single = [candidates_until(24, boundary, seed, layer_granularity=1) for seed in range(3)]
    assert 2 * max(found) < min(single)


def test_options_of_the_search():
    small, large = (Search((0.3,) * 4, sigma, 0, 3).next([]) for sigma in (0.01, 1.0))
    assert np.std(large) > 20 * np.std(np.array(small))
    assert len(Search((0.3,) * 4, 1.0, 17, 3).next([])) == 17
    assert Search((0.3,) * 4, 1.0, 0, 3).population == 8 and Search((0.3,) * 40, 1.0, 0, 3).population == 15


def test_what_failed_ranks_last():
    one = Search((0.3,) * 3, 0.3, 8, 1)
    points = one.next([])
    scores = [bowl(point) for point in points]
    failed = [None if n < 3 else score for n, score in enumerate(scores)]
    worst = [min(scores) - 10 if n < 3 else score for n, score in enumerate(scores)]
    assert one.next([Generation(points, failed)]) == one.next([Generation(points, worst)])
    assert one.next([Generation(points, [None] * 8)])  # all of them


@pytest.mark.parametrize("size", [3, 64])
def test_a_machine_that_rounds_differently_proposes_the_same(size, monkeypatch):
    """Sums in another order, another library: seen between two processes of one machine."""
    one = Search((0.3,) * size, 0.3, 0, 1)
    past, usual, rng = run_search(one, 4), np.linalg.eigh, np.random.default_rng(1)

    def elsewhere(matrix):
        order = rng.permutation(len(matrix))
        values, vectors = usual(matrix[np.ix_(order, order)])
        return values, vectors[np.argsort(order)] * rng.choice([-1, 1], len(matrix))

    here = CmaState(one)
    monkeypatch.setattr(np.linalg, "eigh", elsewhere)
    there = CmaState(one)
    for generation in past:
        here.tell(generation)
        there.tell(generation)
    assert not np.array_equal(here.asked(), there.asked())
    for n in range(4):
        assert one.next(past[:n]) == past[n].points
