"""Whole searches wherever their workers may be: on Ray, on several machines; and what the command line says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests import searching, sinks
from tests.commands import answer
from tests.lab.machines import Lab, why_not
from tests.searching import ROOT, command, genome_file, genotypes, rows, search, wait_for

slow = pytest.mark.slow
EVALS = ("--max-fevals", "14", "--holdout", "0.25")


@pytest.fixture(scope="module")
def here(facts, tmp_path_factory) -> Path:
    """The search as local processes make it."""
    folder = tmp_path_factory.mktemp("here")
    search(genome_file(folder, facts), folder / "search", facts, *EVALS)
    return folder / "search"


@slow
@pytest.mark.parametrize("strategy", ["pool", "buffered", "serial"])
def test_on_ray_the_same_is_found(strategy, facts, here, tmp_path):
    pytest.importorskip("ray", reason="Ray is missing (requirements-ray.txt)")
    out = tmp_path / "search"
    said = search(genome_file(tmp_path, facts), out, facts, *EVALS, "--strategy", strategy, "--workers", "2")
    assert genotypes(out) == genotypes(here) and len(genotypes(out)) == 14
    assert [row["scores"] for row in rows(out)] == [row["scores"] for row in rows(here)]
    assert (out / "best_config.yaml").read_text() == (here / "best_config.yaml").read_text()
    held = [line.split("│")[3] for line in said.splitlines() if line.count("│") == 4]
    assert float(held[0].split("±")[0]) > max(float(each.split("±")[0]) for each in held[1:4])


@slow
@pytest.mark.skipif(bool(why_not()), reason=f"no machines: {why_not()}")
def test_on_machines_the_same_is_found(facts, here, tmp_path, monkeypatch):
    with Lab(tmp_path / "lab") as lab:
        monkeypatch.setenv("XDG_STATE_HOME", str(lab.folder / "state"))
        place = lab.shared / "searches"
        place.mkdir()
        searching.donors(place)
        searching.task(place / "tasks")
        machines = place / "machines.json"
        machines.write_text(json.dumps([{"host": each.name, "python": sys.executable} for each in lab]))
        more = ("--machines", str(machines), "--ssh-config", str(lab.ssh_config))
        search(genome_file(place, place), place / "search", place, *EVALS, *more)
        assert genotypes(place / "search") == genotypes(here)
        assert [row["scores"] for row in rows(place / "search")] == [row["scores"] for row in rows(here)]
        came = {file.name[:2] for file in (place / "search" / "workers").glob("*.events")}
        makers = {json.loads(file.read_text().splitlines()[0])["by"][:2] for file in _done(place / "search")}
        assert came == {"h1", "h2", "h3"} >= makers  # one that is quick may have made all of such small ones


def _done(out: Path) -> list[Path]:
    return list((out / "rounds").glob("*/c*.done"))


# -- the command line --------------------------------------------------------------------------------------------------


def said_by(*words: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "merge.evolve", *words], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, **(env or {})},
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


def test_help_explains_every_option():
    code, said = said_by("--help", env={"COLUMNS": "250"})
    assert code == 0
    for option in (
        *("--max-fevals", "--sigma0", "--population-size", "--timeout", "--strategy", "--workers", "--machines"),
        *("--in-memory", "--no-in-memory", "--vllm", "--batch-size", "--task-search-path", "--num-gpus"),
        *("--merge-cuda", "--load-in-8bit", "--load-in-4bit", "--random-seed", "--reshard", "--save-final-model"),
        *("--trust-remote-code", "--metrics", "--wandb", "--wandb-project", "--wandb-entity", "--race"),
        *("--fitness-from", "--fitness-questions"),
        *("--storage-path",),
        *("--holdout", "--allow-benchmark-tasks", "--i-understand-the-depths-of-the-evils-i-am-unleashing"),
    ):
        assert option in said, option
    for group in ("Search", "Where candidates are made", "How they are made and scored", "Results"):
        assert group in said, group


@pytest.mark.parametrize("more, why", [
    (("--vllm",), "pip install vllm"),
    (("--load-in-4bit",), "pip install bitsandbytes"),
    (("--load-in-4bit", "--load-in-8bit"), "with --load-in-4bit: one of them"),
    (("--merge-cuda",), "need a GPU, and here is none"),
    (("--num-gpus", "3"), "--num-gpus is 3; here are 0"),
    (("--ssh-config", "x"), "it is for --machines"),
    (("--batch-size", "many"), "--batch-size is 'many'"),
    (("--machines", "m.json", "--strategy", "pool"), "it goes with --strategy fleet, not pool"),
    pytest.param(("--task-search-path", "/no/such/folder"), "/no/such/folder: not a folder", marks=slow),
])  # fmt: skip
def test_options_that_cannot_be_met(more, why, facts, tmp_path):
    file, out = genome_file(tmp_path, facts), tmp_path / "search"
    chosen = () if "--strategy" in more else ("--strategy", "fleet")
    chosen += () if "--task-search-path" in more else ("--task-search-path", str(facts / "tasks"))
    code, *said = answer("-m", "merge.evolve", str(file), "--storage-path", str(out), *chosen, *more)
    assert code in (1, 2) and why in "".join(said), "".join(said)


@pytest.mark.slow
def test_too_few_questions_to_hold_some_out(facts, tmp_path):
    words = command(genome_file(tmp_path, facts, limit=1), tmp_path / "search", facts, "--holdout", "0.3")[1:]
    code, *said = answer(*words)
    assert code in (1, 2) and "task facts: too few are different" in "".join(said), "".join(said)


@pytest.mark.slow
def test_a_search_that_cannot_work_leaves_its_place_to_another(facts, tmp_path):
    out = tmp_path / "search"
    words = command(genome_file(tmp_path, facts, tasks=["fcats"]), out, facts, "--max-fevals", "7")[3:]
    code, said = said_by(*words)
    assert code == 1 and "there is no task 'fcats'; the nearest known one is facts" in said
    search(genome_file(tmp_path, facts), out, facts, "--max-fevals", "7")
    other = command(genome_file(tmp_path, facts), out, facts, "--max-fevals", "9", "--sigma0", "0.5")[3:]
    code, _, said = answer("-m", "merge.evolve", *other)
    assert code == 2 and "SIGMA0: the run has 0.1666" in said and "MAX_FEVALS: the run has 7, now it says 9" in said
    code, said = said_by(*command(genome_file(tmp_path, facts), out, facts, "--max-fevals", "7")[3:])
    assert code == 0 and "The run is over already" in said and "best merge" in said


@pytest.mark.slow
def test_nothing_that_is_somebody_elses_is_removed(facts, tmp_path):
    out = tmp_path / "search"
    code, _ = said_by(*command(genome_file(tmp_path, facts, tasks=["fcats"]), out, facts)[3:])
    assert code == 1
    (out / "notes.txt").write_text("mine")
    code, _, said = answer(*command(genome_file(tmp_path, facts), out, facts)[1:])
    assert code == 2 and "another configuration" in said and (out / "notes.txt").read_text() == "mine"
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "deeper" / "search", tmp_path / "a b"):
        code, _, said = answer(*command(genome_file(tmp_path, facts), place, facts)[1:])
        assert code == 2 and "--storage-path" in said


@slow
def test_a_search_does_not_go_on_with_other_questions(facts, tmp_path):
    tasks, out = tmp_path / "tasks", tmp_path / "search"
    searching.task(tasks)
    words = [*command(genome_file(tmp_path, facts), out, facts, "--max-fevals", "1000")]
    words[words.index(str(facts / "tasks"))] = str(tasks)
    started = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    wait_for(lambda: (out / "rounds" / "00003" / "plan").exists())
    started.terminate()
    assert "Stopped in round" in started.communicate()[0] and started.returncode == 130
    before = len(_done(out))
    searching.task(tasks, seed=2)
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "have changed since this search began" in done.stderr + done.stdout
    assert len(_done(out)) == before


def test_candidates_that_fail_are_recorded_and_do_not_end_the_search(facts, tmp_path):
    """Changes so large that many weights are too much for the numbers."""
    from safetensors.torch import save_file

    from tests.merging import weights

    for part in range(3):
        folder = tmp_path / f"part{part}"
        subprocess.run(["cp", "-r", str(facts / f"part{part}"), str(folder)], check=True)
        tensors = weights(folder)
        large = tensors["model.layers.0.mlp.up_proj.weight"]
        if part == 0:
            large.div_(large.abs().max()).mul_(2e38)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    models = [str(tmp_path / f"part{part}") for part in range(3)]
    genome = {"models": models, "base_model": str(facts / "base"), "merge_method": "task_arithmetic"}
    file = tmp_path / "genome.yml"
    file.write_text(yaml.safe_dump({"genome": genome, "tasks": ["facts"]}))
    said = search(file, tmp_path / "search", facts, "--max-fevals", "14", "--sigma0", "2.0")
    found = rows(tmp_path / "search")
    failed = [row for row in found if row["score"] is None]
    assert 0 < len(failed) < len(found) == 14, [row["error"] for row in found]
    assert all("not finite" in row["error"] for row in failed) and "failed (" in said
    assert (tmp_path / "search" / "best_config.yaml").is_file()


@slow
def test_the_same_recipe_is_scored_once(facts, tmp_path):
    """Densities beyond 1 are 1: with weights out of play, points become the same."""
    genome = {"merge_method": "slerp", "models": [str(facts / "part0"), str(facts / "part1")]}
    out = tmp_path / "search"
    more = ("--max-fevals", "12", "--population-size", "6", "--sigma0", "1e-17")  # all points are one
    search(genome_file(tmp_path, facts, **{"genome": genome}), out, facts, *more)
    found = rows(out)
    assert len({row["score"] for row in found}) == 1 and len(found) == 12
    plans = [json.loads((out / "rounds" / f"{n:05d}" / "plan").read_text().splitlines()[0]) for n in (1, 2)]
    kinds = [r["task"] for plan in plans for r in plan["recipes"] if r["slot"][0] == "c"]
    assert kinds.count("score") == 1 and kinds.count("twin") == 11


def test_an_option_that_is_refused_is_named_and_leaves_no_folder_behind(facts, tmp_path):
    out = tmp_path / "a" / "b" / "c"
    done = subprocess.run(
        command(genome_file(tmp_path, facts), out, facts, "--max-fevals", "0"), capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 2 and not (tmp_path / "a").exists()
    assert done.stderr == "the command line: --max-fevals is 0: a whole number from 1 to 1000000 is expected\n"


@slow
@pytest.mark.parametrize(
    "more", [("--race", "--reshard"), ("--fitness-from", "irt", "--no-in-memory", "--random-seed", "5")]
)
def test_options_of_a_whole_search(more, facts, tmp_path):
    out = tmp_path / "search"
    search(genome_file(tmp_path, facts), out, facts, "--max-fevals", "28", "--sigma0", "2", *more)
    found = rows(out)
    assert len(found[:28]) == 28 and all(row["score"] is not None for row in found)
    assert "irt" in more or len(found) == 28
    if "--race" in more:
        assert any(row["given_up"] and row["asked"] < 72 for row in found)
        best = max((row for row in found if not row["given_up"]), key=lambda row: row["score"])
        assert best["score"] >= max(row["score"] for row in found)
    if "irt" in more:
        few, finalists = [row for row in found[:28] if row["standard_error"]], found[28:]
        assert len(few) == 21 and {row["asked"] for row in few} == {16}
        *best, middle = [(row["generation"], row["asked"], row["standard_error"]) for row in finalists]
        assert {*best} == {(5, 56, None)} and middle == (5, 72, None), "the middle of the search was not asked before"
        best = max((row for row in found if not row["standard_error"]), key=lambda row: row["score"])
        assert yaml.safe_load((out / "best_config.yaml").read_text())["models"][0]["parameters"][
            "weight"
        ] == pytest.approx(abs(best["genotype"][0]))
    if "--reshard" in more:
        assert len(list((out / "files").glob("00000.model-*/model.safetensors"))) == 3


@slow
def test_weights_and_biases_hears_of_every_candidate_once(facts, tmp_path):
    sinks.needs("wandb", "tensorboard")
    out = tmp_path / "search"
    more = ("--max-fevals", "7", "--wandb", "--wandb-project", "mine", "--wandb-entity", "ours")
    words = command(genome_file(tmp_path, facts), out, facts, *more, "--metrics", "tensorboard")[3:]
    code, said = said_by(*words, env={"WANDB_MODE": "offline"})
    assert code == 0, said
    found = rows(out)
    for steps in (sinks.wandb(out), sinks.board(out)):
        assert [step for step, _ in steps] == [*range(7)]
        for row, (_, values) in zip(found, steps, strict=True):
            assert values["score"] == pytest.approx(row["score"]) and values["generation"] == row["generation"]
            assert values["facts/acc,none"] == pytest.approx(row["scores"]["facts/acc,none"])
        assert steps[-1][1]["best"] == pytest.approx(max(row["score"] for row in found))
    records = sinks.wandb_records(out)
    (run,) = (each.run for each in records if each.WhichOneof("record_type") == "run")
    assert (run.project, run.entity) == ("mine", "ours")
    assert any(b"best_config.yaml" in each.SerializeToString() for each in records)


@slow
def test_a_search_ends_after_its_time(facts, tmp_path):
    out = tmp_path / "search"
    done = subprocess.run(
        command(genome_file(tmp_path, facts), out, facts, *"--max-fevals 100000 --timeout 15 --workers 1".split()),
        capture_output=True, text=True, cwd=ROOT, timeout=120,
    )  # fmt: skip
    assert 0 < len(rows(out)) < 100_000 and "best merge" in done.stdout, done.stdout + done.stderr
