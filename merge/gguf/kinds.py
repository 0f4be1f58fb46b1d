"""The kinds of models that have a place in GGUF files here, and what their tensors are called there."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from merge.files import UserError
from merge.gguf.header import Gguf

# llama.cpp's converter interleaves the rotary halves of the first kinds, and only renames the tensors of the others.
_INTERLEAVED, _PLAIN = ("llama", "mistral"), ("qwen2", "qwen3")
KINDS = (*_INTERLEAVED, *_PLAIN)


def architecture(kind: str) -> str:
    return "llama" if kind == "mistral" else kind


def layout(config: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """All tensors that a model has, in its order: by their names in a GGUF file, their names and shapes here."""
    import torch
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
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
