"""From a run's folder to facts. It only reads; a second look reads no more than what is new."""

import contextlib
import re
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fleet import faults, launches, worker_notes
from fleet.ancestry.tree import Node
from fleet.ancestry.tree_builder import alone
from fleet.archive import ENDED
from fleet.claims import Watch, pulse_at
from fleet.host import Host
from fleet.places import address
from fleet.plain import several
from fleet.recipe import Member, Recipe, folder, name, round_and_slot
from fleet.report.aggregation import (
    dated,
    donors_of,
    last_made,
    last_members,
    moved_by,
    summed_up,
    tree_of,
)  # fmt: skip
from fleet.report.facts import DonorScore, Facts, Failure, Round, Span, WorkerRow
from fleet.report.registers import RoundRegisters, quickly, registers_of
from fleet.report.rewards import answering, answers_of
from fleet.report.worker_stories import WorkerStory
from fleet.reward_hacking import Rewards, rewards_of
from fleet.run import open_run
from fleet.worker_notes import NotesReader, number

_MOST = 1 << 26  # bytes of one worker's notes; of longer ones the last
_COARSE = 0.1  # seconds by which times of files may be behind a clock
_TREE = 1500  # members that the tree shows; of longer runs those of the last rounds
_GENOMES = 200  # rounds whose genomes are kept, evenly spaced
_FAILURES, _TAIL = 100, 40
_DIVERGED = "its training diverged: it counts as untrained"
_PROCESS = re.compile(r"(?<=.)-[0-9a-f]{8}\Z")  # behind a place's name: which process sat there

Claims = list[tuple[float, str]]  # when, and on whom
Told = Callable[[str, int, int], None]  # what is being read, how much of it, and of how much


def _kind(recipe: Recipe) -> str:
    """What takes the time: whoever is told how many steps to take, or how to learn (`how` in older runs), trains."""
    trains = any(recipe.args.get(key) for key in ("steps", "learns_by", "how"))
    return "train" if trains else "evaluate" if recipe.evaluated_on else "merge"


