"""`python -m train.finetune`: one model learns from rows, goes on after a kill, ends as a folder that others load."""

import json
import math
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fleet.lm_eval_command import lm_eval
from fleet.run_config import UserError
from tests.posttraining import chats, model, preferences
from train.cluster import finetune_steps
from train.cluster.finetune_options import FinetuneOptions
from train.cluster.finetuning import finetune
from train.cluster.ranks import joined
from train.command_line import loading
from train.finetune import main
from train.posttrain.finetune_rows import held_apart, without
from train.text_sources import placed

ROOT = Path(__file__).parent.parent
FEW = {"batch_tokens": 300, "lr": 1e-3}


class Killed(BaseException):
    """Nobody catches it."""


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A model, conversations, preferences."""
    place = tmp_path_factory.mktemp("given")
    several = model(place / "model", 1, num_hidden_layers=4)  # fewer layers peft lists one by one
    return str(several), str(chats(place / "chats.jsonl", "cat")), str(preferences(place / "p.jsonl"))


@pytest.fixture(autouse=True)
def as_before():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


def made(given, out, rows=1, stop=0, **keys):
    """The code that it ends with."""
    with joined() as ranks:
        if stop:
            asked = iter(range(1, 10**6))
            ranks.told_to_stop = lambda: next(asked) >= stop
        return finetune(given[0], given[rows], out, FinetuneOptions(**{**FEW, **keys}), ranks)


def held_out(out, what="held_out"):
    lines = (out / "metrics.csv").read_text().splitlines()
    column = lines[0].split(",").index(what)
    return [float(value) for line in lines[1:] if (value := line.split(",")[column])]


def all_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


# -- what comes of it --------------------------------------------------------------------------------------------------


def test_an_adapter_that_peft_loads(given, tmp_path, capsys):
    out = tmp_path / "made" / "adapter"
    out.parent.mkdir()
    assert made(given, out) == 0
    from peft import AutoPeftModelForCausalLM

    tokens = AutoTokenizer.from_pretrained(out)("the cat", return_tensors="pt")
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(given[0])(**tokens).logits
        found = AutoPeftModelForCausalLM.from_pretrained(out)(**tokens).logits
    assert (plain - found).abs().max() > 1e-3
    losses = held_out(out)
    assert len(losses) > 5 and losses[-1] < losses[0] - 0.1
    said, card = capsys.readouterr().out, (out / "README.md").read_text()
    for line in (f"lm_eval --model hf --model_args pretrained={given[0]},peft={out}", f"{losses[-1]:.4f}"):
        assert line in said and line in card
    layers = json.loads((out / "adapter_config.json").read_text())["target_modules"]
    assert len(layers) == 7 and layers == sorted(layers)  # whatever the order of peft's sets
    assert "AutoPeftModelForCausalLM" in card and not out.with_name("adapter.training").exists()


@pytest.mark.parametrize("rank, said", [("0", "loading it\n"), ("1", "")])
def test_one_of_all_ranks_says_what_is_loaded(monkeypatch, capsys, rank, said):
    monkeypatch.setenv("RANK", rank)
    with loading("it"):
        pass
    assert capsys.readouterr() == ("", said)


def test_the_command_that_evaluates_can_name_any_folder():
    *_, asked, _, _ = shlex.split(lm_eval(Path("/a,b/it's c"), "org/base"))
    assert json.loads(asked) == {"pretrained": "org/base", "peft": "/a,b/it's c"}
    *_, asked, _, _ = shlex.split(lm_eval(Path("/a b")))
    assert asked == "pretrained=/a b"


def test_merged_is_what_the_adapter_says(given, tmp_path):
    from peft import AutoPeftModelForCausalLM

    assert made(given, tmp_path / "one", merge=True, dtype="float32") == made(given, tmp_path / "two") == 0
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "one")(tokens).logits
        beside = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "two")(tokens).logits
    assert torch.allclose(whole, beside, atol=1e-5)
    names = {path.name for path in (tmp_path / "one").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= names
    assert "mergekit_config.yml" not in names and "adapter_config.json" not in names


def test_all_weights_learn_and_keep_their_dtype(given, tmp_path):
    assert made(given, tmp_path / "out", full=True) == 0
    before, after = (load_file(Path(folder) / "model.safetensors") for folder in (given[0], tmp_path / "out"))
    assert before.keys() == after.keys() and all(before[name].dtype == each.dtype for name, each in after.items())
    assert all(not torch.equal(before[name], each) for name, each in after.items() if "proj" in name)


def test_preferences_begin_at_log_two_exactly(given, tmp_path, capsys):
    """In narrow numbers, too: the reference is computed as what is compared with it. Rewards are told beside it."""
    out = tmp_path / "out"
    assert made(given, out, rows=2, full=True, precision="bf16-mixed") == 0
    first, *_, last = held_out(out)
    assert first == pytest.approx(math.log(2), abs=1e-7) and last < first - 0.01
    accuracy, margin = (held_out(out, f"reward_{what}") for what in ("accuracy", "margin"))
    assert accuracy[0] == 0.5 and margin[0] == 0 and accuracy[-1] > 0.8
    assert math.log1p(math.exp(-margin[-1])) <= last + 1e-6 < first  # as of every convex function
    words = f"held out {last:.4f}, reward accuracy {accuracy[-1]:.4f}, margin {margin[-1]:.4f}"
    said = capsys.readouterr().out
    assert words in said and "held out 0.6931, reward accuracy 0.5000, margin 0.0000" in said


def test_prompts_and_completions_and_rows_to_measure_by(given, tmp_path, capsys):
    rows, held = tmp_path / "rows.jsonl", tmp_path / "held.jsonl"
    there = [{"prompt": f"the {n}", "completion": "cat"} for n in range(30)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in there))
    held.write_text("".join(json.dumps(row) + "\n" for row in there[3:5]))
    assert made((given[0], str(rows)), tmp_path / "out", held_out=str(held)) == 0
    said = capsys.readouterr().out
    assert "28 examples to learn from" in said and "2 examples held out" in said


# -- it goes on --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows, keys", [
    (1, {}), (2, {"full": True}), pytest.param(1, {"full": True}, marks=pytest.mark.slow),
    pytest.param(2, {}, marks=pytest.mark.slow),
])  # fmt: skip
def test_killed_and_stopped_it_ends_with_the_same_bytes(given, tmp_path, monkeypatch, capsys, rows, keys):
    names = ("here", "there")
    for name in names:
        (tmp_path / name).mkdir()
    whole, parts = (tmp_path / name / "out" for name in names)
    assert made(given, whole, rows, **keys) == 0
    real = finetune_steps.Training._save

    def fatal(self, step, last):
        real(self, step, last)
        if step == 4:
            self.keeper.wait()
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(finetune_steps.Training, "_save", fatal)
        with pytest.raises(Killed):
            made(given, parts, rows, save_minutes=1e-9, **keys)
    assert made(given, parts, rows, stop=2, **keys) == 130
    said = capsys.readouterr().out
    assert "going on from" in said and "stopped after step 6 of" in said and "the same command goes on" in said
    assert not parts.exists() and made(given, parts, rows, **keys) == 0
    one, two = all_of(whole), all_of(parts)
    assert one.pop("README.md").decode().replace("/here/", "/there/") == two.pop("README.md").decode()
    assert one == two and not parts.with_name("out.training").exists()


def test_other_settings_or_rows_do_not_go_on(given, tmp_path, capsys):
    """Which is said before anything is loaded; of settings, before rows are read."""
    out = tmp_path / "out"
    assert made(given, out, stop=2) == 130
    capsys.readouterr()
    with pytest.raises(UserError, match="lr was 0.001, is 0.002"):
        made(given, out, lr=0.002)
    assert not capsys.readouterr().out
    other = chats(tmp_path / "other.jsonl", "dog ran")
    with pytest.raises(UserError, match="rows was"):
        made((given[0], str(other)), out)
    said = capsys.readouterr().out
    assert "examples to learn from" in said and "loading" not in said
    assert made(given, out) == 0
    with pytest.raises(UserError, match="--overwrite replaces it"):
        made(given, out)
    assert made(given, out, overwrite=True) == 0


@pytest.mark.slow
def test_two_ranks_learn_as_one_does_and_survive_a_kill(given, tmp_path):
    """Each rank takes its share of the same steps, so that losses differ by rounding only. The killed one has so many
    steps before it that it is not done when the signal arrives."""
    words = ["--batch-tokens", "300", "--lr", "1e-3", "--full", "--device-rows", "2", "--seq-length", "64"]
    program = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "train.finetune"]
    command = [sys.executable, *program, given[0], given[1], *words]
    options = {"full": True, "device_rows": 2, "seq_length": 64}
    assert made(given, tmp_path / "one", **options) == 0
    subprocess.run([*command, "--out", tmp_path / "two"], cwd=ROOT, check=True)
    one, two = held_out(tmp_path / "one"), held_out(tmp_path / "two")
    assert one[0] == pytest.approx(two[0], rel=1e-5) and one[-1] == pytest.approx(two[-1], rel=0.05)
    command += ["--epochs", "20"]
    subprocess.run([*command, "--out", tmp_path / "whole"], cwd=ROOT, check=True)
    asked = [*command, "--out", tmp_path / "killed", "--save-minutes", "1e-9"]
    with subprocess.Popen(asked, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        next(line for line in process.stdout if line.startswith("step 7 "))
        os.killpg(process.pid, signal.SIGKILL)
    assert not (tmp_path / "killed").exists(), "it was killed on its way"
    subprocess.run([*command, "--out", tmp_path / "killed"], cwd=ROOT, check=True)
    assert all_of(tmp_path / "whole")["model.safetensors"] == all_of(tmp_path / "killed")["model.safetensors"]


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys, why", [
    ({"full": True, "merge": True}, "--full: all weights learn"),
    ({"sharding_strategy": "FULL_SHARD"}, "is for --full"),
    ({"epochs": 0.0}, "--epochs"),
    ({"lr": -1.0}, "--lr"),
    ({"seq_length": 4096}, "the model knows 128 positions"),
    ({"target": ["nothing"]}, "no linear layer has 'nothing' in its name"),
    ({"objective": "dpo"}, "line 1: .*rejected.* is expected"),
    ({"held_out": "/nowhere.jsonl"}, "/nowhere.jsonl: cannot be read"),
])  # fmt: skip
def test_what_cannot_work_is_said_and_leaves_nothing(given, tmp_path, keys, why):
    with pytest.raises(UserError, match=why):
        made(given, tmp_path / "out", **keys)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("bad", [4, 59])  # counted among what is left after some are held out, neither is
def test_a_row_that_cannot_be_used_is_named_by_its_line(given, tmp_path, bad):
    there = Path(given[1]).read_text().splitlines()
    there[bad - 1] = json.dumps({"messages": [{"role": "assistant", "content": "cat"}]})
    (tmp_path / "rows.jsonl").write_text("\n" + "\n".join(there))
    with pytest.raises(UserError, match=rf"rows\.jsonl, line {bad + 1}: an answer is expected after a question"):
        made((given[0], str(tmp_path / "rows.jsonl")), tmp_path / "out")


def test_an_adapter_needs_a_base_that_others_load(given, tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"")
    with pytest.raises(UserError, match="give --merge"):
        made((str(tmp_path / "a.gguf"), given[1]), tmp_path / "out")
    with pytest.raises(UserError, match="no such file or folder"):
        made(("/nowhere/model", given[1]), tmp_path / "out")


def test_where_memory_does_not_suffice_it_says_what_needs_less(given, tmp_path, monkeypatch):
    def broken(self, begin, lines):
        torch.empty(1 << 50)

    monkeypatch.setattr(finetune_steps.Training, "run", broken)
    with pytest.raises(UserError, match="the memory of this machine does not suffice: .*; fewer --device-rows"):
        main(given[0], given[1], out=tmp_path / "out")


# -- rows that only measure --------------------------------------------------------------------------------------------


def test_duplicates_and_turns_of_a_conversation_are_on_one_side():
    def row(number, turns):
        asked = [{"role": "user", "content": f"{number}"}, {"role": "assistant", "content": "yes"}]
        return {"messages": [asked[n % 2] | {"turn": f"{n}"} if n > 1 else asked[n % 2] for n in range(turns)]}

    rows = [*placed((row(number % 70, 2 + 2 * (number // 70)) for number in range(140)), "rows")]
    learned, held = held_apart(rows)
    assert len(learned) + len(held) == len(rows) and 5 <= len(held) <= 20
    first = [{each["messages"][0]["content"] for _, each in some} for some in (learned, held)]
    assert not first[0] & first[1]
    assert len({int(number) for number in first[1]}) >= 5  # from several places


def test_where_all_begin_alike_only_the_same_rows_are_kept_together():
    rows = [*placed(({"prompt": "say", "completion": f"{n % 50}"} for n in range(100)), "rows")]
    learned, held = held_apart(rows)
    assert held and not {row["completion"] for _, row in held} & {row["completion"] for _, row in learned}
    with pytest.raises(UserError, match="too much alike"):
        held_apart([*placed([{"text": "a"}] * 30, "rows")])
    a, b = placed([{"text": "a"}, {"text": "b"}], "rows")
    assert without([a, b], [("another file, line 7", {"text": "a"})]) == [b]
