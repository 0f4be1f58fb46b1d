"""How a run gets on, for whoever started it: one live view in a terminal, plain lines elsewhere."""

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Sequence

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fleet import faults
from fleet.console import console
from fleet.diary import Diaries
from fleet.history import History
from fleet.plain import say
from fleet.recipe import Member, NotYet, name

_LOOK = 1.0  # seconds between two looks,
_SHARE = 0.05  # of which looking takes no more: thousands of members take a while
_SHOWN = 12  # members of a round that have a cell of their own


class Progress:
    names_members = True  # at the end, those of the last round, with their metrics
    measure = "loss"  # of members' metrics: what is told of them
    best: Callable[[Sequence[float]], float] = min

    def __init__(self, history: History, rounds: int) -> None:
        self.history, self.rounds = history, rounds
        self._now = history.store.host.now
        self._told = self._began_at = history.first
        self._diaries = Diaries(history.store)
        self._began, self._looked, self._every = self._now(), 0.0, _LOOK
        self._tokens = self._whole = 0
        self._upto = self._began_at  # the rounds before it are counted
        self._live = Live(console=console(), auto_refresh=False) if sys.stdout.isatty() else None

    def show(self, last: bool = False) -> None:
        if not last and self._now() - self._looked < self._every:
            return
        began = self._now()
        with contextlib.suppress(faults.Fault, NotYet):
            self.history.look_far()
            self._count()
            self._tell()
        self._looked = self._now()
        self._every = max(_LOOK, (self._looked - began) / _SHARE)
        if self._live and last:
            self._live.stop()

    def _tell(self) -> None:
        while self._told < self.history.first:
            line = self.line(self._told)
            if self._live:
                self._live.console.print(line, highlight=False)
            else:
                say(f"{line}; {self.speed()}" if self._told + 1 == self.history.first else line)
            self._told += 1
        if self._live and not self._live.is_started:
            self._live.start()
        if self._live:
            self._live.update(Group(self.table(), Text(self.speed())), refresh=True)

    def line(self, round: int) -> str:
        """What is told of a round once it is finished."""
        return f"round {round}: {self.members(round)}"

    def members(self, round: int) -> str:
        members = self.history.round(round)
        absent = Counter(each.absent for each in members if each.absent)
        words = [f"{len(members)} members", *(f"{n} {why}" for why, n in sorted(absent.items()))]
        if values := self.values(members):
            words.append(f"{self.measure}: best {type(self).best(values):.4f}, mean {sum(values) / len(values):.4f}")
        return ", ".join([*words, *self.diverged(members)])

    def diverged(self, members: Sequence[Member]) -> list[str]:
        """Who counts as untrained."""
        return (
            [f"diverged: {', '.join(named)}"] if (named := [each.diverged for each in members if each.diverged]) else []
        )

    def values(self, members: Sequence[Member]) -> list[float]:
        return [each.metrics[self.measure] for each in members if isinstance(each.metrics.get(self.measure), float)]

    def speed(self) -> str:
        """Tokens a second, bytes moved, time left: of this start of the run."""
        seconds, done = max(1e-3, self._now() - self._began), self.history.first - self._began_at
        words = [f"{self._tokens / seconds:,.0f} tokens/s"] if self._tokens else []
        words.append(f"{sum(d.written + d.read for d in self._diaries.look()) / 1e6:,.0f} MB moved")
        left = max(0, self.rounds + 1 - self.history.first)
        if done and left:
            words.append(f"about {duration(left * seconds / done)} left")
        return ", ".join(words)

    def _count(self) -> None:
        """The tokens of what was finished since this start of the run: of whole rounds, and of those being made."""
        while self._upto < self.history.first:
            self._whole += self._tokens_of(self._upto)
            self._upto += 1
        self._tokens = self._whole + sum(map(self._tokens_of, range(self._upto, self.history.last + 1)))

    def _tokens_of(self, round: int) -> int:
        made = [name(round, recipe.slot) for recipe in self.history.plan(round) if not recipe.carried]
        known = [self.history[id].metrics.get("tokens", 0) for id in made if self.history.finished(id)]
        return sum(tokens for tokens in known if isinstance(tokens, int))

    def table(self) -> Table:
        """The rounds that are being made, and the last one that was finished, with what each member came to."""
        table = Table(title=f"Round {min(self.history.first, self.rounds)} of {self.rounds}", title_justify="left")
        table.add_column("round")
        table.add_column(f"{self.measure} of each member", overflow="fold")
        planned = range(self.history.last + 1 - self.history.ended)
        for round in planned[-4:]:
            cells = [self._cell(name(round, recipe.slot), recipe.slot) for recipe in self.history.plan(round)]
            more = f" and {len(cells) - _SHOWN} more" if len(cells) > _SHOWN else ""
            table.add_row(str(round), "  ".join(cells[:_SHOWN]) + more)
        return table

    def _cell(self, id: str, slot: str) -> str:
        if not self.history.finished(id):
            return f"{slot} ..."
        metrics = self.history[id].metrics
        value = metrics.get(self.measure, metrics.get("train_loss"))
        return f"{slot} {value:.4f}" if isinstance(value, float) else f"{slot} done"


def duration(seconds: float) -> str:
    for size, word in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {word}"
    return f"{seconds:.0f} seconds"
