"""What a tournament refuses, in one line, and its command line."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    RobertaConfig,
    RobertaForMaskedLM,
)

from evomerge import cli as command_line
from evomerge import tournament_results, tournament_running
from evomerge.config import (
    Configuration,
    ModelReference,
)
from evomerge.given_models import resolved
from evomerge.utils import (
    EvoMergeException,
    validate_merge_config,
)
from fleet.errors import UserError
from tests import merging
from tests.tournaments import cli, config, encoder, models, worker


@pytest.fixture(scope="module")
def winner(tmp_path_factory) -> Path:
    """Of a short tournament, made in this process; its settings stand in mine.json beside the run."""
    folder = tmp_path_factory.mktemp("short")
    c = config(folder, num_generations=1)
    c.save(folder / "mine.json")
    assert worker(c).run() == "over"
    return tournament_running.concluded(folder / "run")


def refused(c: Configuration) -> str:
    with pytest.raises(EvoMergeException) as error:
        validate_merge_config(c)
    assert error.value.__cause__ is not None and "\n" not in str(error.value)
    return str(error.value)


def test_models_of_different_architectures_are_refused(tmp_path):
    bert = encoder(tmp_path / "bert", BertConfig, BertForMaskedLM, 0)
    roberta = encoder(tmp_path / "roberta", RobertaConfig, RobertaForMaskedLM, 1)
    said = refused(Configuration(models=[bert, roberta]))
    assert "is a bert" in said and "a roberta" in said and "another bert or another roberta" in said
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4)).save_pretrained(tmp_path / "gpt2")
    merging.tokenizer(tmp_path / "gpt2", "the cat sat", size=290)
    llamas = models(tmp_path, 2)
    said = refused(Configuration(models=[llamas[0], ModelReference("g", tmp_path / "gpt2"), llamas[1]]))
    assert "model0 is a llama, g a gpt2" in said and "model0 with model1 could be merged" in said


@pytest.mark.parametrize("shape", [{"hidden_size": 64}, {"num_hidden_layers": 2}, {"intermediate_size": 64},
                                   {"num_key_value_heads": 4}])  # fmt: skip
def test_models_of_different_shapes_are_refused(tmp_path, shape):
    other = models(tmp_path / "other", 1, **shape)[0]
    said = refused(Configuration(models=[models(tmp_path, 1)[0], ModelReference("other", other.path)]))
    assert f"{[*shape][0]} is" in said and str([*shape.values()][0]) in said


def test_what_an_older_file_does_not_say_is_no_difference(tmp_path):
    there = models(tmp_path, 2)
    config = Path(there[1].path) / "config.json"
    said = {key: value for key, value in json.loads(config.read_text()).items() if key != "head_dim"}
    config.write_text(json.dumps(said))
    validate_merge_config(Configuration(models=there))


def test_a_model_without_a_tokenizer_is_refused(tmp_path):
    there = models(tmp_path, 2)
    for file in Path(there[1].path).glob("tokenizer*"):
        file.unlink()
    assert "no tokenizer" in refused(Configuration(models=there))


def test_missing_and_broken_files_are_refused(tmp_path):
    there = models(tmp_path, 2)
    with pytest.raises(EvoMergeException, match="not a folder with a model"):
        validate_merge_config(Configuration(models=[there[0], ModelReference("x", str(tmp_path / "nowhere"))]))
    (Path(there[1].path) / "model.safetensors").write_bytes(b"\xff" * 100)
    assert "model.safetensors" in refused(Configuration(models=there))
    (Path(there[1].path) / "config.json").write_text("{")
    assert "config.json" in refused(Configuration(models=there))


@pytest.mark.parametrize("words, said", [
    (["--run", "--model1", "/nowhere"], "not a folder with a model"), (["--run", "--method", "magic"], "merge_method"),
    (["--run", "--generations", "0"], "num_generations"), (["--run", "--config", "/nowhere.json"], "cannot be read"),
    (["--generate", "/nowhere", "--prompt", "x"], "/nowhere"), (["--generate", "/nowhere"], "--prompt"),
    (["--prompt", "x", "--run"], "--generate"), (["--pareto", "--out", "/nowhere"], "not the folder of a run"),
    (["--run", "--tasks", "a:b"], "name:weight"), (["--run", "--export-gguf", "Q9"], "Q8_0"),
    (["--run", "--machines", "/nowhere.json"], "nowhere.json"),
    (["--run", "--out", "{}/a b"], "folder's name"),
    (["--evaluate", "{}"], "model_type"),
    (["--run", "--model1", "a/b", "--model2", "a/b"], "a/b is given twice"),
    (["--run", "--model1", "https://example.org/a"], "a link to a model's hub page is expected"),
    (["--generate", "https://example.org/a", "--prompt", "x"], "a link to a model's hub page is expected"),
    (["--generate", "/" + 300 * "x", "--prompt", "x"], "no such place: File name too long"),
])  # fmt: skip
def test_what_cannot_be_done_is_said_in_a_line(tmp_path, here, words, said):
    done = here(*(word.format(tmp_path) for word in words))
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("where, said", [("loop/x", "Symlink loop"), ("file/x/y", "file: Not a directory")])
def test_what_cannot_be_made_is_said_before_anything_is_loaded(tmp_path, monkeypatch, capsys, where, said):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    monkeypatch.setitem(sys.modules, "evomerge.tournament_running", None)
    with pytest.raises(SystemExit):
        command_line.run(["--run", "--out", str(tmp_path / where)])
    assert said in capsys.readouterr().err


def test_where_nobody_is_at_home_it_says_what_helps(monkeypatch):
    monkeypatch.delenv("EVOMERGE_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-of-this-name")
    with pytest.raises(UserError, match="determine home directory; set EVOMERGE_HOME to a folder"):
        resolved([ModelReference("base", "builtin:base")])


def test_a_prompt_longer_than_the_context_is_refused(winner, here):
    done = here("--generate", winner, "--prompt", "the cat sat " * 50)
    assert done.returncode == 2 and "context of 64" in done.stderr
    done = here("--generate", winner, "--prompt", "the cat sat on a mat and", "--max-length", 3)
    assert done.returncode == 2 and "max_length" in done.stderr
    done = here("--generate", winner, "--prompt", "the cat\udcff", "--max-length", 12)  # a byte that is no UTF-8
    assert done.returncode == 0 and done.stdout.startswith("the cat")


def test_help_without_arguments():
    said = cli()
    assert said.returncode == 0 and said.stdout.count("python -m evomerge.cli --") == 3
    promised = "run evaluate generate prompt config model1 model2 model3 tasks generations out workers machines seed"
    assert all(f"--{option}" in said.stdout for option in (*promised.split(), "export-gguf", "pareto"))


def test_the_command_line_evaluates_lists_and_exports(winner, here):
    run, settings = winner.parent, winner.parents[1] / "mine.json"
    said = here("--evaluate", winner, "--config", settings)
    assert said.returncode == 0 and "perplexity" in said.stdout
    said = here("--pareto", "--config", settings)
    assert said.returncode == 0 and tournament_results.found_in(run).best.name[:20] in said.stdout.replace("\n", "")
    said = here("--export-gguf", "f16", "--config", settings)
    assert said.returncode == 0, said.stderr
    file = run / "winner-F16.gguf"
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    tokens = AutoTokenizer.from_pretrained(winner)("the cat sat", return_tensors="pt")["input_ids"]
    whole = AutoModelForCausalLM.from_pretrained(winner, dtype=torch.float32)
    assert torch.allclose(model(tokens).logits, whole(tokens).logits, atol=2e-2)


def test_gguf_files_compete_like_folders(tmp_path):
    from evomerge.gguf_utils import export_gguf

    c = config(tmp_path, num_generations=1)
    file = tmp_path / "model0.gguf"
    export_gguf(c.models[0].path, file, "F32")
    c.models = [ModelReference("", file), *c.models[1:]]
    assert worker(c).run() == "over"
    assert tournament_results.found_in(tmp_path / "run").best.score is not None
