"""A model as a GGUF file, written from front to back, a piece of a tensor at a time; and back into a folder."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, LlamaFileType, quantize

from fleet.errors import from_home
from merge import tensor_names
from merge.atomic_output import atomic_file, file_free_for
from merge.donor import Donor, LazyTensor
from merge.donors import Donors
from merge.gguf import architectures, gguf_tokenizer
from merge.merge_recipe import alone, parse, text_of
from merge.merging import merge
from merge.tensor_files import CHUNK, UserError

TYPES = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16", "Q8_0": "MOSTLY_Q8_0", "Q4_0": "MOSTLY_Q4_0"}
_LARGEST = {"F16": 65504.0, "Q8_0": 127 * 65504.0, "Q4_0": 8 * 65504.0}  # a block's scale is a half, too


@dataclass(frozen=True)
class Written:
    """What became of an export."""

    path: Path
    bytes: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Job:
    """A tensor to write, and in how many heads its rows are to be put in turns."""

    name: str
    stored: LazyTensor
    type: Any
    heads: int | None = None

    @property
    def bytes(self) -> int:
        block, width = GGML_QUANT_SIZES[self.type]
        return math.prod(self.stored.shape) // block * width


def export_gguf(
    model_dir: Path | str,
    out: Path | str,
    type: str = "F16",
    *,
    overwrite: bool = False,
    pre: str | None = None,
    progress: Callable[[int, int], None] = lambda bytes, total: None,
) -> Written:
    """Write a model for llama.cpp. PRE names its way to cut text into words, where that cannot be seen.

    >>> export_gguf("merged", "merged.gguf", "Q8_0")
    """
    if (kind := type.upper()) not in TYPES:
        raise UserError(f"{type} is none of the types that can be written: {', '.join(TYPES)}")
    out = file_free_for(from_home(out), overwrite)
    with Donors() as donors:
        donor = donors[str(model_dir)]
        writer, jobs, notes = _planned(donor, kind, pre)
        total = sum(job.bytes for job in jobs)
        with atomic_file(out, total, overwrite) as draft:
            _write(writer, jobs, draft, lambda done: progress(done, total))
    return Written(out, out.stat().st_size, tuple(notes))


def gguf_to_hf(
    path: Path | str,
    out: Path | str,
    dtype: str = "float32",
    *,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda bytes, total: None,
) -> Path:
    """The way back: weights, configuration and tokenizer, as a recipe that merges the file with nothing writes them.

    >>> gguf_to_hf("model.gguf", "model", dtype="bfloat16")
    """
    if not str(path).endswith(".gguf"):
        raise UserError(f"{path}: the name of a GGUF file ends in .gguf")
    merge(parse(text_of(alone(str(path), dtype=dtype))), out, overwrite=overwrite, progress=progress)
    return Path(out)


def _planned(donor: Donor, kind: str, pre: str | None) -> tuple[Any, list[_Job], list[str]]:
    config = _config(donor)
    writer = GGUFWriter(None, architectures.architecture(config.model_type))
    writer.add_type("model")
    called = Path(donor.reference).stem or "model"
    writer.add_name("Mistral" if called == "mistral" else called)  # transformers stumbles over a file of just that name
    notes = architectures.add_settings(writer, config)
    writer.add_file_type(LlamaFileType[TYPES[kind]])
    writer.add_quantization_version(2)
    try:
        notes += gguf_tokenizer.add_tokens(writer, donor.folder, config, pre)
    except UserError as error:
        raise UserError(f"{donor.reference}: {error}") from None
    jobs, more = _jobs(donor, config, kind)
    return writer, jobs, notes + more


def _config(donor: Donor) -> Any:
    from transformers import AutoConfig

    if (kind := donor.config.get("model_type")) not in architectures.KINDS:
        raise UserError(
            f"{donor.reference}: models of the kind {kind} cannot be written; {', '.join(architectures.KINDS)} can"
        )
    try:
        return AutoConfig.from_pretrained(donor.folder, local_files_only=True)
    except Exception as error:  # whatever transformers can come up with
        raise UserError(f"{donor.reference}: its config.json: {' '.join(str(error).split())[:200]}") from None


def _jobs(donor: Donor, config: Any, kind: str) -> tuple[list[_Job], list[str]]:
    wanted = architectures.layout(config)
    beside = {name for name, each in donor.tensors.items() if tensor_names.is_buffer(name, len(each.shape))}
    others = donor.tensors.keys() - {name for name, _ in wanted.values()} - beside
    if extra := [name for name in others if not (config.tie_word_embeddings and tensor_names.is_head(name))]:
        raise UserError(f"{donor.reference}: its tensor {min(extra)} has no place in a GGUF file of its kind")
    jobs, notes = [], []
    for there, (name, shape) in wanted.items():
        stored = donor.tensors.get(name)
        if stored is None or stored.shape != shape:
            seen = "is missing" if stored is None else f"has the shape {list(stored.shape)}"
            raise UserError(f"{donor.reference}: its tensor {name} {seen}; {list(shape)} is expected")
        sort = GGMLQuantizationType[kind if len(shape) > 1 else "F32"]
        if shape[-1] % GGML_QUANT_SIZES[sort][0]:
            notes.append(f"{name} is F16: its rows of {shape[-1]} numbers do not divide into blocks of {kind}")
            sort = GGMLQuantizationType.F16
        jobs.append(_Job(there, stored, sort, architectures.heads(name, donor.config | config.to_dict())))
    if config.rope_parameters.get("rope_type") == "llama3":
        factors = torch.from_numpy(architectures.rope_factors(config.rope_parameters, architectures.head_size(config)))
        rows = LazyTensor((len(factors),), torch.float32, lambda begin, end: factors[None])
        jobs.insert(0, _Job("rope_freqs.weight", rows, GGMLQuantizationType.F32))
    return jobs, notes


def _write(writer: Any, jobs: list[_Job], draft: Path, done: Callable[[int], None]) -> None:
    for job in jobs:
        writer.add_tensor_info(job.name, job.stored.shape, np.dtype(np.float32), job.bytes, job.type)
    try:
        writer.write_header_to_file(draft)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        file, count = writer.fout[0], 0
        for job in jobs:
            writer.write_padding(file, file.tell())
            for piece in _pieces(job):
                file.write(piece.tobytes())
                count += piece.nbytes
                done(count)
        writer.write_padding(file, file.tell())
        file.flush()
        os.fsync(file.fileno())
    finally:
        with suppress(OSError):  # what could not be written, was said already
            writer.close()


def _pieces(job: _Job) -> Iterator[np.ndarray]:
    """So many rows at a time, whole heads where these are put in turns."""
    shape = job.stored.shape
    count, heads = math.prod(shape[:-1]), job.heads
    if heads and len(shape) == 1:  # a bias: one row
        order = np.argsort(architectures.order(shape[0], heads))
        yield quantize(_floats(job, 0, 1)[:, order], job.type)
        return
    head = count // heads if heads else 1
    step = max(1, CHUNK // shape[-1] // head) * head
    for begin in range(0, count, step):
        end = min(count, begin + step)
        rows = _floats(job, begin, end)
        if heads:
            rows = rows[np.argsort(architectures.order(end - begin, (end - begin) // head))]
        yield quantize(rows, job.type)


def _floats(job: _Job, begin: int, end: int) -> np.ndarray:
    rows = np.ascontiguousarray(job.stored.read_rows(begin, end).float().numpy())
    if not (np.abs(rows) <= _LARGEST.get(job.type.name, np.finfo(np.float32).max)).all():
        raise UserError(f"the tensor {job.name} has numbers that are not finite, or too large for {job.type.name}")
    return rows
