"""The hub: what is sent to it and what is fetched, over real HTTP, by tests/hub.py on the loopback interface."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from fleet.digest import digest
from fleet.history import opened
from tests.helpers import ROOT, SOON, until
from tests.hub import READER, TOKEN, LocalHub, Repository, call, hub
from tests.merging import llama
from tests.small import KEYS, finished, shared
from train.pretraining_export import Exporter

SAID = "org/name has it. To begin with it, or to merge it: org/name@"


@pytest.fixture
def known() -> Iterator[LocalHub]:
    with hub() as found:
        yield found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    finished(place)
    return place / "run"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder as a merge leaves it, in three files of weights."""
    (folder := tmp_path / "merged").mkdir()
    (folder / "config.json").write_text("{}\n")
    (folder / "README.md").write_text(f"# Merged\n\npretrained={folder} --tasks\n{Path.home()}/secret\n")
    for n in range(3):
        save_file({f"part{n}": torch.full((9,), float(n))}, folder / f"model-{n}.safetensors")
    return folder


# -- to the hub --------------------------------------------------------------------------------------------------------


def test_a_runs_model_is_sent_with_its_card(known, run, tmp_path):
    out, push = tmp_path / "out", ("-m", "train.export", str(run), "--push", "org/name")
    said = call(known, tmp_path / "home", *push, "--out", str(out))
    there = known.repositories["org/name"]
    assert there.private and len(there.commits) == 2 and SAID + there.head in said
    files = there.commits[there.head]
    assert files.keys() == {file.name for file in out.iterdir()} | {".gitattributes"}
    assert files["model.safetensors"] == (out / "model.safetensors").read_bytes()
    card, history = files["README.md"].decode(), opened(run)
    fields = yaml.safe_load(card.split("---")[1])
    assert fields == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["edt"]}
    tokens = history["0/tokens-0"].metrics
    for wanted in (
        f"`text.jsonl`: {tokens['train']:,} tokens to learn from",
        *(
            "`3/m0`: train_loss",
            "parents: 2/m0",
            "loss=",
            "bits_per_byte=",
            '"max_generations": 3',
            "pretrained=org/name",
        ),
        f"3 rounds. Their digest, one number for all that was made (`python -m fleet.digest`): `{digest(history)}`",
        "(curve.svg)",
    ):
        assert wanted in card, wanted
    assert str(out) not in card and b"<svg" in files["curve.svg"] and b"averaged model" in files["curve.svg"]
    everything = [file for place in (run, out, tmp_path) for file in place.rglob("*") if file.is_file()]
    assert not any(TOKEN.encode() in file.read_bytes() for file in everything)


def test_what_is_there_is_not_sent_again_and_old_weights_go(known, model, tmp_path):
    home, push = tmp_path / "home", ("-m", "train.export", str(model), "--push", "org/name")
    call(known, home, *push)
    there = known.repositories["org/name"]
    first, sent = there.head, known.count("PUT /objects")
    card = there.commits[first]["README.md"].decode()
    assert card == "# Merged\n\npretrained=org/name --tasks\n~/secret\n" and sent == 3
    call(known, home, *push)
    assert there.head == first and known.count("PUT /objects") == sent
    (model / "model-2.safetensors").unlink()
    there.commits[first]["notes.txt"] = b"somebody's own"
    call(known, home, *push)
    names = there.commits[there.head].keys()
    assert "model-2.safetensors" not in names and {"model-1.safetensors", "notes.txt", ".gitattributes"} <= names
    assert known.count("PUT /objects") == sent


def test_a_push_that_was_killed_goes_on(known, model, tmp_path):
    """What has arrived is not sent again, and nobody has seen half a model."""
    blocked, dead, order = threading.Event(), threading.Event(), list[str]()

    def last_one_waits(oid: str) -> None:
        order.append(oid)
        if len(order) == 3:
            blocked.set()
            dead.wait(SOON)
            raise ConnectionAbortedError("its sender is dead")

    known.before_object = last_one_waits
    words = ("-m", "train.export", str(model), "--push", "org/name")
    env = known.env(tmp_path)
    with subprocess.Popen([sys.executable, *words], cwd=ROOT, env=env, stderr=subprocess.DEVNULL) as process:
        assert blocked.wait(SOON)
        until(lambda: len(known.objects) == 2, "two of three have arrived")
        process.kill()
    dead.set()
    there = known.repositories["org/name"]
    assert there.commits[there.head].keys() == {".gitattributes"}
    known.before_object = lambda oid: None
    call(known, tmp_path, *words)
    assert {"model-0.safetensors", "model-1.safetensors", "model-2.safetensors"} < there.commits[there.head].keys()
    assert [known.count(f"PUT /objects/{oid}") for oid in order[:2]] == [1, 1]


