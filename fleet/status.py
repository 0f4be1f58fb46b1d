"""What a run is doing, for people: `python -m fleet.status RUN_DIR [--watch]`. It only reads."""

import contextlib
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fleet import faults, launches, worker_notes
from fleet.claims import Claims, Watch, pulse_of
from fleet.console import console, in_full
from fleet.history import History
from fleet.host import Host
from fleet.places import address
from fleet.plain import heard, plain, readable_bytes, several, some, unsaid
from fleet.progress import duration
from fleet.recipe import Member, NotYet, name, round_and_slot
from fleet.run import open_run
from fleet.silent_workers import last_heard, silent
from fleet.single_command import command
from fleet.time_left import Underway, underway
from fleet.worker_notes import NotesReader, WorkerNotes

_WORKERS, _ERRORS, _MEMBERS = 24, 5, 8  # so many lines of each at most
_ROUNDS = 4  # in a terminal
_MOST = 6  # of one kind in a line
_NO_WORD = re.compile(r"[{\[]|([0-9a-f]{32}){1,2}\Z")
_LONGEST = 40  # signs of a value
_NARROW, _TINY = 100, 60  # columns; of fewer than these, not even what may take several lines has all of its own
_LOOK = 2.0  # seconds between two pictures in a terminal;
_SELDOM = 5  # elsewhere one of so many is shown
_COLUMNS = ("worker", "machine", "made", "a minute", "written", "does", "ago")


def _told(member: Member) -> str:
    """A member, and what it came to."""
    return f"{member.id}  {member.absent or metrics_text(member.metrics)}".rstrip() + asked(member)


def asked(member: Member) -> str:
    """On what: text that selects is not the text that all together are told on."""
    return f" ({member.recipe.evaluated_on})" if member.recipe.evaluated_on and member.metrics else ""


def metrics_text(metrics: Mapping[str, Any]) -> str:
    """Numbers and words; lists, records and digests are for others."""
    shown = {key: value for key, value in metrics.items() if not (isinstance(value, str) and _NO_WORD.match(value))}
    return plain(" ".join(f"{key}={_short(value)}" for key, value in shown.items()))


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


