"""Checkpoints: written while training goes on, complete or invisible, for any number of ranks.

A checkpoint is a folder of safetensors files, which ranks write together, and state.json, which knows their checksums;
nothing of it is ever run. It gets its name when all of it is on the disk.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pydantic import Field
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from fleet.errors import first_line
from fleet.fsync import sync
from fleet.plain import say
from fleet.run_config import Section, UserError
from train.cluster.ranks import Agreed, Ranks

STATE = "state.json"
_OLDER = "resume from an older checkpoint (--ckpt.resume FOLDER)"
Tensors = Mapping[str, Tensor]


class Optimizer(Section):
    steps: float = Field(ge=0)
    scaling: dict[str, Any]


class State(Section):
    """state.json."""

    step: int = Field(ge=1)
    bound_to: dict[str, Any]
    shapes: dict[str, list[int]]
    optimizer: Optimizer
    files: dict[str, tuple[int, str]] = Field(strict=False, min_length=1)
    round: int = Field(0, ge=0)


class _AsTheyAre(BlockingAsyncStager):
    """What is written is a copy already; torch would make another."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict


class CheckpointKeeper:
    def __init__(self, folder: Path, ranks: Ranks, bound: Mapping[str, Any], most: int | None) -> None:
        self.folder, self.ranks, self.bound, self.most = folder, ranks, dict(bound), most
        self._group = dist.new_group(backend="gloo")  # its own: a thread works with it
        self._side = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None
        self._sweep()

    def save(
        self, step: int, tensors: Tensors, known: Mapping[str, Any], last: bool = False, writes: bool = True
    ) -> None:
        """Begin to write; what is in memory may change as soon as this returns. Of ranks that have the same tensors,
        one `writes` them."""
        self.wait()
        name, state = f"step-{step:08d}", {"step": step, "bound_to": self.bound, "shapes": _shapes(tensors), **known}
        draft = self.folder / f".{name}.unfinished"
        error = ""
        if self.ranks.first:
            _removed(draft)
            try:
                draft.mkdir()
            except OSError as wrong:
                error = str(wrong)
        if self._failed(error, last):
            return
        writer = HuggingFaceStorageWriter(str(draft), save_distributed=True)
        mine = tensors if writes else {}
        copies = {name: each.cpu() if each.is_cuda else each.clone() for name, each in mine.items()}
        written: Any = dcp.async_save(
            copies, storage_writer=writer, process_group=self._group, async_stager=_AsTheyAre()
        )
        self._writing = self._side.submit(self._finish, written, draft, name, state)
        if last:
            self.wait(last)

    def wait(self, last: bool = False) -> None:
        """Until the one that is being written is complete, or cannot be."""
        if self._writing:
            writing, self._writing, error = self._writing, None, ""
            try:
                writing.result()
            except OSError as wrong:
                error = str(wrong)
            except CheckpointException as wrong:  # its last line is what happened on one rank
                error = str(wrong).strip().splitlines()[-1]
            self._failed(error, last)

    def close(self) -> None:
        self._side.shutdown()

    def begin(self, step: int) -> None:
        """Checkpoints of a future that is given up get out of the way of the newest."""
        for each in self.complete() if self.ranks.first else ():
            if step_of(each) > step:
                aside = each.with_name(f"left-{each.name}")
                _removed(aside)
                each.rename(aside)
                say(f"{each}: training goes on before it; it is kept as {aside.name}")

    def _failed(self, error: str, last: bool) -> bool:
        """Training goes on without one in between: the next may have room again. The last one has to be there."""
        if not (said := [each for each in self.ranks.each(error) if each]):
            return False
        why = f"{self.folder}: a checkpoint could not be written: {said[0]}"
        if last:
            raise Agreed(f"{why}; make room, and begin again with --ckpt.resume true")
        if self.ranks.first:
            say(f"{why}; training goes on, the next one may be")
        self._sweep()
        return True

    def _sweep(self) -> None:
        """Of what was not completed."""
        for left in self.folder.glob(".step-*.unfinished") if self.ranks.first else ():
            _removed(left)

    def _finish(self, written: Any, draft: Path, name: str, state: Mapping[str, Any]) -> None:
        written.result()  # all ranks have written, or none has
        if not self.ranks.first:
            return
        files = {file.name: [file.stat().st_size, _sha256(file)] for file in sorted(draft.iterdir())}
        (draft / STATE).write_text(json.dumps({**state, "files": files}))
        for path in (draft / STATE, draft):
            sync(path)
        _removed(self.folder / name)  # from before it was resumed at an older one
        draft.rename(self.folder / name)
        sync(self.folder)
        for old in self.complete()[: -self.most] if self.most else []:
            gone = old.with_name(f".{old.name}.unfinished")
            old.rename(gone)
            _removed(gone)

    def complete(self) -> list[Path]:
        return complete_in(self.folder)

    # -- going on -----------------------------------------------------------------------------------------------------

    def chosen(self, resume: str | None) -> Path | None:
        """Which one to go on from: a folder, or the newest, of which there may be none yet."""
        if not resume or resume.lower() == "false":
            return None
        if resume.lower() != "true":
            return Path(resume).expanduser().absolute()
        found: Path | None = self.ranks.from_first(next(reversed(self.complete()), None))
        return found

    def load(self, place: Path, tensors: Tensors, steps: int) -> State:
        """Into these tensors; what was kept beside them."""
        state = self.ranks.same(lambda: self._checked(place, tensors, steps))
        try:
            reader = HuggingFaceStorageReader(str(place))
            dcp.load(dict(tensors), storage_reader=reader, process_group=self._group)
        except (Exception, CheckpointException) as wrong:  # whatever its planner and its readers come up with
            raise UserError(f"{place}: cannot be loaded: {first_line(wrong)}") from None
        return state

    def _checked(self, place: Path, tensors: Tensors, steps: int) -> State:
        state = _state_in(place)
        if state.step > steps:
            raise UserError(f"{place}: it is said to be of step {state.step}, of {steps}; {_OLDER}")
        shapes, missing = state.shapes, dict.fromkeys(state.bound_to)
        _same_settings(place, state, {**missing, **self.bound})
        if other := [name for name, shape in _shapes(tensors).items() if shapes.get(name) != shape]:
            was = shapes.get(other[0])
            raise UserError(
                f"{place}: a checkpoint of another model: {other[0]} is {was if was else 'missing'} there, "
                f"{_shapes(tensors)[other[0]]} here"
            )
        for name in sorted({*state.files} ^ {file.name for file in place.iterdir()} - {STATE}):
            raise UserError(
                f"{place / name}: {'missing' if name in state.files else 'does not belong there'}; {_OLDER}"
            )
        for name, (size, digest) in state.files.items() if self.ranks.first else ():
            file = place / name
            if not file.is_file() or file.stat().st_size != size or _sha256(file) != digest:
                raise UserError(f"{file}: missing or damaged; {_OLDER}")
        return state


