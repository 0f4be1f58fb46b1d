"""train_fsdp.py where folders, files, disks and people are not as they should be."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers import mounted, pids, until
from tests.ranks import one
from tests.small import shared
from tests.test_fsdp import KEYS, ROOT, model, training
from train.cluster.ranks import joined


def run(folder: Path, name: str, **keys) -> str:
    """One process, this one."""
    with joined() as ranks:
        return one(training(folder, name, **keys), ranks)


def command(folder: Path, name: str, **changed) -> list[str]:
    data = {"path_model": folder / "model", "dataset_name_or_path": shared() / "text.jsonl", "ckpt.path": folder / name}
    keys = {**KEYS, **data, **changed}
    keys.pop("torch_compile")
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    return [str(ROOT / "train" / "train_fsdp.py"), "--no-torch-compile", *words]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training that is over, with checkpoints after its steps 4 and 8."""
    folder = tmp_path_factory.mktemp("done")
    model(folder / "model")
    assert run(folder, "out") == "0"
    return folder


@pytest.fixture
def place(done: Path, tmp_path: Path) -> Path:
    shutil.copytree(done, tmp_path / "place")
    return tmp_path / "place"


RESUME = {"ckpt": {"resume": "true"}}


# -- folders -----------------------------------------------------------------------------------------------------------


def test_the_model_is_there_for_whoever_may_read_the_users_files(place):
    modes = {stat.S_IMODE(file.stat().st_mode) for file in (place / "out" / "model").iterdir()}
    (place / "mine").touch()
    assert modes == {stat.S_IMODE((place / "mine").stat().st_mode)}


def test_it_does_not_begin_where_another_training_lies(place):
    said = run(place, "out")
    assert said.startswith(f"{place}/out/step-00000008 is of an earlier training: --ckpt.resume true goes on from it")


def test_two_do_not_train_in_one_folder(place):
    first = command(place, "both", total_steps=10_000)
    process = subprocess.Popen([sys.executable, *first], stdout=subprocess.DEVNULL)
    try:
        until(lambda: (place / "both" / "metrics.csv").is_file(), "it trains", 60)
        said = run(place, "both")
        assert f"{place}/both: another training is at work there (process {process.pid} on " in said
    finally:
        process.kill()
        process.wait()
    assert "(process" not in run(place, "both")


def test_a_folder_that_is_no_models_is_known_before_training(place):
    shutil.rmtree(place / "out" / "model")
    (place / "out" / "model").mkdir()
    (place / "out" / "model" / "thesis.txt").write_text("mine")
    assert "model is not the folder of a model; it is not replaced" in run(place, "out", **RESUME)


def test_checkpoints_of_a_future_that_is_given_up_are_put_aside(place):
    again = {"resume": str(place / "out" / "step-00000004")}
    assert run(place, "out", max_steps=6, ckpt=again) == "0"
    names = sorted(each.name for each in (place / "out").glob("*step-*"))
    assert names == ["left-step-00000008", "step-00000004", "step-00000006"]
    assert run(place, "out", **RESUME) == "0"
    with (place / "out" / "metrics.csv").open() as rows:
        assert [line.split(",")[0] for line in rows][1:] == [str(step) for step in range(1, 9)]


# -- what decides the numbers ------------------------------------------------------------------------------------------


def test_other_words_of_the_same_shapes_are_refused(place):
    file = place / "model" / "tokenizer.json"
    known = json.loads(file.read_text())
    words = known["model"]["vocab"]
    one, other = [word for word in words if len(word) == 1][:2]
    words[one], words[other] = words[other], words[one]
    file.write_text(json.dumps(known))
    assert "it was begun with other settings: text was" in (said := run(place, "out", **RESUME))
    assert "tokenizer was" in said


def test_a_text_that_was_changed_is_noticed(place):
    (place / "text.txt").write_text("one two three four five\n\n" * 400)
    keys = {"dataset_name_or_path": str(place / "text.txt")}
    assert run(place, "mine", **keys, max_steps=4) == "0"
    (place / "text.txt").write_text("six seven eight nine ten\n\n" * 400)
    assert "it was begun with other settings: text was" in run(place, "mine", **keys, **RESUME)


