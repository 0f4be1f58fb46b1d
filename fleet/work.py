"""What the maker of a member sees: its recipe, its inputs' files, a place to write, and when to pause."""

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet import faults, snapshots
from fleet.hashed import HashedFile, HashedReader
from fleet.history import History
from fleet.payload import Draft, Payload
from fleet.recipe import Member, Recipe

_ASK = 10.0  # seconds between two looks at whether the work is still wanted


class Failed(Exception):
    """A verdict on the recipe (a loss that is not finite), not a fault of the machine: it would fail anywhere."""


class Interrupted(Exception):
    """This process, or the run, was asked to end; what was done is in a snapshot."""


class Superseded(Exception):
    """The recipe has an outcome by now, or another version of it is to be made."""


class NotOnThisMachine(Exception):
    """This machine cannot make it (it lacks the text, the network, the memory), but another one may; says why."""


class CannotServe(Exception):
    """This process can make nothing of this run, nor could another in its place here; says why."""


@dataclass(frozen=True)
class Input:
    """A present input: what is known of it, and its files."""

    member: Member
    files: Payload

    @property
    def metrics(self) -> Mapping[str, Any]:
        return self.member.metrics

    @property
    def genome(self) -> Mapping[str, Any]:
        return self.member.recipe.genome

    def read(self, name: str) -> bytes:
        return self.files.read(name)

    def open(self, name: str) -> AbstractContextManager[HashedReader]:
        """A file to read piece by piece: `with parent.open("weights") as file: file.readinto(buffer)`."""
        return self.files.open(name)

    def path(self, name: str) -> Path:
        return self.files.path(name)

    @property
    def folder(self) -> Path:
        """Where its files are, each looked at."""
        return [self.path(name).parent for name in self.files.files][0]


class Work:
    """One attempt at a recipe."""

    def __init__(
        self, id: str, history: History, draft: Draft, resume: bool, snapshot_every: float, ordered: Callable[[], str]
    ) -> None:
        self.id, self.history, self.draft = id, history, draft
        self.recipe: Recipe = history.recipe(id)
        self._version = history.slot(id).version
        self.host = draft.store.host
        members = {id: history[id] for id in self.recipe.inputs}
        self.absent = tuple(id for id, member in members.items() if not member)
        self.inputs = {id: Input(member, history.files(id)) for id, member in members.items() if member}
        self.resumed: snapshots.Snapshot | None = None
        self.steps = 0  # that it takes, if its maker says so
        self.at = ("", 0, 0)  # how far it is, for people: of what, so much is done, of so much if that is known
        self._resume, self._every, self._ordered = resume, snapshot_every, ordered
        self._saved = self._asked = self.host.now()

    # -- writing ------------------------------------------------------------------------------------------------------

    def write(self, name: str, data: bytes) -> None:
        self.draft.write(name, data)

    def create(self, name: str) -> AbstractContextManager[HashedFile]:
        """A file to write block by block: `with work.create("weights") as file: file.write(block)`."""
        return self.draft.create(name)

    def path(self, name: str) -> Path:
        """Where to put a file that a library writes by itself."""
        return self.draft.path(name)

    def folder(self) -> AbstractContextManager[Path]:
        """Where a library puts several files: `with work.folder() as place: model.save_pretrained(place)`."""
        return self.draft.folder()

    # -- long recipes -------------------------------------------------------------------------------------------------

    def resume(self) -> snapshots.Snapshot | None:
        """Where an earlier attempt got to, if one left a whole snapshot."""
        if self._resume and self.resumed is None:
            self.resumed = snapshots.latest(self.draft.store, prefix_of(self.id))
        return self.resumed

    def between_steps(self, step: int, save: Callable[[snapshots.Saver], Any]) -> None:
        """Call this after every step: the one place where a long recipe is saved, handed over or dropped. What `save`
        returns, plain values, is kept beside the files that it writes."""
        self.at = ("step", step, self.steps)
        now = self.host.now()
        ending = self.host.stopping
        if now - self._asked > _ASK:
            self._asked = now
            with contextlib.suppress(faults.Passing):  # a disk that does not answer just now says nothing
                if not self._wanted():
                    raise Superseded
                ending = ending or bool(self._ordered())
        if ending or now - self._saved > self._every:
            with contextlib.suppress(faults.Full, faults.Passing):  # no snapshot is no reason to lose the work
                snapshots.take(self.draft, step, save)
            self._saved = now
        if ending:
            raise Interrupted

    def _wanted(self) -> bool:
        """Nobody else has finished it, or finished it and was found damaged: the files carry the version's number."""
        self.history.look()
        return not self.history.finished(self.id) and self.history.slot(self.id).version == self._version


Maker = Callable[[Work], Mapping[str, Any]]


def prefix_of(id: str) -> str:
    """How the names of all attempts at a recipe begin."""
    round, _, slot = id.partition("/")
    return f"{int(round):05d}.{slot}."
