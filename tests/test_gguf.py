"""Models as GGUF files: what is written is what the model has, for every reader."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.gguf_models import KINDS, made
from tests.merging import weights
from tests.toy.little_models import ROPES

gguf = pytest.importorskip("gguf", reason="gguf is not installed: GGUF files are not tested")
from merge.gguf.checking import info, verify_gguf  # noqa: E402
from merge.gguf.header import read_gguf  # noqa: E402
from merge.gguf.writing import export_gguf, gguf_to_hf  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def logits(folder: Path, **how) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how)
    with torch.no_grad():
        return model(torch.arange(48)[None] * 3).logits


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
