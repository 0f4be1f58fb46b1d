"""From a run's folder to facts. It only reads; a second look reads no more than what is new."""

import contextlib
import re
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fleet import diary, faults, launches
from fleet.ancestry.tree import Node, finite
from fleet.attic import ENDED
from fleet.claims import Watch, pulse_at
from fleet.diary import Diaries, number
from fleet.host import Host
from fleet.recipe import Member, Recipe, folder, name, place
from fleet.report.diaries import Story
from fleet.report.facts import MEASURES, DonorScore, Facts, Failure, Round, Session, Span, WorkerRow
from fleet.report.registers import Sheet, quickly, sheet
from fleet.report.summing import (
    command_of,
    dated,
    last_made,
    last_members,
    moved_by,
    name_of,
    summed_up,
    tree_of,
    with_genomes,
)  # fmt: skip
from fleet.run import open_run

_MOST = 1 << 26  # bytes of one worker's notes; of longer ones the last
_COARSE = 0.1  # seconds by which times of files may be behind a clock
_TREE = 1500  # members that the tree shows; of longer runs those of the last rounds
_GENOMES = 200  # rounds whose genomes are kept, evenly spaced
_FAILURES, _TAIL = 100, 40
_SEAT = re.compile(r"(.+)-[0-9a-f]{8}")  # a place's name, and which process sat there

Claims = list[tuple[float, str]]  # when, and on whom
Told = Callable[[str, int, int], None]  # what is being read, how much of it, and of how much


def _kind(recipe: Recipe) -> str:
    """What takes the time: whoever is told how many steps to take, or how to learn, trains."""
    trains = recipe.args.get("steps") or recipe.args.get("how")
    return "train" if trains else "evaluate" if recipe.questions else "merge"


def _silently(what: str, done: int, of: int) -> None: ...


