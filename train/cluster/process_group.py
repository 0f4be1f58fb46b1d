"""A worker that is several processes, each with a device. The first one, the *leader*, makes members and alone knows
the shared disk; the others do the same to their part of the model, in the same moment.

    leader:  group.step(parts, lr)   says "step", hands out the batch, and takes the step on its own rows
    others:  follow()                hear "step", take the step on theirs
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from fleet.plain import say
from train.cluster.ranks import Ranks, assembled
from train.cluster.shared_learner import learner_of
from train.kernels import in_fixed_order
from train.learner import Learner
from train.model import empty, layout_of, read_config, without_numbers
from train.optimizers import WEIGHTS, layouts_of
from train.training_config import TrainConfig
from train.verdicts import ran_out

_ROOT = Path(__file__).parents[2]
_MOMENT = 1.0  # seconds in which it is seen that a process has ended


class Leader(Learner):
    """What a runtime works with, as if it were one process."""

    def __init__(self, model: bytes, config: TrainConfig) -> None:
        self.config, self._model = config, model
        self._meet()
        assert self._mine
        self.layout, self.layouts, self.device = self._mine.layout, self._mine.layouts, self._mine.ranks.device

    def _meet(self) -> None:
        count = self.config.devices_per_worker
        self._place = tempfile.TemporaryDirectory(prefix="group-")  # where they find each other; for its owner alone
        self._others = [Other(self._place.name, rank, count) for rank in range(1, count)]
        self._mine: Voice | None = None
        with self._together():
            ranks = assembled(Path(self._place.name), 0, count)
            ranks.heard({"model": self._model.decode(), "config": self.config.model_dump(mode="json")})
            self._mine = Voice(ranks, self._model, self.config)

    def buffer(self, kind: str) -> Tensor:
        into, parts = self._room(kind)
        for name, part in parts.items():
            self._all("gather", name, data=part)
        return into

    @contextlib.contextmanager
    def filling(self, kind: str) -> Iterator[Tensor]:
        room, parts = self._room(kind)
        yield room
        for name, part in parts.items():
            self._all("scatter", name, data=part)

    def _room(self, kind: str) -> tuple[Tensor, Mapping[str, Tensor]]:
        """For all numbers of a kind, which the ranks know as one vector or several."""
        names = [name for name in self.layouts if (name == WEIGHTS) == (kind == WEIGHTS)]
        sizes = [self.layouts[name].size for name in names]
        room = torch.empty(sum(sizes))
        return room, dict(zip(names, room.split(sizes), strict=True))

    def begin(self, total: float = 0.0) -> None:
        self._all("begin", total)

    def step(self, parts: Sequence[Tensor], lr: float) -> None:
        self._all("step", lr, len(parts), data=torch.stack(list(parts)))

    def eval_loss(self, windows: Tensor) -> float:
        return float(self._all("look", len(windows), data=windows))

    def finite(self) -> bool:
        return bool(self._all("finite"))

    def seed(self, value: int) -> None:
        self._all("seed", value)

    def reset_optimizer(self) -> None:
        self._all("reset_optimizer")

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        self._all("load_optimizer_state", dict(state))

    def state(self) -> dict[str, Any]:
        return self._voice.learner.state()

    def _total(self) -> Tensor:
        found: Tensor = self._all("total")
        return found

    @property
    def _voice(self) -> "Voice":
        """Its own, among others who are there: anew, where it has parted with them."""
        if self._mine is None:
            self._meet()
        assert self._mine
        return self._mine

    def _all(self, name: str, *words: Any, data: Tensor | None = None) -> Any:
        voice = self._voice
        with self._together():
            voice.ranks.heard([name, *words])
            return voice.do(name, *words, *(() if data is None else (data,)))

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """All do the same in here."""
        try:
            yield
        except BaseException as error:
            self._leave(ran_out(error))
            raise

    def _leave(self, at_once: bool) -> None:
        """The others are in the middle of what this one could not do, and would wait for it until they gave up: they
        end now, and others take their places when there is something to do. Where one of them has ended first, this is
        what came of it, and the worker ends."""
        self._mine = None
        end = time.monotonic() + (0.0 if at_once else _MOMENT)
        while time.monotonic() < end:
            time.sleep(0.01)  # for whoever watches them to see it
        for other in self._others:
            other.end()
        if dist.is_initialized():
            distributed_c10d._abort_process_group()
        self._place.cleanup()


class Voice:
    """What each of them does when the leader says so. Data, where there are any, are the leader's alone."""

    def __init__(self, ranks: Ranks, model: bytes, config: TrainConfig) -> None:
        in_fixed_order(config.threads, config.deterministic, config.precision)
        known, trust = read_config(model, config), config.trust_remote_code
        whole = ranks.first or trust  # a stranger's code may have numbers where nobody looks for them
        built = empty(known, 0, trust) if whole else without_numbers(known, trust)
        self.ranks, self.config, self.layout = ranks, config, layout_of(built)
        self.layouts = layouts_of(self.layout, config)
        self.learner = learner_of(built, config, ranks, config.sharding_strategy)

    def do(self, name: str, *words: Any) -> Any:
        """What is said in a word, or what the learner does by itself."""
        return getattr(self if hasattr(self, name) else self.learner, name)(*words)

    def gather(self, kind: str, into: Tensor | None = None) -> None:
        places = {} if into is None else self.layouts[kind].views(into)
        for name in self.layouts[kind].shapes:
            whole = self.learner.gathered(kind, name)
            if places:
                places[name].copy_(whole)

    def scatter(self, kind: str, whole: Tensor | None = None) -> None:
        views = {} if whole is None else self.layouts[kind].views(whole)
        for name, shape in self.layouts[kind].shapes.items():
            self.learner.take(kind, name, self.ranks.given(views.get(name), shape, torch.float32))
        self.learner.loaded()

    def step(self, lr: float, count: int, parts: Tensor | None = None) -> None:
        """Each has its own rows of each part."""
        c = self.config
        given = self.ranks.given(parts, (count, c.batch_size, c.seq_length + 1), torch.long)
        self.learner.step([part.chunk(self.ranks.count)[self.ranks.rank] for part in given], lr)

    def look(self, count: int, windows: Tensor | None = None) -> float:
        """Who has no row looks at one all the same, since all have a part of the model; it does not count."""
        given = self.ranks.given(windows, (count, self.config.seq_length + 1), torch.long)
        mine = given[self.ranks.rank :: self.ranks.count]
        self.learner.model.eval()
        with torch.no_grad():
            loss = self.learner.loss(mine if len(mine) else given[:1])
        return float(self.ranks.mean(loss * len(mine))) * self.ranks.count / count

    def total(self) -> Tensor:
        return self.ranks.mean(self.learner.total)

    def seed(self, value: int) -> None:
        self.learner.seed(value + self.ranks.rank)


