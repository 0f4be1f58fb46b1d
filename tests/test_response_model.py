"""Item response theory: what was planted is found again, intervals hold what they promise, few questions say most."""

from dataclasses import replace

import numpy as np
import pytest

from train.response_model import ResponseModel, estimated, fitted, informative, widened


def planted(rng: np.random.Generator, items: int, abilities: int = 1) -> ResponseModel:
    others = 0.6 * rng.standard_normal((items, abilities - 1))
    slopes = np.column_stack([np.exp(0.3 * rng.standard_normal(items)), others])
    return ResponseModel(slopes, rng.standard_normal(items))


def answered(model: ResponseModel, people: int, rng: np.random.Generator) -> np.ndarray:
    chances = model.chances(rng.standard_normal((people, model.slopes.shape[1])))
    return (rng.random(chances.shape) < chances).astype(float)


def test_planted_items_are_found_again():
    rng = np.random.default_rng(0)
    model = planted(rng, 30)
    found = fitted(answered(model, 1500, rng), abilities=1)
    assert found.slopes.dtype == np.float64
    assert np.abs(found.intercepts - model.intercepts).max() < 0.3
    assert np.abs(found.slopes - model.slopes).max() < 0.4
    assert np.corrcoef(found.slopes[:, 0], model.slopes[:, 0])[0, 1] > 0.9


def test_a_second_ability_tells_who_knows_what():
    """Half of the items are known by some models, the other half by the others."""
    rng = np.random.default_rng(1)
    model = ResponseModel(np.column_stack([np.full(40, 0.7), np.repeat([2.0, -2.0], 20)]), np.zeros(40))
    found = fitted(answered(model, 60, rng))
    one, other = [3, 7, 11], [23, 27, 31]
    said = estimated(found, np.full(40, 1 / 40), [*one, *other], np.array([1.0] * 3 + [0.0] * 3))
    assert said.marks[:20].mean() > 0.7 and said.marks[20:].mean() < 0.3


@pytest.mark.parametrize("people, abilities", [(12, 1), (12, 2), (40, 2)])
def test_intervals_hold_what_they_promise(people, abilities):
    """95 of 100 that no question knows yet, be they calibrated by a dozen models."""
    items, count, inside, off, plain = 100, 16, list[bool](), list[float](), list[float]()
    weights, questions = np.full(items, 1 / items), np.arange(items)
    for seed in range(5):
        rng = np.random.default_rng([seed, people, abilities])
        answers = answered(planted(rng, items, abilities), people + 25, rng)
        model = fitted(answers[:people])
        model = replace(model, widening=widened(answers[:people], weights, questions, count))
        chosen = informative(model, weights, questions, count, rng.permutation(items)[: 4 * count])
        some = rng.permutation(items)[:count]
        for one in answers[people:]:
            found = estimated(model, weights, chosen, one[chosen])
            off.append(found.value - one.mean())
            inside.append(abs(off[-1]) < 1.96 * found.error)
            plain.append(one[some].mean() - one.mean())
    assert 0.9 < np.mean(inside) <= 1
    assert np.mean(np.square(off)) < 0.8 * np.mean(np.square(plain)), "as good as so many by chance"


def test_what_is_known_counts_and_all_of_it_is_no_estimate():
    rng = np.random.default_rng(3)
    answers = answered(planted(rng, 20), 12, rng)
    model, weights = fitted(answers), rng.random(20)
    whole = estimated(model, weights, range(20), answers[0])
    assert whole.value == pytest.approx(answers[0] @ weights) and whole.error == 0
    errors = [estimated(model, weights, range(n), answers[0, :n]).error for n in (2, 8, 18)]
    assert errors == sorted(errors, reverse=True)


def test_questions_are_chosen_by_what_they_tell_and_always_the_same():
    slopes = np.array([[0.1], [2.0], [0.1], [2.0], [0.1], [2.0]])
    model, weights = ResponseModel(slopes, np.array([0, 0, 0, 0, 0, 6.0])), np.full(6, 1 / 6)
    assert informative(model, weights, np.arange(6), 2, range(6)) == [1, 3]
    assert informative(model, weights, np.arange(6), 2, [0, 1, 2]) == [0, 1]
    assert informative(model, weights, np.array([0, 1, 0, 1, 2, 2]), 1, range(3)) == [1]  # two marks of one question
    assert informative(model, weights, np.arange(6), 9, range(6)) == [*range(6)]
    two = np.array([0, 0, 0, 1.0, 1, 0])
    assert informative(ResponseModel(two[:, None], 0 * two), two, np.arange(6), 9, range(6)) == [3, 4], (
        "others say nothing"
    )