class RunReader:
    """One run, looked at again and again."""

    def __init__(self, run_dir: Path) -> None:
        self.host = Host()
        self.store, self.run = open_run(run_dir, self.host, "report")
        self.diaries = Diaries(self.store, Story, _MOST, ("workers", ENDED))
        self.notes = list[Story]()
        self.done = list[Round]()  # complete rounds
        self.open = dict[int, Sheet]()
        self.over = False
        self.failures = list[Failure]()
        self._damage = list[Failure]()  # of what the run itself is written in
        self._ground = dict[str, Member]()  # round 0
        self._before = dict[str, Member]()  # the last complete round
        self._recent = deque[Sheet]()
        self._donors = dict[tuple[str, str], DonorScore]()
        self._genomes = dict[int, list[Node]]()
        self._stride = 1
        self._kinds = dict[str, str]()  # of members by what was done for them
        self._summaries = set[str]()
        self._seconds = dict[str, tuple[str, float]]()  # members that count -> by whom, how long it took
        self._lost = list[tuple[str, Span]]()  # claims of complete rounds that came to nothing, by worker
        self._identities = dict[str, dict[str, Any]]()

    def stamp(self) -> object:
        """Differs when something happened."""
        workers = [(file, self.store.stamp(f"workers/{file}")) for file in sorted(self.store.names("workers"))]
        return self.store.stamp("bell"), workers, sorted(self.store.names("launches"))

    def look(self, told: Told = _silently) -> Facts:
        self._read_rounds(told)
        self.notes = self.diaries.look(lambda done, of: told("notes of workers", done, of))
        return self._facts()

    # -- rounds -------------------------------------------------------------------------------------------------------

    def _read_rounds(self, told: Told) -> None:
        all = len([each for each in self.store.names("rounds") if each.isdigit()])
        known, self.open, older, self._damage = dict(self._before), dict[int, Sheet](), self.open, []
        round = len(self.done)
        while not self.over:
            try:
                found = sheet(self.store, round, self._ground | known, older.get(round))
            except faults.Denied as error:
                why = f"{error}: what comes after it cannot be shown as long as the disk refuses"
                self._damage = [Failure(0.0, folder(round), "", "", why)]
                return
            except (faults.Missing, faults.Passing):  # not visible yet; the next look sees it
                return
            except (faults.Damaged, faults.Refused, faults.Unfit) as error:
                why = f"{error}: what comes after it cannot be shown; restore it from a backup"
                self._damage = [Failure(0.0, folder(round), "", "", why)]
                return
            if found is None:
                return
            if not found.plan:
                self.over = not self.open
                return
            known = found.members
            if found.complete and not self.open:
                self._finish(found)
            else:
                self.open[round] = found
            round += 1
            if round % 20 == 0:
                told("rounds", round, all)

    def _finish(self, found: Sheet) -> None:
        """A round that is complete is summed up, and most of it forgotten."""
        self.done.append(summed_up(found))
        self._remember(found)
        if found.round == 0:
            self._ground = found.members
        self._before = found.members
        self._recent.append(found)
        while len(self._recent) > 2 and sum(len(each.plan) for each in self._recent) > _TREE:
            self._recent.popleft()
        for id, slot in found.slots.items():
            self._read_claims(id, slot.claims.get(slot.version, 0) - 1, found)
        self._read_failures(found)
        if found.round % self._stride == 0:
            self._genomes[found.round] = with_genomes(found)
        if len(self._genomes) > 2 * _GENOMES:
            self._stride *= 2
            self._genomes = {n: nodes for n, nodes in self._genomes.items() if n % self._stride == 0}

    def _remember(self, found: Sheet) -> None:
        for recipe in found.plan:
            id = name(found.round, recipe.slot)
            if not recipe.carried:
                self._kinds[id] = _kind(recipe)
            if recipe.role == "summary":
                self._summaries.add(id)
            if outcome := found.made.get(id):
                self._seconds[id] = outcome.by, outcome.seconds
            if id in found.members and recipe.role == "given":
                self._take_donor(found.members[id])

    def _take_donor(self, member: Member) -> None:
        for measure in MEASURES[:2]:
            if (value := finite(member.metrics.get(measure))) is not None:
                donor = DonorScore(name_of(member), member.recipe.questions, measure, value)
                self._donors.setdefault((member.id, measure), donor)

    def _read_claims(self, id: str, upto: int, found: Sheet) -> None:
        """Claims on a slot that were neither given up nor came to anything."""
        slot, (round, its) = found.slots[id], place(id)
        for n in range(max(0, upto - 8), upto):
            if (slot.version, n) not in slot.left:
                begin, claim = self._claim(round, its, slot.version, n)
                self._lost.append((str(claim.get("by", "")), Span(begin, begin, "lost", id)))

    def _claim(self, round: int, slot: str, version: int, n: int) -> tuple[float, Mapping[str, Any]]:
        """When it was made, as the disk tells, and what it says."""
        path = f"{folder(round)}/{slot}.{version}.claim.{n}"
        with contextlib.suppress(faults.Fault):
            claim = quickly(self.store, path)
            self._identities[str(claim.get("by", ""))] = claim
            return self.store.stamp(path)[2] / 1e9, claim
        return 0.0, {}

    def _read_failures(self, found: Sheet) -> None:
        self.failures += self._failures_of(found)
        del self.failures[:-_FAILURES]

    def _failures_of(self, found: Sheet) -> list[Failure]:
        failures = [
            Failure(0.0, id, *found.maker(id), "its training diverged: it counts as untrained")
            for id, member in found.members.items()
            if member.diverged
        ]
        absent = {id: each for id, each in found.made.items() if not each.member}
        for id, slot in found.slots.items():
            for version, n in sorted(slot.left)[-8:]:
                path = f"{folder(found.round)}/{place(id)[1]}.{version}.left.{n}"
                with contextlib.suppress(faults.Fault, IndexError):
                    left = quickly(self.store, path)
                    if left.get("why") == "failed" or left.get("why") == "verdict" and id not in absent:
                        at, tail = self.store.stamp(path)[2] / 1e9, left.get("tail")
                        lines = tuple(str(line) for line in tail[-_TAIL:]) if isinstance(tail, list) else ()
                        who = str(left.get("by", "")), str(left.get("machine", ""))
                        failures.append(Failure(at, id, *who, str(left.get("error", "")), lines))
            if id in absent:
                failures.append(Failure(0.0, id, *found.maker(id), f"{absent[id].member.absent}: {absent[id].why}"))
        return failures

    # -- everything ---------------------------------------------------------------------------------------------------

    def _facts(self) -> Facts:
        now, launch, started = diary.now(self.store), launches.latest(self.store), dict[str, Any]()
        with contextlib.suppress(faults.Fault):
            started = quickly(self.store, launches.path(launch, "start")) if launch else {}
        operational = known if isinstance(known := started.get("operational"), dict) else {}
        for found in self.open.values():
            self._remember(found)
        rows, troubled = self._rows(now, number(operational, "dead_seconds") or 60.0)
        at = last_made(self.notes, self._summaries)
        rounds = [dated(each, at) for each in (*self.done, *(summed_up(found) for found in self.open.values()))]
        sheets = [*self._recent, *self.open.values()]
        moved, written, read = moved_by(self.notes)
        hidden = sum(notes.hidden for notes in self.notes)
        if hidden:
            troubled.append(Failure(0.0, "workers", "", "", f"notes of {hidden} workers cannot be read"))
        failures = (
            self._damage + self.failures + [each for found in self.open.values() for each in self._failures_of(found)]
        )
        return Facts(
            folder=str(self.store.disk.root), name=self.store.disk.root.name, config=self.run["config"],
            operational=operational, command=command_of(started), state=self._state(launch, rows),
            over=self.over, now=now,
            began=min((n.begins[0] for n in self.notes if n.begins), default=0.0),
            rounds=rounds, rows=rows, failures=[*failures[-_FAILURES:], *troubled[-_FAILURES:]],
            donors=[*self._donors.values()], moved=moved, written=written, read=read,
            tree=tree_of(sheets), tree_from=min((each.round for each in sheets), default=0),
            genomes=[node for nodes in self._genomes.values() for node in nodes], last=last_members(sheets),
        )  # fmt: skip

    def _state(self, launch: int, rows: list[WorkerRow]) -> str:
        at_work = sum(row.ending == "works" for row in rows)
        if self.over:
            return "finished"
        with contextlib.suppress(faults.Fault):
            if why := launches.ordered(self.store, launch):
                return f"stopped: {why}"
        if at_work:
            return f"running, {at_work} worker{'s' * (at_work > 1)}"
        return "nobody works on it now; the same command goes on with it" if rows else "not begun yet"

    def _rows(self, now: float, dead: float) -> tuple[list[WorkerRow], list[Failure]]:
        """A row for each place; a place has several workers if one died and another took it."""
        held, seats, troubled = self._held(), dict[tuple[str, str], list[Story]](), list[Failure]()
        for notes in self.notes:
            if notes.begins:
                seat = _SEAT.fullmatch(notes.name)
                seats.setdefault((notes.machine, seat[1] if seat else notes.name), []).append(notes)
        rows = []
        for (machine, title), there in sorted(seats.items()):
            sessions, spans = list[Session](), list[Span]()
            for notes in sorted(there, key=lambda notes: notes.begins[0]):
                claims = [(span.begin, span.id) for by, span in self._lost if by == notes.name]
                claims += held.get(notes.name, [])
                alive, seen = self._alive(notes, claims, now, dead)
                mine = notes.sessions(alive, now if alive else seen)
                sessions += mine
                spans += self._spans(notes, mine[-1].end, claims, alive)
                troubled += [Failure(at, id, notes.name, machine, f"{what}: {why}") for at, what, id, why
                             in notes.troubles if what != "failed"]  # fmt: skip
            made = sum(len(notes.makes) for notes in there)
            rows.append(WorkerRow(machine, title, sessions, sorted(spans, key=lambda s: s.begin), made))
        return rows, sorted(troubled, key=lambda each: each.at)

    def _alive(self, notes: Story, claims: Claims, now: float, dead: float) -> tuple[bool, float]:
        """Whether a worker lives, and its last sign of life: for people, who know that clocks differ."""
        stamp = self.store.stamp(pulse_at(notes.name))
        seen = max(notes.last, stamp[2] / 1e9 if stamp else 0.0, *(begin for begin, _ in claims))
        if notes.ends[-1]:
            return False, notes.ends[-1]
        claim = self._identities.get(notes.name, {})
        if Watch(self.store, self.host, dead).gone(claim):
            return False, seen
        identity = claim.get("identity")
        here = isinstance(identity, list) and identity[:2] == [*self.host.identity][:2]
        return here or now - seen <= dead, seen

    def _held(self) -> dict[str, Claims]:
        """What workers have claimed in open rounds and not made yet, with the moment as the disk tells it."""
        held = dict[str, Claims]()
        for found in self.open.values():
            for id, slot in found.slots.items():
                for n in range(max(0, slot.claims.get(slot.version, 0) - 8), slot.claims.get(slot.version, 0)):
                    last = n + 1 == slot.claims[slot.version]
                    if (slot.version, n) not in slot.left and not (last and slot.finished):
                        begin, claim = self._claim(found.round, place(id)[1], slot.version, n)
                        held.setdefault(str(claim.get("by", "")), []).append((begin, id))
        return held

    def _spans(self, notes: Story, end: float, claims: Claims, alive: bool) -> list[Span]:
        """What was noted; and of claims that came to nothing, the time until the next thing that was noted."""
        spans = [Span(at - seconds, at, "wait") for at, seconds in notes.waited]
        for at, seconds, id, _ in notes.makes:
            counts = self._seconds.get(id, (notes.name, 0.0))[0] == notes.name and id not in notes.late
            spans.append(Span(at - seconds, at, self._kinds.get(id, "merge") if counts else "late", id))
        mine = {id for _, _, id, _ in notes.makes}
        noted = sorted(span.begin for span in spans)
        for begin, id in {*claims}:
            if id not in mine and notes.begins[0] - _COARSE <= begin <= end:
                until = next((later for later in noted if later >= begin), end)
                spans.append(Span(begin, until, "now" if alive and until == end else "lost", id))
        return spans
