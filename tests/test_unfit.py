"""What could not be read back is never written: not a plan, not a result, not somebody's reason."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fleet import launches
from fleet.context import Stopped, WorkerOptions
from fleet.errors import cut
from fleet.history import opened
from fleet.host import Host
from fleet.plan_format import recipes_in, record_of
from fleet.recipe import Past, Recipe, alike, check
from fleet.run import create_run
from fleet.store import REGISTER_LIMIT, Store, Unreadable
from fleet.work import Work
from fleet.worker import Worker

HUGE = 20_000_000


@dataclass
class Plans:
    rounds: list[list[Recipe]]

    def plan(self, round: int, history: Past) -> list[Recipe]:
        return self.rounds[round]


def store(place: Path) -> Store:
    return create_run(place, "run", {}, Host())[0]


def worked(place: Path, make: Callable[[Work], Mapping[str, Any]], *rounds: list[Recipe]) -> Path:
    run = store(place)
    Worker(run, Plans([*rounds, []]), make, WorkerOptions(launch=launches.begin(run, {}), tick_seconds=0.1)).run()
    return place / "run"


def nested(depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize(
    "value, why",
    [
        ({"a": "x" * HUGE}, "20,000,026 bytes, and at most 16,777,216 are possible"),
        ({"a": "x" * (REGISTER_LIMIT - 10)}, "bytes, and at most 16,777,216"),
        ({"a": nested(30)}, "nested deeper than 20"),
        ({"a": nested(3000)}, "recursion|nested"),
        ({"a": float("nan")}, "JSON compliant"),
        ({"a": object()}, "not JSON serializable"),
        ({1: "a", "1": "b"}, "the key '1' stands there twice"),
    ],
)
def test_a_register_takes_only_what_can_be_read_back(tmp_path, value, why):
    run = store(tmp_path)
    with pytest.raises(Unreadable, match=why) as error:
        run.settle("rounds/x", value)
    assert "rounds/x" in str(error.value) and len(str(error.value)) < 300
    assert os.listdir(tmp_path / "run" / "rounds") == os.listdir(tmp_path / "run" / "tmp") == []
    largest = {"a": "x" * (REGISTER_LIMIT - 26)}
    assert run.settle("rounds/x", largest) == largest == run.read("rounds/x")


@pytest.mark.parametrize(
    "recipe, why",
    [
        (Recipe("a", "x", args={"x": "y" * HUGE}), "at most 16,777,216"),
        (Recipe("a", "x", args={"x": nested(30)}), "nested deeper than 20"),
        (Recipe("a", "x", ("7/b",), args={"x": 1}), "its input 7/b is out of reach"),
    ],
)
def test_a_plan_that_cannot_be_stops_the_run_with_a_sentence(tmp_path, recipe, why):
    with pytest.raises(Stopped, match=why) as stopped:
        worked(tmp_path, lambda work: {}, [Recipe("b", "x", args={"x": 1})], [recipe])
    assert "damaged" not in str(stopped.value) and "backup" not in str(stopped.value)
    assert why in launches.ordered(store(tmp_path), 1)
    assert not (tmp_path / "run/rounds/00001/plan").exists()


def test_a_result_that_could_not_be_read_back_is_a_verdict(tmp_path):
    def make(work: Work) -> Mapping[str, Any]:
        return {"answers": "x" * HUGE} if work.recipe.slot == "large" else {"loss": 1.0}

    large, small = Recipe("large", "x", args={"x": 1}, optional=True), Recipe("small", "x", args={"x": 2})
    history = opened(worked(tmp_path, make, [large, small]))
    assert history["0/large"].absent == "failed" and history["0/small"].metrics == {"loss": 1.0}
    assert "at most 16,777,216" in history.outcome("0/large").why


def test_reasons_are_cut_with_a_word(tmp_path):
    def make(work: Work) -> Mapping[str, Any]:
        raise RuntimeError("x" * HUGE)

    history = opened(worked(tmp_path, make, [Recipe("a", "x", args={"x": 1}, optional=True)]))
    assert "more characters" in history.outcome("0/a").why
    assert sum(file.stat().st_size for file in (tmp_path / "run").rglob("*") if file.is_file()) < 1 << 20


def test_a_cut_text_says_how_much_there_was():
    assert cut("short") == "short" and cut("x" * 20_000) == "x" * 20_000
    assert cut("x" * (HUGE + 5), 5) == "xxxxx ... and 20,000,000 more characters"


# -- plans -------------------------------------------------------------------------------------------------------------


def recipes() -> list[Recipe]:
    """Two groups, a list of everybody, a few short ones."""
    groups = [tuple(f"1/m{n}" for n in range(first, 40, 2)) for first in (0, 1)]
    children = [Recipe(f"m{k}", "child", groups[k % 2], ("0/init", "0/text"), args={"slot": k}) for k in range(40)]
    everybody = tuple(f"2/m{n}" for n in range(40))
    return [*children, Recipe("all", "mean", (), everybody), Recipe("two", "mean", everybody[:2], everybody[2:])]


def test_what_several_recipes_name_together_is_there_once():
    record = json.loads(json.dumps(record_of(recipes())))
    read = recipes_in(record)
    check(2, read)
    assert read == tuple(recipes())
    assert len(record["groups"]) == 3 and record["recipes"][0]["parents"] == [0]
    assert read[0].parents is read[2].parents and read[0].needs is read[1].needs and len(alike(read)) == 4
    assert record["recipes"][-1]["parents"] == ["2/m0", "2/m1"] and record["recipes"][-1]["needs"] == [2]


def test_short_lists_stand_as_they_are():
    short = [{"slot": "a", "task": "mean", "parents": ["1/b", "1/c"]}]
    assert recipes_in({"by": "x", "recipes": short}) == (Recipe("a", "mean", ("1/b", "1/c")),)
    assert json.loads(json.dumps(record_of(recipes_in({"recipes": short})))) == {"recipes": short}


@pytest.mark.parametrize(
    "record",
    [
        {"groups": [["1/a"]], "recipes": [{"slot": "x", "parents": [1], "args": {"x": 1}}]},
        {"groups": [["1/a"]], "recipes": [{"slot": "x", "parents": [-1], "args": {"x": 1}}]},
        {"groups": [["1/a"]], "recipes": [{"slot": "x", "parents": [[0]], "args": {"x": 1}}]},
        {"groups": [[1]], "recipes": []},
        {"groups": ["1/a"], "recipes": []},
        {"groups": 3, "recipes": []},
        {"groups": [["1/a"] * 1000], "recipes": [{"slot": "x", "parents": [0] * 5000, "args": {"x": 1}}]},
        {"recipes": [{"slot": "x", "merge": {"of": ["1/a"]}}]},
    ],
)
def test_groups_that_are_none_are_refused(record):
    with pytest.raises((ValueError, TypeError, KeyError)):
        recipes_in(record)
