"""Models in GGUF files: read row by row, dequantized, under the names that transformers gives their tensors."""

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from merge.donors import Donor, read_config
from merge.files import Wrong
from merge.weights import Stored

# llama.cpp's converter interleaves the rotary halves of the first kinds, and only renames the tensors of the others.
_INTERLEAVED, _PLAIN = ("llama", "mistral"), ("qwen2", "qwen3")


def open_gguf(path: Path, stack: ExitStack) -> Donor:
    """Its configuration and tokenizer are written, in Hugging Face form, to a folder that the stack removes."""
    if not path.is_file():
        raise Wrong(f"{path}: no such file")
    try:
        from gguf import GGUFReader
    except ImportError:
        raise Wrong("reading .gguf files needs a package: pip install gguf") from None
    try:
        reader = GGUFReader(path)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gguf-")))
        names = _describe(path, folder)
    except Wrong:
        raise
    except Exception as error:  # a damaged file fails in many ways
        raise Wrong(f"{path}: not a GGUF file that can be read: {str(error).splitlines()[0][:200]}") from None
    config = read_config(folder)
    tensors = {}
    for tensor in reader.tensors:
        if tensor.name in names:
            tensors[names[tensor.name]] = _stored(tensor, names[tensor.name], config)
        elif not tensor.name.startswith("rope_freqs"):
            raise Wrong(f"{path}: the tensor {tensor.name} has no place in a model of the kind {config['model_type']}")
    return Donor(str(path), folder, config, tensors)


def _describe(path: Path, folder: Path) -> Mapping[str, str]:
    """Write the model's configuration and tokenizer; its tensors' names there and here."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    kind = config.model_type
    if kind not in (*_PLAIN, *_INTERLEAVED):
        raise Wrong(f"{path}: GGUF files of the kind {kind} cannot be read here; merge the Hugging Face model")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    arch = {name: key for key, name in MODEL_ARCH_NAMES.items()}
    known = get_tensor_name_map(arch["llama" if kind == "mistral" else kind], config.num_hidden_layers)
    found = {}
    for name in model.state_dict():
        stem, _, suffix = name.rpartition(".")
        if there := known.get_name(stem):
            found[f"{there}.{suffix}"] = name
    return found


def _stored(tensor: Any, name: str, config: Mapping[str, Any]) -> Stored:
    from gguf import GGMLQuantizationType, dequantize

    shape = tuple(int(each) for each in reversed(tensor.shape))
    data = tensor.data.reshape(int(np.prod(shape[:-1])), -1)
    dtypes = {GGMLQuantizationType.F16: torch.float16, GGMLQuantizationType.BF16: torch.bfloat16}
    order = _order(name, shape, config)

    def rows(begin: int, end: int) -> Tensor:
        some = data[begin:end] if order is None or len(shape) == 1 else data[order[begin:end]]
        made = dequantize(some, tensor.tensor_type)
        made = made.copy() if order is None or len(shape) > 1 else made[:, order]
        return torch.from_numpy(made)

    return Stored(shape, dtypes.get(tensor.tensor_type, torch.float32), rows)


def _order(name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> np.ndarray | None:
    """Which row of the file each row is: the two halves of every head's rotary pairs stand there in turns."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    part = next((part for part in heads if f".{part}." in name), None)
    if config["model_type"] not in _INTERLEAVED or part is None:
        return None
    count = config[heads[part]]
    places = np.arange(shape[0] if len(shape) > 1 else shape[-1]).reshape(count, -1, 2)
    return places.swapaxes(1, 2).reshape(-1)
