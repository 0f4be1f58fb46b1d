"""The kinds of models that have a place in GGUF files here: their configuration as settings and back, their tensors."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, RopeScalingType, get_tensor_name_map

from fleet.untrusted_model import check_config
from merge.gguf.header import Gguf
from merge.tensor_files import UserError

# llama.cpp's converter interleaves the rotary halves of the first kinds, and only renames the tensors of the others.
_INTERLEAVED, _PLAIN = ("llama", "mistral"), ("qwen2", "qwen3")
KINDS = (*_INTERLEAVED, *_PLAIN)


def architecture(kind: str) -> str:
    return "llama" if kind == "mistral" else kind


def layout(config: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """All tensors that a model has, in its order: by their names in a GGUF file, their names and shapes here."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture(config.model_type))
    known = get_tensor_name_map(arch, config.num_hidden_layers)
    found = {}
    for name, tensor in model.state_dict().items():
        stem, _, suffix = name.rpartition(".")
        if (there := known.get_name(stem)) is None:
            raise UserError(f"the tensor {name} has no place in a GGUF file of the kind {config.model_type}")
        if not (config.tie_word_embeddings and there == "output"):
            found[f"{there}.{suffix}"] = (name, tuple(tensor.shape))
    return found


def misfits(layout: Mapping[str, tuple[str, tuple[int, ...]]], gguf: Gguf) -> Iterator[str]:
    """What a file lacks of such a model, or has beside it."""
    for name, (_, shape) in layout.items():
        if name not in gguf.tensors:
            yield f"the tensor {name} is missing"
        elif (seen := gguf.tensors[name].shape) != shape:
            yield f"the tensor {name} has the shape {list(seen)}; {list(shape)} is expected"
    for name in gguf.tensors:
        if name not in layout and not name.startswith("rope_freqs"):
            yield f"the tensor {name[:60]} has no place in a model of the kind {gguf.architecture}"


def heads(name: str, config: Mapping[str, Any]) -> int | None:
    """Into how many heads a tensor's rows are divided, where their rotary halves stand in turns in the file."""
    counts = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    part = next((part for part in counts if f".{part}." in name), None)
    return config[counts[part]] if part and config["model_type"] in _INTERLEAVED else None


def order(rows: int, heads: int) -> np.ndarray:
    """Which row of the file each row of the model is."""
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


# -- settings ----------------------------------------------------------------------------------------------------------

_NUMBERS = {
    **{"max_position_embeddings": "context_length", "hidden_size": "embedding_length"},
    **{"num_hidden_layers": "block_count", "intermediate_size": "feed_forward_length"},
    **{"num_attention_heads": "attention.head_count"},
}
_SCALING = {
    **{"factor": "factor", "original_max_position_embeddings": "original_context_length"},
    **{"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow", "attention_factor": "yarn_attn_factor"},
}
_IDS = {"bos": "bos", "eos": "eos", "pad": "padding"}
_LEAST = 7  # tensors of a layer


def add_settings(writer: Any, config: Any) -> list[str]:
    """What llama.cpp must know of the model; notes on what it does otherwise."""
    if missing := [key for key in _NUMBERS if not isinstance(getattr(config, key, None), int)]:
        raise UserError(f"its config.json has no usable {', '.join(missing)}")
    if (used := getattr(config, "hidden_act", "silu")) != "silu":
        raise UserError(f"its hidden_act is {used!r}; llama.cpp computes a {config.model_type} with silu")
    head = head_size(config)
    for name, value in (
        ("context_length", config.max_position_embeddings),
        ("embedding_length", config.hidden_size),
        ("block_count", config.num_hidden_layers),
        ("feed_forward_length", config.intermediate_size),
        ("head_count", config.num_attention_heads),
        ("head_count_kv", config.num_key_value_heads),
        *((name, head) for name in ("key_length", "value_length", "rope_dimension_count")),
        ("layer_norm_rms_eps", config.rms_norm_eps),
        ("vocab_size", config.vocab_size),
    ):
        getattr(writer, f"add_{name}")(value)
    _add_rope(writer, config.rope_parameters)
    if window := window_of(config):
        writer.add_sliding_window(window)
        return [f"llama.cpp does not use the sliding window of {window} tokens: longer texts are seen as a whole"]
    return []


def head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def window_of(config: Any) -> int | None:
    return getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None


def _add_rope(writer: Any, rope: Any) -> None:
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError("its rotary embedding covers a part of each head; that cannot be written here")
    writer.add_rope_freq_base(rope["rope_theta"])
    kind = rope.get("rope_type", "default")
    if kind in ("default", "llama3"):  # llama3's factors are a tensor
        return
    if kind not in ("linear", "yarn"):
        raise UserError(f"its rope_type is {kind!r}; default, linear, yarn and llama3 can be written")
    writer.add_rope_scaling_type(RopeScalingType(kind))
    writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for key in ("attention_factor", "beta_fast", "beta_slow"):
            if rope.get(key) is not None:
                getattr(writer, f"add_rope_scaling_yarn_{key.replace('attention', 'attn')}")(rope[key])