class View:
    """One picture after the other of the same run."""

    def __init__(self, run_dir: Path) -> None:
        host = Host()
        self.store, _ = open_run(run_dir, host, "status")
        self.history, self.notes = History(self.store), NotesReader(self.store, WorkerNotes)
        launch, self.watch = launches.latest(self.store), Watch(self.store, host, 60.0)
        with contextlib.suppress(faults.Fault, KeyError, TypeError, ValueError):
            self.watch.limit = float(launches.settings(self.store, launch)["dead_seconds"])
        self.claims = Claims(self.store, self.history, self.watch, launch)
        self._lost = set[str]()
        self.lines, self.narrow = 0, False  # of the terminal that it is drawn for
        self.underway, self.silent = dict[str, Underway](), list[str]()

    @property
    def over(self) -> bool:
        return self.history.over

    def picture(self, lines: int = 0, columns: int = 0) -> list[Table | Text]:
        """All of it; or as much as fits into so many lines, of a terminal of so many columns."""
        self.lines, self.narrow = lines, bool(columns) and columns < _NARROW
        notes = sorted(self.notes.look(), key=lambda d: d.last, reverse=True)
        self._lost = {d.name for d in notes if not d.ended and self._is_lost(d.name)}
        launch = launches.latest(self.store)
        self.underway = underway(self.store, launch)
        self.silent = [] if self.over else silent(self.store, launch, self.watch.limit)
        parts: list[Table | Text] = [Text()]
        with contextlib.suppress(NotYet, faults.Passing):  # what is not visible yet stands in the next picture
            self.history.look_far()
        with contextlib.suppress(NotYet, faults.Passing):
            if rounds := self.history.open_rounds():
                parts.append(self._last_round() if self.over else self._rounds(rounds))
                parts += self._troubled(rounds)
        errors = self._errors(notes)
        parts[0] = Text(self._state(notes))
        parts += [self._workers(notes, self._room(parts, errors)), *errors]
        if lines:
            for part in parts:
                if isinstance(part, Text):
                    part.no_wrap, part.overflow = True, "ellipsis"
        return parts

    def _room(self, parts: Sequence[Table | Text], errors: Sequence[Text]) -> int:
        """Lines for workers."""
        taken = sum(each.plain.count("\n") + 1 if isinstance(each, Text) else each.row_count + 2 for each in parts)
        return max(1, min(_WORKERS, self.lines - taken - len(errors) - 4)) if self.lines else _WORKERS

    def _state(self, notes: list[WorkerNotes]) -> str:
        launch = launches.latest(self.store)
        why, recent = launches.ordered(self.store, launch), [d for d in notes if d.launch == launch]
        at_work = [d for d in recent if not d.ended and d.name not in self._lost]
        rounds = several(self.history.made, "round")
        at = f"{address(self.store.root)}\nlaunch {launch}, {rounds} finished"
        if self.over:
            state = "the run is over"
        elif why:
            state = f"stopped: {plain(why, 1000)}"
        elif recent and not at_work:
            state = "nobody works on it now; start it again to go on"
        else:
            state = f"{several(len(at_work), 'worker')}, {sum(d.rate for d in at_work):.1f} a minute"
            if benched := [f"{plain(d.name)} ({plain(d.benched)})" for d in at_work if d.benched]:
                state += f"; {len(benched)} benched: {some(benched, _MOST)}"
        written, read = (sum(getattr(d, what) for d in notes) for what in ("written", "read"))
        moved = f"{sum(d.made for d in notes)} made, {readable_bytes(written)} written, {readable_bytes(read)} read"
        if found := worker_notes.shares(notes):
            moved += "\nof their time {:.0%} at work, {:.0%} for the disk, {:.0%} for others".format(*found)
        return "\n".join([f"{at}; {state}", moved, *self.silent])

    # -- rounds -------------------------------------------------------------------------------------------------------

    def _rounds(self, rounds: list[int]) -> Table:
        columns = ("round", "finished", "being made", "free", "waiting for")[: 3 if self.narrow else 5]
        table = table_of("Open rounds", *columns, fit=bool(self.lines))
        for round in rounds[: _ROUNDS if self.lines else None]:
            table.add_row(*map(Text, self._round(round)[: len(columns)]))
        return table

    def _round(self, round: int) -> tuple[str, ...]:
        recipes = self.history.plan(round)
        made, free, waits = list[str](), list[str](), Counter[str]()
        open = {id: recipe for recipe in recipes if not self.history.finished(id := name(round, recipe.slot))}
        for id, recipe in open.items():
            if unfinished := [input for input in recipe.inputs if not self.history.finished(input)]:
                waits.update(self.history.origin(input) for input in unfinished)
            elif not recipe.carried:
                maker = self._maker(id)
                far = f" {plain(self.underway[id].at, 64)}".rstrip() if id in self.underway else ""
                (made if maker else free).append(recipe.slot + far + (maker if not self.lines else ""))
        waiting = [f"{id}{self._maker(id)} ({n})" for id, n in waits.most_common()]
        finished = f"{len(recipes) - len(open)} of {len(recipes)}"
        return str(round), finished, some(made, _MOST), some(free, _MOST), some(waiting, 3)

    def _maker(self, id: str) -> str:
        """Who makes it, as far as can be seen from here."""
        if not self.claims.held(id):
            return ""
        by = f" by {plain((holder := self.claims.holder(id)).get('by', '?'), 64)}"
        with contextlib.suppress(faults.Fault):
            return f"{by}, who looks dead" if self.watch.dead(holder) else by
        return by

    def _troubled(self, rounds: list[int]) -> list[Text]:
        """Who counts as untrained, or has lost something, of the open rounds and the last finished one."""
        ids = [name(n, recipe.slot) for n in (max(1, rounds[0]) - 1, *rounds) for recipe in self.history.plan(n)]
        members = [self.history[id] for id in ids if self.history.finished(id)]
        named = [f"round {round_and_slot(each.id)[0]}: {each.diverged}" for each in members if each.diverged]
        lost = [f"round {round_and_slot(each.id)[0]}: {each.lost}" for each in members if each.lost]
        return [Text(f"diverged: {', '.join(named)}")] * bool(named) + [Text(", ".join(lost))] * bool(lost)

    def _last_round(self) -> Text:
        last = self.history.first_open - 1
        members = self.history.round(last) if last >= 0 else []
        left = unsaid(len(members), _MEMBERS)
        more = [f"and {left} more before these"] * bool(left)
        return Text("\n".join([*map(_told, members[left:]), *more]))

    # -- workers ------------------------------------------------------------------------------------------------------

    def _workers(self, notes: list[WorkerNotes], most: int) -> Table:
        columns = ("worker", "made", "does", "ago") if self.narrow else _COLUMNS
        table, now = table_of("Workers", *columns, fit=bool(self.lines)), worker_notes.now(self.store)
        making = self._making()
        for d in notes[:most]:
            lost = d.name in self._lost and not self.over
            does = f"was lost; before that {d.doing}" if lost else d.doing if d.ended else making.get(d.name, d.doing)
            heard = d.last if d.ended else max(d.last, last_heard(self.store, d.name))
            row = {"worker": d.name, "machine": d.machine, "made": str(d.made), "a minute": f"{d.rate:.1f}",
                   "written": readable_bytes(d.written), "does": does,
                   "ago": duration(max(0.0, now - heard))}  # fmt: skip
            table.add_row(*(Text(plain(row[column])) for column in columns))
        if len(notes) > most:
            table.caption = f"and {len(notes) - most} earlier ones"
        return table

    def _making(self) -> dict[str, str]:
        """Who makes what: claims are there at once, notes and pulses later; how far it is, the pulse alone tells."""
        found = dict[str, str]()
        for id, _ in self.history.unfinished():
            with contextlib.suppress(faults.Fault):
                if not self.claims.held(id):
                    continue
                by, at = str(self.claims.holder(id).get("by")), self.underway.get(id)
                found[by] = f"making {id} {at.at if at and at.by == by else ''}".rstrip()
        return found

    def _is_lost(self, worker: str) -> bool:
        """It has ended without a word, as far as can be seen from here."""
        with contextlib.suppress(faults.Fault):
            pulse = pulse_of(self.store, worker)
            return not pulse or self.watch.dead({**pulse, "by": worker})
        return False

    def _errors(self, notes: list[WorkerNotes]) -> list[Text]:
        """The last ones, each on a line of its own: there may be commands in it to be copied."""
        most, now = _ERRORS // 2 if self.lines else _ERRORS, worker_notes.now(self.store)
        errors = sorted((error, d.name) for d in notes for error in d.errors)[-most:]
        words = (f"{duration(max(0.0, now - at))} ago, {who}: {what}: {why}" for (at, what, why), who in errors)
        return [*[Text("Last errors", "italic")] * bool(errors), *(Text(plain(each, 1000)) for each in words)]