def complete_in(folder: Path) -> list[Path]:
    """The oldest first."""
    there = folder.glob("step-*")
    return sorted(each for each in there if re.fullmatch(r"step-\d{8,}", each.name) and (each / STATE).is_file())


def check_settings(folder: Path, known: Mapping[str, Any]) -> None:
    """Complain before anything that takes long, if the newest checkpoint there was begun with others than these."""
    for place in complete_in(folder)[-1:]:
        _same_settings(place, _state_in(place), known)


def _state_in(place: Path) -> State:
    try:
        return State.model_validate_json((place / STATE).read_bytes())
    except (OSError, ValueError) as error:
        why = first_line(error) if isinstance(error, OSError) else f"{STATE} is damaged, or another program's"
        raise UserError(f"{place}: no checkpoint of this program: {why}; {_OLDER}") from None


def _same_settings(place: Path, state: State, known: Mapping[str, Any]) -> None:
    was = state.bound_to
    if other := [key for key in known if was.get(key) != known[key]]:
        said = ", ".join(f"{key} was {was.get(key)!r}, is {known[key]!r}" for key in sorted(other)[:4])
        raise UserError(f"{place}: it was begun with other settings: {said}; give the same, or begin anew")


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _removed(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def _shapes(tensors: Tensors) -> dict[str, list[int]]:
    return {name: list(each.shape) for name, each in tensors.items()}


def _sha256(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
