"""The processes that torchrun has started, or a worker of the fleet: who is who, what they agree on, how they end."""

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fleet.errors import Lacking
from fleet.run_config import UserError
from train.command_line import Agreed as Agreed

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_PATIENCE = timedelta(minutes=10)  # for a rank that says nothing in the middle of a step; NCCL's own is as long
_TALK = timedelta(days=1000)  # for words: one rank may work for long while the others wait to hear of it


T = TypeVar("T")


@dataclass
class Ranks:
    rank: int
    count: int
    here: int  # ranks on this machine
    device: torch.device
    leads_here: bool  # the first one of this machine
    signals: list[int] = field(default_factory=list)
    talk: Any = None  # a group of its own for words, which may wait for as long as they like

    def listen(self) -> None:
        """To be told to stop is remembered until all ranks can stop together; to be told twice ends it at once."""
        for number in _SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signals:
            raise KeyboardInterrupt
        self.signals.append(number)

    def deaf(self) -> None:
        """Signals mean what they always mean: the process ends."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Whether it is so for one of them. On the CPU, so that no device is waited for."""
        told = torch.tensor([float(flag)])
        dist.all_reduce(told, group=self.talk)
        return bool(told.item())

    def told_to_stop(self) -> bool:
        """All leave after the same step."""
        return self.any(bool(self.signals))

    def mean(self, value: Tensor) -> Tensor:
        total = value.detach().clone()
        dist.all_reduce(total)
        return total / self.count

    def from_first(self, value: Any) -> Any:
        """What the first one knows."""
        held = [value]
        dist.broadcast_object_list(held, src=0, group=self.talk)
        return held[0]

    def heard(self, words: Any = None) -> Any:
        """What the first one says that all do next: plain words, as JSON."""
        data = torch.frombuffer(bytearray(json.dumps(words).encode()), dtype=torch.uint8)
        size = torch.tensor([len(data)])
        dist.broadcast(size, src=0, group=self.talk)
        data = data if self.first else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self.talk)
        return json.loads(data.numpy().tobytes())

    def given(self, tensor: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The first one's tensor, in main memory."""
        held = torch.empty(tuple(shape), dtype=dtype) if tensor is None else tensor.contiguous()
        if held.numel():
            dist.broadcast(held.view(-1).view(torch.uint8), src=0, group=self.talk)  # whatever its kind of numbers
        return held

    def all_or_none(self, error: str) -> None:
        """What one cannot do, nobody does; every rank says why."""
        if said := [each for each in self.each(error) if each]:
            raise Agreed(said[0])

    def same(self, work: Callable[[], T]) -> T:
        """What each of them does; where one of them cannot, nobody goes on."""
        error = ""
        try:
            found = work()
        except (UserError, OSError) as wrong:
            error = str(wrong)
        self.all_or_none(error)
        return found

    def some(self, mine: bool, work: Callable[[], object]) -> None:
        """What only some of them do."""
        self.same(work if mine else lambda: None)

    def each(self, value: str) -> list[str]:
        """What every one of them says."""
        found: list[str] = [""] * self.count
        dist.all_gather_object(found, value, group=self.talk)
        return found

    def alike(self, value: str, what: str) -> str:
        """The same on all ranks, which may be on different machines."""
        if len({*self.each(value)}) > 1:
            raise Agreed(f"{what} is not the same on all machines: give them the same files and versions")
        return value


@contextlib.contextmanager
def joined() -> Iterator[Ranks]:
    """This process among the others; alone where torchrun did not start it."""
    rank, count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local, here = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device, before = _device(local, here), {number: signal.getsignal(number) for number in _SIGNALS}
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _end_with(os.getppid())
    alone = {} if "MASTER_ADDR" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    try:
        yield Ranks(rank, count, here, device, local == 0, talk=_met(device, **alone))
    finally:
        dist.destroy_process_group()
        for number, handler in before.items():
            signal.signal(number, handler)


def assembled(place: Path, rank: int, count: int) -> Ranks:
    """Processes of one machine that meet in a folder. Nothing of theirs can be reached from outside."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ[name] = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    device, store = _device(rank, count), dist.FileStore(str(place / "store"), count)
    return Ranks(rank, count, count, device, rank == 0, talk=_met(device, store=store, rank=rank, world_size=count))


def _met(device: torch.device, **where: Any) -> Any:
    """All are there, with a group of its own for words."""
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=_PATIENCE, **where)
    return dist.new_group(backend="gloo", timeout=_TALK)


def _end_with(parent: int) -> None:
    """Where torchrun is killed nobody would tell its ranks, and they would train on beside those of its next start."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _device(local: int, here: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local >= torch.cuda.device_count():
        raise Lacking(
            f"{here} ranks on this machine need a GPU each, but only {torch.cuda.device_count()} can be seen: lower "
            "--nproc-per-node (or devices_per_worker), or name more GPUs in CUDA_VISIBLE_DEVICES"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
