"""Whether a GGUF file is whole and right, and what is in it."""

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, dequantize
from torch import Tensor

from merge.donor import Donor, LazyTensor
from merge.donors import Donors
from merge.gguf import architectures
from merge.gguf.header import Gguf, read_gguf
from merge.tensor_files import CHUNK, UserError

_EXACT = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LEVELS = {"Q8_0": 127, "Q4_0": 8}  # steps from zero to a block's largest number
_SAME = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("max_position_embeddings", "vocab_size", "tie_word_embeddings"),
)


def info(path: Path | str) -> dict[str, Any]:
    """
    >>> info("model.gguf")["types"]
    {'F16': 211, 'F32': 61}
    """
    file = read_gguf(path)
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    return {
        "architecture": file.architecture,
        "name": file.metadata.get("general.name"),
        "version": file.version,
        "parameters": sum(math.prod(each.shape) for each in file.tensors.values()),
        "types": dict(sorted(Counter(_type(each.type) for each in file.tensors.values()).items())),
        "context": file.get("context_length"),
        "layers": file.get("block_count"),
        "tokens": len(tokens) if isinstance(tokens, (list, tuple)) else 0,
        "tokenizer": file.metadata.get("tokenizer.ggml.pre") or file.metadata.get("tokenizer.ggml.model"),
        "chat_template": "tokenizer.chat_template" in file.metadata,
        "bytes": file.size,
    }


def _type(number: int) -> str:
    return GGMLQuantizationType(number).name


def verify_gguf(path: Path | str, model_dir: Path | str | None = None) -> list[str]:
    """What is wrong with a file, by itself and beside the model that it was made of; nothing where all is well."""
    try:
        file = read_gguf(path)
        problems = [*_tokenizer(file), *_shapes(file), *_numbers(file)]
        if not problems and model_dir is not None:
            with Donors() as donors:
                problems += _compared(file, donors[str(file.path)], donors[str(model_dir)])
        return problems
    except UserError as error:
        return [str(error)]
    except (TypeError, AttributeError, ValueError, KeyError, IndexError) as error:  # settings of another kind
        return [f"its settings are not what they should be: {' '.join(str(error).split())[:200]}"]


def _shapes(file: Gguf) -> Iterator[str]:
    if file.architecture not in {architectures.architecture(kind) for kind in architectures.KINDS}:
        yield f"its architecture is {file.architecture!r}; {', '.join(architectures.KINDS)} can be checked"
        return
    try:
        wanted = architectures.layout(architectures.config_of(file))
    except Exception as error:  # whatever transformers makes of such settings
        yield f"its settings describe no model: {' '.join(str(error).split())[:200]}"
        return
    yield from architectures.misfits(wanted, file)


def _tokenizer(file: Gguf) -> Iterator[str]:
    said = {key.rpartition(".")[2]: each for key, each in file.metadata.items() if key.startswith("tokenizer.ggml.")}
    count = len(said.get("tokens", ()))
    rows = file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else 0
    if count != rows:
        yield f"its tokenizer has {count} tokens, its embedding {rows} rows"
    if file.get("vocab_size", count) != count:
        yield f"its vocab_size is {file.get('vocab_size')}, its tokenizer has {count} tokens"
    if len(set(said.get("tokens", ()))) < count:
        yield "some of its tokens are there twice"
    for key in ("token_type", "scores"):
        if len(said.get(key, said.get("tokens", ()))) != count:
            yield f"its tokenizer has {count} tokens and {len(said[key])} of {key}"
    if said.get("model") == "gpt2" and not said.get("merges"):
        yield "its tokenizer has no merges"
    for key, value in said.items():
        if key.endswith("_token_id") and not 0 <= value < count:
            yield f"its {key} is {value}, of {count} tokens"


def _numbers(file: Gguf) -> Iterator[str]:
    for name, tensor in file.tensors.items():
        rows, step = file.stored(name), max(1, CHUNK // tensor.shape[-1])
        try:
            kind = GGMLQuantizationType(tensor.type)
            pieces = (dequantize(rows[begin : begin + step], kind) for begin in range(0, len(rows), step))
            if not all(np.isfinite(piece).all() for piece in pieces):
                yield f"the tensor {name} has numbers that are not finite"
        except NotImplementedError:
            yield f"the tensor {name} is of a type that cannot be read here: {_type(tensor.type)}"


def _compared(file: Gguf, made: Donor, model: Donor) -> Iterator[str]:
    from transformers import AutoConfig

    one, other = architectures.config_of(file), AutoConfig.from_pretrained(model.folder, local_files_only=True)
    for key in _SAME:
        if getattr(one, key, None) != getattr(other, key, None):
            yield f"its {key} is {getattr(one, key, None)}, the model's {getattr(other, key, None)}"
    names = {name: there for there, (name, _) in architectures.layout(one).items()}
    for name, stored in made.tensors.items():
        theirs = model.tensors.get(name)
        if theirs is None or theirs.shape != stored.shape:
            yield f"the model has no tensor {name} of the shape {list(stored.shape)}"
        elif far := _differs(stored, theirs, _type(file.tensors[names[name]].type)):
            yield f"the tensor {name} differs from the model's in {far} numbers by more than rounding"


def _differs(stored: LazyTensor, theirs: LazyTensor, kind: str) -> int:
    """How many numbers are not what this type makes of the model's."""
    rows, step, count = math.prod(stored.shape[:-1]), max(1, CHUNK // stored.shape[-1]), 0
    for begin in range(0, rows, step):
        end = min(rows, begin + step)
        seen, wanted = stored.read_rows(begin, end).float(), theirs.read_rows(begin, end).float()
        if kind in _EXACT:
            count += int((seen != wanted.to(_EXACT[kind]).float()).sum())
        elif kind in _LEVELS:
            count += int(((seen - wanted).abs() > _allowed(wanted, kind)).sum())
        else:
            raise UserError(f"tensors of the type {kind} cannot be compared; {', '.join((*_EXACT, *_LEVELS))} can")
    return count


def _allowed(wanted: Tensor, kind: str) -> Tensor:
    """Half a step, and the rounding of the scale to 16 bits; Q4_0 has one step less on one side of zero."""
    blocks = wanted.reshape(-1, 32)
    step = blocks.abs().amax(1, keepdim=True) / _LEVELS[kind]
    half = torch.where(blocks.abs() > 7.4 * step, step, step / 2) if kind == "Q4_0" else step / 2
    return (1.0001 * half + _LEVELS[kind] * (step * 2**-11 + 2**-25)).expand_as(blocks).reshape(wanted.shape)