def table_of(title: str, *columns: str, fit: bool = False) -> Table:
    """Nothing in it is cut; or each row is one line."""
    table = Table(title=title, title_justify="left", caption_justify="left", box=None if fit else box.HEAVY_HEAD)
    for column in columns:
        table.add_column(column, overflow="ellipsis" if fit else "fold", no_wrap=fit)
    return table


def printed(shown: Console, parts: Iterable[Table | Text]) -> None:
    for part in parts:
        in_full(shown, [part]) if isinstance(part, Text) else shown.print(part)


def show(run_dir: Path, *, watch: Annotated[bool, Parameter(help="Go on until Ctrl-C.")] = False) -> None:
    """Show the rounds, who makes what and how far it is, what waits for whom, and the last errors of a run.

    For example:

        python -m fleet.status runs/edt --watch
    """
    shown, view = console(), View(run_dir)
    if not watch:
        printed(shown, view.picture(columns=shown.width if shown.width < _TINY else 0))
        return

    if shown.is_terminal:
        _watch_in_place(shown, view)
    else:
        _watch_in_lines(shown, view)


def _watch_in_place(shown: Console, view: View) -> None:
    with Live(auto_refresh=False, console=shown) as live:
        for _ in _looks(view):
            live.update(Group(*_seen(view, shown.height - 1, shown.width)), refresh=True)


def _watch_in_lines(shown: Console, view: View) -> None:
    """One picture below the other, for a file or a pipe: `| head` ends it."""
    for n in _looks(view):
        parts = _seen(view)
        if n % _SELDOM == 0 or view.over:
            printed(shown, parts)


def _looks(view: View) -> Iterator[int]:
    """Until the run is over, or nobody listens any more."""
    for n in count():
        yield n
        if view.over or not heard():
            return
        time.sleep(max(_LOOK, view.store.breath / 2))


def _seen(view: View, lines: int = 0, columns: int = 0) -> list[Table | Text]:
    try:
        return view.picture(lines, columns)
    except faults.Passing as fault:  # the next picture may show more
        return [Text(f"the disk does not answer properly: {plain(fault, 500)}")]


def main() -> None:
    command("fleet.status", show)


if __name__ == "__main__":
    main()