def rope_factors(rope: Any, head: int) -> np.ndarray:
    """By what llama3's scaling divides each frequency: long waves by its factor, short ones by nothing."""
    low, high, context = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    turns = context / (2 * math.pi) * _frequencies(rope["rope_theta"], head)  # of each wave within the old context
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / rope["factor"] + smooth), np.float32)


def _frequencies(theta: float, head: int) -> np.ndarray:
    return theta ** (-np.arange(0, head, 2) / head)


# -- and back ----------------------------------------------------------------------------------------------------------


def config_of(gguf: Gguf) -> Any:
    """The configuration that transformers has for such a model; what it would take for granted is looked up, too."""
    from transformers import AutoConfig

    window = gguf.get("attention.sliding_window") if gguf.architecture == "llama" else None
    kind = "mistral" if window else gguf.architecture
    if kind not in KINDS:
        raise UserError(f"{gguf.path}: GGUF files of the kind {kind} cannot be read here; merge the Hugging Face model")
    numbers = {here: gguf.get(there) for here, there in _NUMBERS.items()}
    numbers["num_key_value_heads"] = gguf.get("attention.head_count_kv", numbers["num_attention_heads"])
    if wrong := [key for key, value in numbers.items() if type(value) is not int or not 0 < value < 1 << 31]:
        raise UserError(f"{gguf.path}: it does not say how many {', '.join(wrong)} the model has")
    if "token_embd.weight" not in gguf.tensors:
        raise UserError(f"{gguf.path}: it has no token_embd.weight")
    there = len({name.split(".")[1] for name in gguf.tensors if name.startswith("blk.")})
    if numbers["num_hidden_layers"] != there:
        raise UserError(f"{gguf.path}: it has {there} layers and says {numbers['num_hidden_layers']}")
    if numbers["num_hidden_layers"] * _LEAST > len(gguf.tensors):
        raise UserError(
            f"{gguf.path}: its {numbers['num_hidden_layers']} layers cannot be in {len(gguf.tensors)} tensors"
        )
    check_config(numbers, str(gguf.path))
    ids = {f"{here}_token_id": gguf.metadata.get(f"tokenizer.ggml.{there}_token_id") for here, there in _IDS.items()}
    config = AutoConfig.for_model(kind, **numbers, **ids, vocab_size=gguf.tensors["token_embd.weight"].shape[0])
    config.tie_word_embeddings = "output.weight" not in gguf.tensors
    config.head_dim = gguf.get("attention.key_length") or config.hidden_size // config.num_attention_heads
    config.rms_norm_eps = _short(gguf.get("attention.layer_norm_rms_epsilon", 1e-5))
    theta = _short(gguf.get("rope.freq_base", 10000.0))
    config.rope_parameters = {"rope_theta": theta, **_rope_of(gguf, theta, config.head_dim)}
    if kind == "llama":
        config.attention_bias = "blk.0.attn_q.bias" in gguf.tensors
        config.mlp_bias = "blk.0.ffn_up.bias" in gguf.tensors
    if kind == "mistral":
        config.sliding_window = window
    return config


def _short(number: float) -> float:
    """Of all numbers that are the same in 32 bits, the one that people write."""
    return float(str(np.float32(number)))


def _rope_of(gguf: Gguf, theta: float, head: int) -> dict[str, Any]:
    if "rope_freqs.weight" in gguf.tensors:
        return _llama3(gguf, theta, head)
    kind = gguf.get("rope.scaling.type") or ("linear" if gguf.get("rope.scaling.factor") else "none")
    if kind == "none":
        return {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise UserError(f"{gguf.path}: rotary embeddings that are scaled by {str(kind)[:60]!r} cannot be read here")
    keys = ("factor",) if kind == "linear" else tuple(_SCALING)
    found = {key: gguf.get(f"rope.scaling.{_SCALING[key]}") for key in keys}
    said = {key: _short(value) if type(value) is float else value for key, value in found.items() if value is not None}
    return {"rope_type": kind, **said}


def _llama3(gguf: Gguf, theta: float, head: int) -> dict[str, Any]:
    """The settings that give such factors; the lower bound is one turn within the old context, as it always was."""
    factors = gguf.stored("rope_freqs.weight").reshape(-1).astype(float)
    if np.all(factors == 1) or len(factors) != head // 2:
        return {"rope_type": "default"}
    most = factors.max()
    between = (factors > 1.0001) & (factors < most * 0.9999)
    smooth = (1 / factors - 1 / most) / (1 - 1 / most)
    context, high = 8192, 4.0
    if between.sum() > 1:  # a line, over the frequencies
        slope, begin = np.polyfit(_frequencies(theta, head)[between], smooth[between], 1)
        context, high = round(2 * math.pi * -slope / begin), round(1 - 1 / begin, 3)
    found = {"factor": _short(most), "low_freq_factor": 1.0, "high_freq_factor": high}
    found["original_max_position_embeddings"] = context
    if not np.allclose(rope_factors({"rope_theta": theta, **found}, head), factors, rtol=1e-3):
        raise UserError(f"{gguf.path}: its rope_freqs are not scaled as Llama 3's are; merge the Hugging Face model")
    return {"rope_type": "llama3", **found}
