"""A whole tournament: its winner, its files, the same result with one worker, several, and after kills."""

import json
import math
import os
import shutil
import signal
import subprocess
from dataclasses import replace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
)

from evomerge import fitness_evaluator, tournament_results, tournament_running
from evomerge.formula import read
from evomerge.tournament_view import better_ones
from evomerge.utils import (
    evaluate_model,
)
from fleet.digest import digest
from fleet.history import opened
from tests import merging, sinks
from tests.helpers import pids
from tests.hub import call, hub
from tests.tournaments import CLI, cli, worker


def test_the_winner_goes_to_the_hub(tournament, tmp_path):
    run = tournament[0] / "run"
    with hub() as known:
        call(known, tmp_path, "-m", "train.export", str(run), "--push", "org/winner")
        call(known, tmp_path, "-m", "train.export", str(run), "--push", "org/winner")
        there = known.repositories["org/winner"]
    assert len(there.commits) == 2, "nothing has changed"
    card = there.commits[there.head]["README.md"].decode()
    assert "# A merge of " in card and card.count(digest(opened(run))) == 1 and "On the test, " in card
    assert "pretrained=org/winner " in card and '"num_generations": 3' in card
    assert b"score" in there.commits[there.head]["curve.svg"]
    assert "there: is" not in call(known, tmp_path, "-m", "train.export", str(run), code=2)


def test_a_tournament_ends_with_its_winner_a_table_and_a_family_tree(tournament):
    folder, c, said = tournament
    run, winner = folder / "run", folder / "run" / "winner"
    assert str(winner) in said and "perplexity (95%)" in said
    for passage in fitness_evaluator.texts(c.evaluation_settings)["test"].texts[:2]:
        assert f'winner, to "{tournament_running.beginning(passage)}": ' in said
    assert "score: - 1 x bits per byte" in said and "the end after 3 generations" in said
    card, line = (winner / "README.md").read_text(), f"lm_eval --model hf --model_args pretrained={winner} "
    assert "A merge of " in card and "model0" in card and line in card and line in said
    assert (winner / "model.safetensors").stat().st_mode == (folder / "mine.json").stat().st_mode
    assert (run / "ancestry.html").read_text().startswith("<!DOCTYPE html>")
    found = tournament_results.found_in(run)
    assert len(found.generations) == 3 and all(len(generation) == 8 for generation in found.generations)
    assert len([line for line in said.splitlines() if "±" in line and line[0] == "│"]) == 3
    best = [max(entry.score for entry in generation) for generation in found.generations]
    assert best == sorted(best) and found.best.score == best[-1]
    assert read(winner)[0] == found.best.formula
    ways = [{entry.technique for entry in generation} for generation in found.generations]
    assert "mutation" in ways[1] and ways[1] - ways[0] <= {"mutation", "linear", "slerp"}
    listed = json.loads((run / "history.json").read_text())
    assert listed["best"] == best and listed["pareto_front"] == [found.front[0].id]
    assert AutoModelForCausalLM.from_pretrained(winner).config.model_type == "llama"


def test_its_scores_go_where_people_look(tournament):
    sinks.needs("tensorboard")
    folder, _, _ = tournament
    found, logged = tournament_results.found_in(folder / "run"), sinks.board(folder / "run")
    assert [step for step, _ in logged] == [*range(len(found.generations) + 2)]
    best = [max(entry.score for entry in generation) for generation in found.generations[1:]]
    assert [values["score/best"] for _, values in logged[2:-1]] == pytest.approx(best)
    assert logged[-1][1]["test_score_of/winner"] == pytest.approx(found.tested[0].metrics["test_score"])


def test_the_winner_is_what_was_scored(tournament):
    folder, c, _ = tournament
    found = tournament_results.found_in(folder / "run")
    assert evaluate_model(folder / "run" / "winner", c)["score"] == pytest.approx(found.best.score, rel=1e-5)


