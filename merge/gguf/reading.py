"""Models in GGUF files: read row by row, dequantized, under the names that transformers gives their tensors."""

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, dequantize
from torch import Tensor

from merge.donor import Donor, LazyTensor, read_config
from merge.gguf import architectures, gguf_tokenizer, header
from merge.gguf.header import Gguf
from merge.tensor_files import UserError


def open_gguf(path: Path, stack: ExitStack) -> Donor:
    """Its configuration and tokenizer are written, in Hugging Face form, to a folder that the stack removes."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    gguf = header.read_gguf(path)
    try:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gguf-")))
        layout = _describe(gguf, folder)
    except UserError:
        raise
    except Exception as error:  # a damaged file fails in many ways
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{path}: not a GGUF file that can be read: {why}") from None
    if problem := next(architectures.misfits(layout, gguf), None):
        raise UserError(f"{path}: {problem}")
    config = read_config(folder)
    tensors = {name: _stored(gguf, there, name, config) for there, (name, _) in layout.items()}
    return Donor(str(path), folder, config, tensors)


def _describe(gguf: Gguf, folder: Path) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """Write the model's configuration and tokenizer; its tensors' names there and here, and their shapes."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    config = architectures.config_of(gguf)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    with tempfile.TemporaryDirectory(prefix="gguf-") as alone:  # what else lies beside the file must not count
        (Path(alone) / "model.gguf").symlink_to(gguf.path.resolve())
        PreTrainedTokenizerFast.from_pretrained(alone, gguf_file="model.gguf").save_pretrained(folder)
    gguf_tokenizer.complete(folder, gguf)
    model.generation_config.save_pretrained(folder)
    return architectures.layout(config)


def _stored(gguf: Gguf, there: str, name: str, config: Mapping[str, Any]) -> LazyTensor:
    shape, kind, data = gguf.tensors[there].shape, GGMLQuantizationType(gguf.tensors[there].type), gguf.stored(there)
    heads = architectures.heads(name, config)
    order = None if heads is None else architectures.order(shape[0], heads)
    dtypes = {GGMLQuantizationType.F16: torch.float16, GGMLQuantizationType.BF16: torch.bfloat16}

    def rows(begin: int, end: int) -> Tensor:
        some = data[begin:end] if order is None or len(shape) == 1 else data[order[begin:end]]
        made = dequantize(some, kind)
        made = made.copy() if order is None or len(shape) > 1 else made[:, order]
        return torch.from_numpy(made)

    return LazyTensor(shape, dtypes.get(kind, torch.float32), rows)