class RunReader:
    """One run, looked at again and again."""

    def __init__(self, run_dir: Path) -> None:
        self.host = Host()
        self.store, self.run = open_run(run_dir, self.host, "report")
        self.reader = NotesReader(self.store, WorkerStory, _MOST, ("workers", ENDED))
        self.notes = list[WorkerStory]()
        self.done = list[Round]()  # complete rounds
        self.open = dict[int, RoundRegisters]()
        self.over = False
        self.failures = list[Failure]()
        self._damage = list[Failure]()  # of what the run itself is written in
        self._ground = dict[str, Member]()  # round 0
        self._before = dict[str, Member]()  # the last complete round
        self._recent = deque[RoundRegisters]()
        self._donors = dict[tuple[str, str], DonorScore]()
        self._genomes = dict[int, list[Node]]()
        self._rewards = dict[int, Rewards]()
        self._answers = list[list[str]]()
        self._stride = 1
        self._kinds = dict[str, str]()  # of members by what was done for them
        self._summaries = set[str]()
        self._makers = dict[str, str]()  # of members that count
        self._lost = dict[str, Claims]()  # of complete rounds, by worker: what came to nothing
        self._identities = dict[str, dict[str, Any]]()

    def stamp(self) -> object:
        """Differs when something happened."""
        workers = [(file, self.store.stamp(f"workers/{file}")) for file in sorted(self.store.names("workers"))]
        return self.store.stamp("bell"), workers, sorted(self.store.names("launches"))

    def look(self, told: Told = lambda what, done, of: None) -> Facts:
        self._read_rounds(told)
        self.notes = self.reader.look(lambda done, of: told("notes of workers", done, of))
        return self._facts()

    # -- rounds -------------------------------------------------------------------------------------------------------

    def _read_rounds(self, told: Told) -> None:
        all = len([each for each in self.store.names("rounds") if each.isdigit()])
        known, self.open, older, self._damage = dict(self._before), dict[int, RoundRegisters](), self.open, []
        round = len(self.done)
        while not self.over:
            try:
                found = registers_of(self.store, round, self._ground | known, older.get(round))
            except (faults.Denied, faults.Damaged, faults.Refused, faults.Unfit) as error:
                denied = isinstance(error, faults.Denied)
                cure = " as long as the disk refuses" if denied else "; restore it from a backup"
                why = f"{error}: what comes after it cannot be shown{cure}"
                self._damage = [Failure(0.0, folder(round), "", "", why)]
                return
            except (faults.Missing, faults.Passing):  # not visible yet; the next look sees it
                return
            if not (found and found.plan):
                self.over = bool(found) and not self.open
                return
            known = found.members
            if found.complete and not self.open:
                self._finish(found)
            else:
                self.open[round] = found
            round += 1
            if round % 20 == 0:
                told("rounds", round, all)

    def _finish(self, found: RoundRegisters) -> None:
        """A round that is complete is summed up, and most of it forgotten."""
        self.done.append(summed_up(found))
        self._remember(found)
        if found.round == 0:
            self._ground = found.members
        self._before = found.members
        self._recent.append(found)
        while len(self._recent) > 2 and sum(len(each.plan) for each in self._recent) > _TREE:
            self._recent.popleft()
        self._read_claims(found, self._lost)
        self.failures = [*self.failures, *self._failures_of(found)][-_FAILURES:]
        if found.round % self._stride == 0:
            self._genomes[found.round] = [alone(member) for member in found.members.values() if not member.absent]
            self._rewards[found.round] = rewards_of(answering(found))
        self._answers = answers_of(found) or self._answers
        if len(self._genomes) > 2 * _GENOMES:
            self._stride *= 2
            self._genomes = {n: nodes for n, nodes in self._genomes.items() if n % self._stride == 0}
            self._rewards = {n: rewards for n, rewards in self._rewards.items() if n % self._stride == 0}

    def _remember(self, found: RoundRegisters) -> None:
        for recipe in found.plan:
            id = name(found.round, recipe.slot)
            if not recipe.carried:
                self._kinds[id] = _kind(recipe)
            if recipe.role == "summary":
                self._summaries.add(id)
            if outcome := found.made.get(id):
                self._makers[id] = outcome.by
        self._donors = donors_of(found) | self._donors

    def _read_claims(self, found: RoundRegisters, by: dict[str, Claims]) -> None:
        """What workers have claimed in a round, and neither given up nor made; each moment as the disk tells it."""
        for id, slot in found.slots.items():
            there = slot.claims.get(slot.version, 0)
            for n in range(max(0, there - 8), there - slot.finished):
                if (slot.version, n) not in slot.left:
                    begin, claim = self._claim(
                        f"{folder(found.round)}/{round_and_slot(id)[1]}.{slot.version}.claim.{n}"
                    )
                    by.setdefault(str(claim.get("by", "")), []).append((begin, id))

    def _claim(self, path: str) -> tuple[float, Mapping[str, Any]]:
        """When it was made, as the disk tells, and what it says."""
        with contextlib.suppress(faults.Fault):
            claim = quickly(self.store, path)
            self._identities[str(claim.get("by", ""))] = claim
            return self.store.stamp(path)[2] / 1e9, claim
        return 0.0, {}

    def _failures_of(self, found: RoundRegisters) -> list[Failure]:
        failures = [
            Failure(0.0, id, *found.maker(id), why)
            for id, member in found.members.items()
            for why in (_DIVERGED if member.diverged else "", member.lost)
            if why
        ]
        absent = {id: each for id, each in found.made.items() if not each.member}
        for id, slot in found.slots.items():
            for version, n in sorted(slot.left)[-8:]:
                path = f"{folder(found.round)}/{round_and_slot(id)[1]}.{version}.left.{n}"
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
        now, launch, started = worker_notes.now(self.store), launches.latest(self.store), dict[str, Any]()
        with contextlib.suppress(faults.Fault):
            started = quickly(self.store, launches.path(launch, "start")) if launch else {}
        operational = known if isinstance(known := started.get("operational"), dict) else {}
        for found in self.open.values():
            self._remember(found)
        rows, troubled = self._rows(now, number(operational, "dead_seconds") or 60.0)
        at = last_made(self.notes, self._summaries)
        rounds = [dated(each, at) for each in (*self.done, *(summed_up(found) for found in self.open.values()))]
        sheets = [*self._recent, *self.open.values()]
        if hidden := sum(notes.hidden for notes in self.notes):
            troubled.append(Failure(0.0, "workers", "", "", f"notes of {several(hidden, 'worker')} cannot be read"))
        failures = (
            self._damage + self.failures + [each for found in self.open.values() for each in self._failures_of(found)]
        )
        return Facts(
            folder=address(self.store.root), name=self.store.root.name, config=self.run["config"],
            operational=operational, command=str(started.get("command", "")), state=self._state(launch, rows),
            over=self.over, now=now,
            began=min((n.begins[0] for n in self.notes if n.begins), default=0.0),
            rounds=rounds, rows=rows, failures=[*failures[-_FAILURES:], *troubled[-_FAILURES:]],
            donors=[*self._donors.values()], moved=moved_by(self.notes),
            written=sum(notes.written for notes in self.notes), read=sum(notes.read for notes in self.notes),
            shares=worker_notes.shares(self.notes),
            tree=tree_of(sheets), tree_from=min((each.round for each in sheets), default=0),
            genomes=[node for nodes in self._genomes.values() for node in nodes], last=last_members(sheets),
            rewards=self._rewards, answers=self._answers,
        )  # fmt: skip

    def _state(self, launch: int, rows: list[WorkerRow]) -> str:
        if self.over:
            return "finished"
        with contextlib.suppress(faults.Fault):
            if why := launches.ordered(self.store, launch):
                return f"stopped: {why}"
        if at_work := sum(row.ending == "works" for row in rows):
            return f"running, {several(at_work, 'worker')}"
        return "nobody works on it now; the same command goes on with it" if rows else "not begun yet"

    def _rows(self, now: float, dead: float) -> tuple[list[WorkerRow], list[Failure]]:
        """A row for each place; a place has several workers if one died and another took it."""
        held, seats, troubled = dict[str, Claims](), dict[tuple[str, str], list[WorkerStory]](), list[Failure]()
        for found in self.open.values():
            self._read_claims(found, held)
        for notes in self.notes:
            if notes.begins:
                seats.setdefault((notes.machine, _PROCESS.sub("", notes.name)), []).append(notes)
        rows = []
        for (machine, title), there in sorted(seats.items()):
            sessions, spans = list[Span](), list[Span]()
            for notes in sorted(there, key=lambda notes: notes.begins[0]):
                claims = self._lost.get(notes.name, []) + held.get(notes.name, [])
                alive, seen = self._alive(notes, claims, now, dead)
                sessions += notes.sessions(alive, now if alive else seen)
                spans += self._spans(notes, sessions[-1].end, claims, alive)
                troubled += [Failure(at, id, notes.name, machine, f"{what}: {why}") for at, what, id, why
                             in notes.troubles if what != "failed"]  # fmt: skip
            spans.sort(key=lambda span: span.begin)
            rows.append(WorkerRow(machine, title, sessions, spans, sum(len(notes.makes) for notes in there)))
        return rows, sorted(troubled, key=lambda each: each.at)

    def _alive(self, notes: WorkerStory, claims: Claims, now: float, dead: float) -> tuple[bool, float]:
        """Whether a worker lives, and its last sign of life: for people, who know that clocks differ."""
        if notes.ends[-1]:
            return False, notes.ends[-1]
        stamp, claim = self.store.stamp(pulse_at(notes.name)), self._identities.get(notes.name, {})
        seen = max(notes.last, stamp[2] / 1e9 if stamp else 0.0, *(begin for begin, _ in claims))
        identity = claim.get("identity")
        here = isinstance(identity, list) and identity[:2] == [*self.host.identity][:2]
        gone = Watch(self.store, self.host, dead).gone(claim)
        return not gone and (here or now - seen <= dead), seen

    def _spans(self, notes: WorkerStory, end: float, claims: Claims, alive: bool) -> list[Span]:
        """What was noted; and of claims that came to nothing, the time until the next thing that was noted."""
        spans = [Span(at - seconds, at, "wait") for at, seconds in notes.waits]
        for at, seconds, id, _ in notes.makes:
            counts = self._makers.get(id, notes.name) == notes.name and id not in notes.late
            spans.append(Span(at - seconds, at, self._kinds.get(id, "merge") if counts else "late", id))
        mine = {id for _, _, id, _ in notes.makes}
        noted = sorted(span.begin for span in spans)
        for begin, id in {*claims}:
            if id not in mine and notes.begins[0] - _COARSE <= begin <= end:
                until = next((later for later in noted if later >= begin), end)
                spans.append(Span(begin, until, "now" if alive and until == end else "lost", id))
        return spans
