"""How a run gets on, for whoever started it: one live view in a terminal, plain lines elsewhere."""

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fleet import faults, launches, worker_notes
from fleet.console import console
from fleet.history import History
from fleet.plain import plain, readable_bytes, say, several, some
from fleet.recipe import Member, NotYet, Recipe, name
from fleet.time_left import TimeLeft, Underway, underway
from fleet.worker_notes import NotesReader, WorkerNotes

_LOOK = 1.0  # seconds between two looks,
_SHARE = 0.05  # of which looking takes no more: thousands of members take a while
_SILENT = 10.0  # seconds after which something is said where lines are all there is
_SHOWN = 12  # members of a round that have a cell of their own
_UNKNOWN = "how much time is left is not known yet"
_FEW = 4  # of what is being made, in a line


class Progress:
    names_members = True  # at the end, those of the last round, with their metrics
    stops_at = "the next step"  # where a worker ends that is asked to
    measure = "loss"  # of members' metrics: what is told of them
    best: Callable[[Sequence[float]], float] = min

    def __init__(self, history: History, rounds: int, steps_in: Callable[[int], int] = lambda round: 1) -> None:
        self.history, self.rounds = history, rounds
        self._now = history.store.host.now
        self._told = self._began_at = history.first_open
        self._before = {each for each in range(self._told + 1, history.last + 1) if self._finished(each)}
        self._notes, self._left = NotesReader(history.store, WorkerNotes), TimeLeft(history, rounds, steps_in)
        self._launch = launches.latest(history.store)
        self._least = max(_LOOK, 2 * history.store.breath)
        self._began, self._looked, self._every = self._now(), 0.0, self._least
        self._spoke, self._patience = self._began, max(_SILENT, 6 * history.store.breath)
        self._noted = list[WorkerNotes]()
        self._underway = dict[str, Underway]()
        self._live = Live(console=console(), auto_refresh=False) if sys.stdout.isatty() else None

    def show(self, last: bool = False) -> None:
        if not last and self._now() - self._looked < self._every:
            return
        began = self._now()
        with contextlib.suppress(faults.Fault, NotYet):
            self.history.look_far()
            self._tell(last)
        self._looked = self._now()
        self._every = max(self._least, (self._looked - began) / _SHARE)
        if self._live and last:
            self._live.stop()

    def _tell(self, last: bool) -> None:
        for round in sorted({*range(self._told, self.history.first_open)} - self._before):
            line = self.line(round)
            self._live.console.print(line, highlight=False, soft_wrap=True) if self._live else say(line)
            self._told = round + 1
        due = last or (self._now() - self._spoke >= self._patience and not self.history.over)  # the last comes soon
        if self._live or due:
            self.look_around()
        if self._live and not self._live.is_started:
            self._live.start()
        if self._live:
            self._live.update(Group(self.table(), *map(Text, self.ends())), refresh=True)
        elif due:
            self._spoke = self._now()
            first, *others = self.ends()
            said = "; ".join(filter(None, ["" if last else self.making(), first]))
            if lines := [*filter(None, [said]), *others]:
                say(*lines, sep="\n")

    def _finished(self, round: int) -> bool:
        """It may be, though one before it is open: what a fork carries over comes after a round 0 of more tokens."""
        return all(self.history.finished(name(round, recipe.slot)) for recipe in self.history.plan(round))

    def look_around(self) -> None:
        """How far each worker is, and what the last recipes took."""
        self._left.learn()
        self._noted = self._notes.look()
        self._underway = underway(self.history.store, self._launch)

    def making(self) -> str:
        """What is being made, and how far that is."""
        open = [self._underway[id] for id, _ in self.history.unfinished() if id in self._underway]
        words = [f"{plain(each.id, 64)} {plain(each.at, 64)}".rstrip() for each in open]
        begins = "" if any(d.made for d in self._noted if d.launch == self._launch) else "the workers are starting"
        return f"making {some(words, _FEW)}" if words else begins

    def ends(self) -> Iterator[str]:
        """How fast it is, what holds it up, and the time that is left of the whole run: each on a line of its own."""
        yield self.speed()
        yield from self.held_up()
        if left := self.left():
            yield left

    def held_up(self) -> Iterator[str]:
        """Why workers wait, as for room on the disk: each reason once, of the time since the last line."""
        since = worker_notes.now(self.history.store) - self._patience
        found = dict[str, str]()
        for why in (why for d in self._noted for at, what, why in d.errors if at > since and what.startswith("waits")):
            found[why.partition(":")[0]] = f"waiting: {plain(why, 300)}"
        yield from found.values()

    def left(self) -> str:
        if self.history.over or not self.history.first_open:
            return ""
        seconds = self._left.seconds([*self._underway.values()])
        return _UNKNOWN if seconds is None else f"about {duration(seconds)} left of the whole run"

    def line(self, round: int) -> str:
        """What is told of a round once it is finished."""
        return f"round {round}: {self.members(round)}"

    def members(self, round: int) -> str:
        all = self.history.round(round)
        members = [each for each in all if each.recipe.role != "summary" and _is_told(each.recipe, round)]
        absent = Counter(each.absent for each in all if each.absent)
        tasks = Counter(each.recipe.task for each in members)
        words = [*(counted(n, task) for task, n in tasks.items()), *(f"{n} {why}" for why, n in sorted(absent.items()))]
        together = [each for each in all if each.recipe.role == "summary"]
        values, whole = self.values(members), self.values(together)
        known = (member.metrics.get("bits_per_byte") for member in (members if values else together))
        bits = (
            [f"{min(some):.3f} bits per byte"] if (some := [each for each in known if isinstance(each, float)]) else []
        )
        said = [f"best {type(self).best(values):.4f}, mean {sum(values) / len(values):.4f}", *bits] if values else []
        of = {each.recipe.evaluated_on for each in members} - {""}
        if said and whole and len(of) == 1:  # what all together are asked is something else
            said[-1] += f" ({of.pop()})"
        for value in whole[-1:]:
            named = f"averaged {value:.4f}" if values else f"{value:.4f}"
            said.append(f"{named} ({asked})" if (asked := together[-1].recipe.evaluated_on) else named)
        words += [f"{self.measure} {', '.join(said if values else [*said, *bits])}"] if said else []
        return ", ".join([*words, *self.diverged(all), *(each.lost for each in all if each.lost)])

    def diverged(self, members: Sequence[Member]) -> list[str]:
        """Who counts as untrained."""
        return (
            [f"diverged: {', '.join(named)}"] if (named := [each.diverged for each in members if each.diverged]) else []
        )

    def values(self, members: Sequence[Member]) -> list[float]:
        return [each.metrics[self.measure] for each in members if isinstance(each.metrics.get(self.measure), float)]

    def speed(self) -> str:
        """Tokens a second, and bytes moved, of this start of the run."""
        seconds = max(1e-3, self._now() - self._began)
        words = [f"{self._left.tokens / seconds:,.0f} tokens/s"] if self._left.tokens else []
        moved = sum(d.written + d.read for d in self._noted)
        return ", ".join([*words, *[f"{readable_bytes(moved)} moved"] * bool(moved)])

    def table(self) -> Table:
        """The rounds that are being made, and the last one that was finished, with what each member came to."""
        table = Table(title=f"Round {min(self.history.first_open, self.rounds)} of {self.rounds}", title_justify="left")
        table.add_column("round")
        table.add_column(f"{self.measure} of each member", overflow="fold")
        planned = range(self.history.last + 1 - self.history.ended)
        for round in planned[-4:]:
            there = [recipe.slot for recipe in self.history.plan(round) if _is_told(recipe, round)]
            cells = [self._cell(name(round, slot), slot) for slot in there]
            table.add_row(str(round), some(cells, _SHOWN, "  "))
        return table

    def _cell(self, id: str, slot: str) -> str:
        if not self.history.finished(id):
            return f"{slot} {plain(at.at, 64) if (at := self._underway.get(id)) and at.at else '...'}"
        metrics = self.history[id].metrics
        value = metrics.get(self.measure, metrics.get("train_loss"))
        return (
            f"{slot} {value:.4f}{self.history.recipe(id).split_in_words}"
            if isinstance(value, float)
            else f"{slot} done"
        )


def _is_told(recipe: Recipe, round: int) -> bool:
    """Tools are what round 0 is for; later ones only serve its members."""
    return recipe.role != "tool" or round == 0


def counted(number: int, task: str) -> str:
    """So many recipes of a task."""
    if number > 1 and task == "tokens":
        return f"tokens of {number} texts"
    many = {"child": "children", "data": "data"}.get(task, f"{task}s")
    return task if number == 1 else f"{number} {many}"


def duration(seconds: float) -> str:
    for size, word in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= 2 * size:
            return several(round(seconds / size), word)
    return several(round(seconds), "second")
