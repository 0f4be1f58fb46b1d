"""The small models that are there without a network: made once, whole or not at all, and better together than alone."""

import hashlib
import math
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from itertools import chain, islice
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from evomerge import specialists, texts
from evomerge.specialists import BASE, SpecialistSettings, made
from fleet import busy_notice
from fleet.run_config import UserError
from merge.merge_recipe import parse
from merge.merging import merge
from tests.helpers import LONG, mounted, until
from train import models_on_demand

SMALL = SpecialistSettings(
    base_steps=6, steps=4, batch=2, window=32, vocabulary=512, sample=50_000, hidden=32, layers=1
)
NAMES = [BASE, "code", "prose", "names"]
FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
ROOT = Path(__file__).parents[1]
PROGRAM = """
import sys, time
from pathlib import Path
from evomerge.specialists import made
from tests.test_specialists import SMALL

def tell(line):
    print(line, flush=True)
    if line == sys.argv[2]:
        time.sleep(600)

made(Path(sys.argv[1]), 1, tell, SMALL)
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    return made(tmp_path_factory.mktemp("models"), 1, settings=SMALL)


@pytest.fixture(scope="module")
def learnt() -> Mapping[str, str]:
    return {kind: "\0".join(texts.training(kind)) for kind in texts.KINDS}


def start(folder: Path, stop_at: str = "") -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", PROGRAM, folder, stop_at], cwd=ROOT, stderr=subprocess.PIPE)


def digests(models: Mapping[str, Path]) -> dict[str, str]:
    return {
        f"{name}/{file.name}": hashlib.sha256(file.read_bytes()).hexdigest()
        for name, folder in models.items()
        for file in sorted(folder.iterdir())
    }


def times(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}


def left(folder: Path) -> list[str]:
    return sorted(path.name for home in folder.iterdir() for path in home.iterdir())


# -- the text ----------------------------------------------------------------------------------------------------------


def passages_of(kind: str, count: int) -> list[str]:
    """Of those that nobody learns from."""
    return [*islice(chain.from_iterable(texts.unseen(kind)), count)]


def test_there_are_as_many_passages_of_each_kind():
    passages = {kind: passages_of(kind, 64) for kind in texts.KINDS}
    assert all(len({*each}) == 64 for each in passages.values()) and passages_of("code", 5) == passages["code"][:5]
    assert all(600 <= len(each) <= 1000 for some in passages.values() for each in some)


def test_no_passage_is_in_what_models_learn_from(learnt):
    assert all(len(each) > 500_000 for each in learnt.values())
    assert not [
        each for kind in texts.KINDS for each in passages_of(kind, 96) if any(each in w for w in learnt.values())
    ]


def test_kinds_differ(learnt):
    """Of the words that come often in one of two kinds few do in the other."""
    often = {kind: {word for word, _ in Counter(text.split()).most_common(300)} for kind, text in learnt.items()}
    assert all(len(often[a] & often[b]) < 200 for a in often for b in often if a != b)


def test_whoever_waits_hears_at_once_of_what(tmp_path, monkeypatch):
    monkeypatch.setattr(busy_notice, "EVERY", 0.001)
    said, repeated = list[str](), threading.Event()

    def tell(line: str) -> None:
        said.append(line)
        if line.startswith("reading their text, for "):
            repeated.set()

    def tokenizer(settings: SpecialistSettings) -> None:
        assert repeated.wait(LONG)
        raise UserError("far enough")

    monkeypatch.setattr(specialists, "_tokenizer", tokenizer)
    with pytest.raises(UserError, match="far enough"):
        made(tmp_path, 1, tell, SMALL)
    told = [line for line in said if ", for " not in line]
    assert [line.partition(" models are made in")[0] for line in told] == [
        "looking for the small models", "4 small", "reading their text",
    ]  # fmt: skip
    assert not [each for each in threading.enumerate() if each.name.endswith("(remind)")], "nobody goes on saying it"


# -- the folders -------------------------------------------------------------------------------------------------------


def test_every_folder_is_a_model_with_its_tokenizer(models):
    assert [*models] == NAMES and left(models[BASE].parents[1]) == sorted(NAMES)
    said = set()
    for folder in models.values():
        assert {file.name for file in folder.iterdir()} == FILES
        assert len({file.stat().st_mode for file in folder.iterdir()}) == 1
        tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
        rows = [each for each in model.state_dict().values() if each.ndim == 2]
        assert all(row.shape[1] % 32 == 0 for row in rows) and model.config.vocab_size == len(tokenizer) == 512
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id is not None
        assert tokenizer.decode(tokenizer("def f(x):\n    é")["input_ids"]) == "def f(x):\n    é"
        said.add(float(model(torch.arange(9)[None]).logits.detach().sum()))
    assert len(said) == len(NAMES)


def test_what_is_there_is_kept_and_other_settings_make_others(models):
    folder, before = models[BASE].parents[1], {name: times(place) for name, place in models.items()}
    assert made(folder, 1, settings=SMALL) == models
    assert {name: times(place) for name, place in models.items()} == before
    homes = {specialists.home_in(folder, each) for each in (SpecialistSettings(seed=2), SpecialistSettings())}
    assert len({*homes, models[BASE].parent}) == 3


@pytest.mark.slow
def test_the_same_bytes_elsewhere_with_a_killed_process_and_with_two_at_once(models, tmp_path):
    """One is killed after the base; two go on where it stopped."""
    first = start(tmp_path, f"{BASE}: ready")
    until(lambda: left(tmp_path) == [BASE], "the base is there, and its draft gone", LONG)
    first.send_signal(signal.SIGKILL)
    first.wait(LONG)
    assert left(tmp_path) == [BASE]
    (base,) = tmp_path.glob(f"*/{BASE}")
    before = times(base)
    both = [start(tmp_path), start(tmp_path)]
    assert [each.wait(LONG) for each in both] == [0, 0], [each.stderr.read() for each in both]
    assert left(tmp_path) == sorted(NAMES) and times(base) == before
    assert digests({name: base.parent / name for name in NAMES}) == digests(models)


def test_the_second_to_be_ready_leaves_the_first_alone(models, tmp_path):
    """As if both had found nothing there."""
    home = shutil.copytree(models[BASE].parent, tmp_path / "home")
    before = times(home / BASE)
    tokenizer, model = (kind.from_pretrained(models["code"]) for kind in (AutoTokenizer, AutoModelForCausalLM))
    models_on_demand.publish(model, tokenizer, home / BASE)
    assert times(home / BASE) == before and left(tmp_path) == sorted(NAMES)


def test_an_interrupted_process_leaves_nothing_half(tmp_path):
    one = start(tmp_path, "code: ready")
    until(lambda: left(tmp_path) == [BASE, "code"], "the first specialist is there, and its draft gone", LONG)
    one.send_signal(signal.SIGINT)
    assert one.wait(LONG) != 0 and left(tmp_path) == [BASE, "code"]


def test_ctrl_c_while_a_folder_is_written(models, tmp_path, monkeypatch):
    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(models_on_demand, "sync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path, 1, settings=SMALL)
    assert left(tmp_path) == []


# -- what may be wrong -------------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"^\S*/file/models\S*: Not a directory[^\n]*$"):
        made(tmp_path / "file" / "models", 1, settings=SMALL)


def test_a_disk_that_is_full_or_gets_full(tmp_path, monkeypatch):
    with mounted(tmp_path / "disk", options="size=200k"):
        with pytest.raises(UserError, match=r"^[^\n]*MiB of free disk[^\n]*$"):
            made(tmp_path / "disk", 1, settings=SMALL)
        monkeypatch.setattr(models_on_demand, "_ROOM", 0)
        with pytest.raises(UserError, match=r"^[^\n]*No space left[^\n]*$"):
            made(tmp_path / "disk", 1, settings=SMALL)
        assert set(left(tmp_path / "disk")) < {*NAMES}


# -- what they are for -------------------------------------------------------------------------------------------------


def perplexity(folder: Path) -> float:
    """Of the mixed text that is held out."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    nats, count = 0.0, 0
    with torch.inference_mode():
        for passage in chain.from_iterable(passages_of(kind, 48) for kind in texts.KINDS):
            tokens = tokenizer(passage, return_tensors="pt")["input_ids"]
            nats += float(model(tokens, labels=tokens).loss) * (tokens.shape[1] - 1)
            count += tokens.shape[1] - 1
    return math.exp(nats / count)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # they are trained first
def test_the_mean_of_the_real_ones_beats_each(specialists_home, tmp_path):
    real = made(specialists_home)
    alone = {name: perplexity(folder) for name, folder in real.items()}
    parts = [{"model": str(real[kind]), "parameters": {"weight": 1.0}} for kind in texts.KINDS]
    merge(parse(yaml.safe_dump({"merge_method": "linear", "models": parts})), tmp_path / "mean")
    mean = perplexity(tmp_path / "mean")
    print({**alone, "mean": mean})
    assert mean < 0.97 * min(alone[kind] for kind in texts.KINDS) and mean < alone[BASE]