def test_intervals_are_of_differences_on_the_same_passages(tournament):
    found = tournament_results.found_in(tournament[0] / "run")
    winner, *others = found.tested
    for other in others:
        mean, half = tournament_results.ahead(winner, other)
        bits = sum(b - a for a, b in zip(winner.listed("each"), other.listed("each"), strict=True)) / math.log(2)
        assert mean == pytest.approx(bits / sum(winner.listed("sizes")), abs=1e-5) and 0 < half < 1
        assert mean == pytest.approx(winner.metrics["test_score"] - other.metrics["test_score"], abs=1e-4)
        low, high = tournament_results.interval(other)
        assert low < other.metrics["perplexity"] < high


def test_a_given_model_that_is_better_than_the_winner_is_named(tournament):
    found = tournament_results.found_in(tournament[0] / "run")
    best, (one, other), tested = found.best, found.models[:2], found.tested

    def scored(entry, measure, value):
        return replace(entry, metrics={**entry.metrics, measure: value})

    models = [scored(one, "score", best.score), scored(other, "score", best.score + 1)]
    tests = [scored(each, "test_score", -float(n)) for n, each in enumerate(tested)]
    worse = [scored(each, "test_score", float(n)) for n, each in enumerate(tested)]
    assert [*better_ones(replace(found, models=models[:1], tested=tests))] == []
    judged, held = better_ones(replace(found, models=models, tested=worse))
    values = f"{best.score:.4f}, not {best.score + 1:.4f}"
    given = f"The winner is worse than {other.name}, which was given"
    assert judged == f"{given}, on what judged the tournament: {values}."
    assert (
        held
        == f"The winner is worse than {tested[-1].name}, which was given, in the held-out test: 0.0000, not 3.0000."
    )


def test_the_same_command_again_says_the_same(tournament, here):
    folder, c, said = tournament
    before = merging.weights(folder / "run" / "winner")
    shutil.rmtree(folder / "run" / "winner")
    again = here("--config", folder / "mine.json", "--run")
    assert again.returncode == 0 and "is over already" in again.stdout
    assert said[said.index("Held-out test") :] == again.stdout[again.stdout.index("Held-out test") :]
    assert all(torch.equal(before[name], each) for name, each in merging.weights(folder / "run" / "winner").items())


def test_other_settings_are_refused_in_the_same_folder(tournament, here):
    folder, c, _ = tournament
    other = here("--config", folder / "mine.json", "--run", "--seed", 99)
    assert other.returncode == 2 and "SEED" in other.stderr.upper()


def test_one_worker_or_several_the_result_is_the_same(tournament, tmp_path):
    folder, c, _ = tournament
    again = c.model_copy(deep=True, update={"out": str(tmp_path / "run")})
    one, two = worker(again, "one"), worker(again, "two")
    assert one.run() == "over" and two.run() == "over"
    assert digest(opened(folder / "run")) == digest(opened(tmp_path / "run"))


@pytest.mark.slow
def test_a_killed_tournament_goes_on_and_has_the_same_winner(tournament, tmp_path):
    folder, c, _ = tournament
    again = c.model_copy(deep=True, update={"out": str(tmp_path / "run")})
    again.save(tmp_path / "mine.json")
    command = [*CLI, "--config", tmp_path / "mine.json", "--run", "--workers", "1"]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    for line in first.stdout:
        if line.startswith("generation 1"):
            break
    first.send_signal(signal.SIGSTOP)  # or it would start another worker
    (alive,) = [pid for pid in pids("--worker", str(tmp_path / "run"))]
    os.kill(alive, signal.SIGKILL)
    first.kill()
    first.wait()
    done = cli("--config", tmp_path / "mine.json", "--run", "--workers", 2)
    assert done.returncode == 0, done.stderr
    assert read(tmp_path / "run" / "winner") == read(folder / "run" / "winner")
    one, other = (merging.weights(place / "run" / "winner") for place in (folder, tmp_path))
    assert all(torch.equal(one[name], other[name]) for name in one)