def public_already(known: LocalHub) -> None:
    known.repositories["org/name"] = Repository(private=False)
    known.repositories["org/name"].commit({})


@pytest.mark.parametrize("words, env, wanted", [
    ("name", {}, "the owner's name and the model's are expected, as in org/name"),
    ("a/b/c", {}, "Repo id must be"),
    ("org/name", {"HF_TOKEN": ""}, "the hub wants to know who you are: `hf auth login`"),
    ("org/name", {"HF_TOKEN": "hf_of_nobody"}, "the hub does not know your token"),
    ("org/name", {"HF_TOKEN": READER}, "your token may not write there"),
    ("org/name", {"HF_HUB_OFFLINE": "1"}, "the hub cannot be reached ("),
    ("org/name", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "the hub cannot be reached ("),
])  # fmt: skip
def test_a_refusal_is_one_line(known, model, tmp_path, words, env, wanted):
    said = call(known, tmp_path, "-m", "train.export", str(model), "--push", words, code=2, **env)
    (line,) = (each for each in said.splitlines() if not each.startswith("Sending"))
    assert line.startswith(f"--push {words}: ") and wanted in line
    assert not known.repositories


def test_a_run_is_not_exported_where_it_cannot_be_sent(known, run, tmp_path):
    out = tmp_path / "out"
    words = ("-m", "train.export", str(run), "--out", str(out), "--push", "org/name")
    assert "cannot be reached" in call(known, tmp_path, *words, code=2, HF_HUB_OFFLINE="1") and not out.exists()
    assert "--public is for --push" in call(known, tmp_path, "-m", "train.export", str(run), "--public", code=2)


def test_what_everybody_would_see_has_to_be_meant(known, model, tmp_path):
    push = ("-m", "train.export", str(model), "--push", "org/name")
    call(known, tmp_path, *push[:-1], "org/seen", "--public")
    assert not known.repositories["org/seen"].private
    public_already(known)
    assert "everybody can see it; --public says" in call(known, tmp_path, *push, code=2)
    assert len(known.repositories["org/name"].commits) == 1 and known.count("PUT") == 3
    call(known, tmp_path, *push, "--public")
    assert len(known.repositories["org/name"].commits) == 2


# -- from the hub ------------------------------------------------------------------------------------------------------


def two_revisions(known: LocalHub, place: Path, make: Callable[[Path, int], Path]) -> tuple[str, Path]:
    """The first one, and the folder that it was; main is another."""
    known.repositories["org/name"] = there = Repository(private=True)
    folders = [make(place / f"revision{n}", n) for n in range(2)]
    names = [there.commit({file.name: file.read_bytes() for file in each.iterdir()}) for each in folders]
    return names[0], folders[0]


def test_a_donor_is_a_revision_of_the_hub(known, tmp_path):
    revision, folder = two_revisions(known, tmp_path, llama)
    recipe = tmp_path / "recipe.yml"
    for n, env in enumerate(({}, {"HF_HUB_OFFLINE": "1"})):  # then as it was fetched before
        recipe.write_text(f"merge_method: passthrough\nmodels: [{{model: org/name@{revision}}}]\n")
        call(known, tmp_path, "-m", "merge", str(recipe), str(tmp_path / f"out{n}"), **env)
        made, wanted = (load_file(place / "model.safetensors") for place in (tmp_path / f"out{n}", folder))
        assert made.keys() == wanted.keys() and all(torch.equal(made[name], wanted[name]) for name in wanted)
    recipe.write_text("merge_method: passthrough\nmodels: [{model: org/name@v9}]\n")
    said = call(known, tmp_path, "-m", "merge", str(recipe), str(tmp_path / "none"), code=2)
    assert "org/name@v9: no such folder here, and the hub does not give it: " in said and "Traceback" not in said


@pytest.mark.slow
def test_a_population_begins_with_a_revision_of_the_hub(known, run, tmp_path):
    def exported(place: Path, n: int) -> Path:
        Exporter(run).export(f"{n + 2}-m0", place)
        return place

    revision, folder = two_revisions(known, tmp_path, exported)
    keys = {**KEYS, "initial_population": [f"org/name@{revision}"], "max_generations": 1, "population_size": 2}
    (tmp_path / "evolution.json").write_text(
        json.dumps({**keys, "datasets": [{"source": str(shared() / "text.jsonl")}]})
    )
    call(known, tmp_path, "edt.py", "--config", str(tmp_path / "evolution.json"), "--workers", "1")
    begun = Exporter(tmp_path / "runs/edt")
    begun.export("0-init-0", tmp_path / "first")
    made, wanted = (load_file(place / "model.safetensors") for place in (tmp_path / "first", folder))
    assert all(torch.equal(made[name], wanted[name]) for name in wanted)
    card = (tmp_path / "runs/edt/export/README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["base_model"] == ["org/name"]
