"""Runs of older and newer versions of this project: gone on with where the bytes are the same, refused in one sentence
where they are not, and read in any case."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleet import results_version, run_config, version
from fleet.host import Host
from fleet.run import create_run, open_run
from fleet.run_config import UserError
from tests.helpers import Toys
from tests.toy.config import ToyConfig


def rewritten(run: Toys, change: Callable[[dict[str, Any]], object]) -> None:
    """run.json as another version would have written it."""
    store, about = open_run(run.folder, Host(), "test")
    value = dict(about)
    change(value)
    (run.folder / "run.json").unlink()
    store.settle("run.json", value)


def join(run: Toys) -> None:
    create_run(run.place / "runs", "toy", run.config.bound(), Host(), ToyConfig)


def test_a_run_says_which_results_it_was_begun_with_and_by_what(toys):
    run: Toys = toys().prepare()
    about = open_run(run.folder, Host(), "test")[1]
    assert about["results"] == results_version.kind(about["config"]["algorithm"])
    assert about["code"] == version.code()


def test_an_older_run_that_says_less_is_finished(toys):
    """It has no number, and lacks a key that came later, and a setting."""
    run: Toys = toys().prepare()
    run.work(recipes=3)

    def older(value: dict[str, Any]) -> None:
        del value["results"], value["code"], value["config"]["grace_seconds"], value["config"]["elitism"]

    rewritten(run, older)
    join(run)
    run.start(1).ends(0)
    run.same()
    for module in ("fleet.status", "fleet.digest", "fleet.report"):
        shown = run.run([sys.executable, "-m", module, str(run.folder)])
        shown.ends(0)


def test_a_key_that_the_run_lacks_has_its_default_and_no_other_value(toys):
    run: Toys = toys().prepare()
    rewritten(run, lambda value: value["config"].pop("grace_seconds"))
    run.keys["grace_seconds"] = 5.0
    with pytest.raises(UserError, match="GRACE_SECONDS: the run has 0.0, now it says 5.0"):
        join(run)


def test_a_retired_key_is_passed_over_at_one_value_only(toys, monkeypatch):
    run: Toys = toys().prepare()
    rewritten(run, lambda value: value["config"].update(velocity=0))
    with pytest.raises(UserError, match="unknown key"):
        join(run)
    monkeypatch.setattr(run_config, "RETIRED", {"velocity": 0})
    join(run)
    assert run.work() == "over"
    run.same()
    rewritten(run, lambda value: value["config"].update(velocity=1))
    with pytest.raises(UserError, match="unknown key"):
        join(run)


def test_settings_that_change_no_results_may_be_unknown():
    assert ToyConfig.joined(ToyConfig().bound(), {"brightness": 3, "log_level": "DEBUG"}).log_level == "DEBUG"


@pytest.mark.parametrize("its, said", [(1, "finish it or export from it with commit abc123,"), (7, "commit fed321,")])
def test_other_results_are_refused_in_a_sentence_that_names_what_gives_them(toys, monkeypatch, its, said):
    run: Toys = toys().prepare()
    rewritten(run, lambda value: value.update(results=its, code="commit fed321"))
    monkeypatch.setattr(results_version, "LAST", {run.config.algorithm: ["commit abc123"]})
    with pytest.raises(UserError, match=re.escape(said)) as refused:
        join(run)
    assert "\n" not in str(refused.value) and f"of kind {its} and this code" in str(refused.value)


def test_no_process_goes_on_with_other_results_but_anybody_may_look(toys):
    run: Toys = toys().prepare()
    rewritten(run, lambda value: value.update(results=7))
    for each in (run.worker("w"), run.start(1)):
        each.ends(2)
        assert "results of kind 7" in each.said and "Traceback" not in each.said
    shown = run.run([sys.executable, "-m", "fleet.status", str(run.folder)])
    shown.ends(0)


def test_runs_begun_before_a_change_are_finished_by_the_code_before_it(tmp_path):
    results_version.check(tmp_path, {"config": {"algorithm": "a method whose results never changed"}})
    now = results_version.kind("edt-evomerge")
    with pytest.raises(
        UserError, match=f"of kind 1 and this code would give it those of kind {now}: .* with commit 4b76bd2,"
    ):
        results_version.check(tmp_path, {"config": {"algorithm": "edt-evomerge"}})


def test_the_commit_is_named_where_git_knows_it(tmp_path: Path):
    def git(*words: str) -> str:
        known = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(["git", *known, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    assert version.commit(tmp_path) == ""
    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "HEAD").strip()
    assert version.commit(tmp_path) == f"commit {commit}"
    (tmp_path / "a").write_text("2")
    assert version.commit(tmp_path) == f"commit {commit} with changes"