# -- processes ---------------------------------------------------------------------------------------------------------


class Other:
    """A process beside the first. It ends when the pipe to it closes, which is when this process has ended, however
    that came. Without one of them nothing goes on: the worker dies with it, and whoever watches workers starts it
    again."""

    def __init__(self, place: str, rank: int, count: int) -> None:
        words = [sys.executable, "-m", "train.cluster.process_group", place, str(rank), str(count)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, cwd=_ROOT)
        self._rank, self._wanted = rank, True
        threading.Thread(target=self._watch, daemon=True).start()

    def end(self) -> None:
        self._wanted = False
        self._process.kill()
        self._process.wait()

    def _watch(self) -> None:
        code = self._process.wait()
        if self._wanted:
            say(f"rank {self._rank} of this worker ended with code {code}, and the worker with it", file=sys.stderr)
            os._exit(1)


def follow(place: Path, rank: int, count: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the leader hears them, and ends us when it is done
    threading.Thread(target=_leash, daemon=True).start()
    try:
        ranks = assembled(place, rank, count)
        about = ranks.heard()
        voice = Voice(ranks, about["model"].encode(), TrainConfig.joined(about["config"], {}))
        while True:
            voice.do(*ranks.heard())
    except BaseException:
        time.sleep(2 * _MOMENT)  # who leads may be gone, or has met the same, and ends us when it has said so
        say(traceback.format_exc().rstrip(), file=sys.stderr)
        os._exit(1)  # what Python does at its end may wait for the others


def _leash() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    follow(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