def test_weights_that_are_no_numbers_are_never_saved(place):
    """A gradient may overflow where the loss does not."""
    wild = place / "wild"
    shutil.copytree(place / "out" / "model", wild)
    weights = load_file(wild / "model.safetensors")
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], 1e30)
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"] * 1e8
    save_file(weights, wild / "model.safetensors", {"format": "pt"})
    said = run(place, "burnt", path_model=str(wild), lr=1.0, warmup_steps=0)
    assert "not finite any more, and are not saved" in said or "the loss became" in said
    assert not [*(place / "burnt").glob("step-*")] and not (place / "burnt" / "model").exists()


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed",
    [
        {"step": "x"}, {"step": -5}, {"step": 10**30}, {"files": {}}, {"files": {"a": 3}},
        {"optimizer": {"steps": "x"}}, {"optimizer": None}, {"shapes": []}, {"more": 1}, {"round": -1},
    ],
    ids=str,
)  # fmt: skip
def test_a_state_that_was_tampered_with(place, changed):
    file = place / "out" / "step-00000008" / "state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    said = run(place, "out", **RESUME)
    assert f"{file.parent}: " in said and "resume from an older checkpoint (--ckpt.resume FOLDER)" in said
    assert "\n" not in said


def test_what_does_not_belong_to_a_checkpoint(place):
    folder = place / "out" / "step-00000008"
    (folder / "zzz.safetensors").write_bytes(next((place / "out" / "step-00000004").glob("*.safetensors")).read_bytes())
    assert "zzz.safetensors: does not belong there; resume from an older" in run(place, "out", **RESUME)


def test_a_full_disk_costs_a_checkpoint_and_not_the_training(place, capfd):
    """It gets full in the middle, and has room again before the end."""
    with mounted(place / "disk", options="size=8m"):
        shutil.copytree(place / "model", place / "disk" / "model")
        filler = place / "disk" / "filler"

        def fill() -> None:
            with open(filler, "wb") as file:
                while True:
                    file.write(b"0" * 4096)

        with joined() as ranks:
            told = ranks.told_to_stop
            steps = iter(range(1, 100))

            def turn() -> bool:
                step = next(steps)
                if step == 2:
                    with pytest.raises(OSError):
                        fill()
                if step == 6:
                    filler.unlink()
                return told()

            ranks.told_to_stop = turn  # type: ignore[method-assign]
            keys = training(place / "disk", "out", ckpt={"interval": 3})
            assert one(keys, ranks) == "0"
        said = capfd.readouterr().out
        assert "a checkpoint could not be written: " in said and "training goes on" in said
        rows = (place / "disk" / "out" / "metrics.csv").read_text().splitlines()
        assert [row.split(",")[0] for row in rows] == ["step", *(str(step) for step in range(1, 9))]
        names = [each.name for each in sorted((place / "disk" / "out").glob("*step-*"))]
        assert "step-00000003" not in names and names[-1] == "step-00000008"


# -- signals -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_while_text_is_made_into_tokens_a_signal_ends_it_at_once(place, number):
    os.mkfifo(place / "endless.txt")
    words = command(place, "waits", dataset_name_or_path=place / "endless.txt")
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    writer = os.open(place / "endless.txt", os.O_RDWR)
    try:
        for line in process.stdout:
            if "the text as tokens" in line:
                break
        until(lambda: [*(place / "waits" / "data").glob(".draft-*")], "it makes them", 60)
        process.send_signal(number)
        assert process.wait(30) in (130, -number)
    finally:
        os.close(writer)
        process.kill()
        process.stdout.close()


@pytest.mark.slow
def test_ranks_end_with_a_torchrun_that_is_killed(place):
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen([*run, *command(place, "two", total_steps=100_000)], stdout=subprocess.DEVNULL)
    until(lambda: (place / "two" / "metrics.csv").is_file(), "they train", 120)
    process.kill()
    process.wait()
    until(lambda: not pids(str(place / "two")), "no rank is left", 30)
