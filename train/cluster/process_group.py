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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fleet.plain import say
from train.cluster.ranks import Ranks, assembled
from train.cluster.shared import learner_of
from train.loop import Learner, in_fixed_order
from train.model import empty, layout_of, read_config, without_numbers
from train.optimizers import WEIGHTS, layouts_of
from train.training_config import TrainConfig

_ROOT = Path(__file__).parents[2]


class Leader(Learner):
    """What a runtime works with, as if it were one process."""

    def __init__(self, model: bytes, config: TrainConfig) -> None:
        count, self.config = config.devices_per_worker, config
        self._place = tempfile.TemporaryDirectory(prefix="group-")  # where they find each other; for its owner alone
        for rank in range(1, count):
            _start(self._place.name, rank, count)
        ranks = assembled(Path(self._place.name), 0, count)
        ranks.heard({"model": model.decode(), "config": config.model_dump(mode="json")})
        self._mine = Voice(ranks, model, config)
        self.layout, self.layouts, self.device = self._mine.layout, self._mine.layouts, ranks.device

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
        return self._mine.learner.state()

    def _total(self) -> Tensor:
        found: Tensor = self._all("total")
        return found

    def _all(self, name: str, *words: Any, data: Tensor | None = None) -> Any:
        self._mine.ranks.heard([name, *words])
        return self._mine.do(name, *words, *(() if data is None else (data,)))


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


def _start(place: str, rank: int, count: int) -> None:
    """It ends when the pipe to it closes, which is when this process has ended, however that came. Without one of them
    nothing goes on: the worker dies with it, and whoever watches workers starts it again."""
    words = [sys.executable, "-m", "train.cluster.process_group", place, str(rank), str(count)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, cwd=_ROOT)

    def wait() -> None:
        code = process.wait()
        say(f"rank {rank} of this worker ended with code {code}, and the worker with it", file=sys.stderr)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def follow(place: Path, rank: int, count: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the leader hears them, and ends us when it is done
    threading.Thread(target=_leash, daemon=True).start()
    ranks = assembled(place, rank, count)
    about = ranks.heard()
    voice = Voice(ranks, about["model"].encode(), TrainConfig.joined(about["config"], {}))
    while True:
        voice.do(*ranks.heard())


def _leash() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    follow(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
