"""What the maker of a member sees: its recipe, its inputs' files, a place to write, and when to pause."""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fleet import faults, round_state, small_files, snapshots
from fleet.history import History
from fleet.lane import Pendings
from fleet.payload import InputMember as InputMember
from fleet.payload import PayloadWriter
from fleet.recipe import Recipe

_ASK = 10.0  # seconds between two looks at whether the work is still wanted
_SELDOM, _LONGEST = 100, 60.0  # times as long as a look takes, but no more than so many seconds


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


class Work:
    """One attempt at a recipe."""

    def __init__(
        self,
        id: str,
        history: History,
        writer: PayloadWriter,
        resume: bool,
        snapshot_every: float,
        ordered: Callable[[], str],
        pending: Pendings = Pendings(),
        hurry: Callable[[], bool] | None = None,
    ) -> None:
        """With `hurry` it is early: not all of its inputs are there yet. A maker writes what needs none of the others,
        and ends at once where there is a hurry; if the same worker makes it, it finds that written."""
        self.id, self.history, self.writer = id, history, writer
        self.recipe: Recipe = history.recipe(id)
        self._version = history.slot(id).version
        self.host = writer.store.host
        self.write, self.create, self.path, self.folder = writer.write, writer.create, writer.path, writer.folder
        self.early, self.hurry = bool(hurry), hurry or (lambda: False)
        inputs = [id for id in self.recipe.inputs if not hurry or id in pending or history.finished(id)]
        self.pending = tuple(made for id in inputs if (made := pending.get(id)))  # those that count if all goes well
        self.absent = tuple(id for id in inputs if id not in pending and not history[id])
        self.inputs = {
            id: made.input if (made := pending.get(id)) else history.files(id) for id in inputs if id not in self.absent
        }
        self.brought = set[str]()  # places of files in memory, which are forgotten at the end
        self.resumed: snapshots.Snapshot | None = None
        self.steps = 0  # that it takes, if its maker says so
        self.at = ("", 0, 0)  # how far it is, for people: of what, so much is done, of so much if that is known
        self._resume, self._every, self._ordered = resume, snapshot_every, ordered
        self._saved = self._asked = self.host.now()
        self._until_asked = max(_ASK, 6 * writer.store.breath)

    def as_before(self) -> bool:
        """What was made is, byte for byte, the version before it, whose files are damaged; or it is the first."""
        if not self._version:
            return True
        record = self.history.store.standing(round_state.register(self.id, self._version - 1))
        return round_state.outcome(self.id, self.recipe, record, self._version - 1).files == self.writer.seal()

    def bring(self, files: Iterable[small_files.File]) -> None:
        """What will be read of small files: side by side, where the disk takes long to answer."""
        self.brought |= small_files.bring(files)

    # -- long recipes -------------------------------------------------------------------------------------------------

    def resume(self) -> snapshots.Snapshot | None:
        """Where an earlier attempt got to, if one left a whole snapshot."""
        if self._resume and self.resumed is None:
            self.resumed = snapshots.latest(self.writer.store, prefix_of(self.id))
        return self.resumed

    def between_steps(self, step: int, save: Callable[[snapshots.Saver], Any], small: bool = False) -> None:
        """Call this after every step: the one place where a long recipe is saved, handed over or dropped. What `save`
        returns, plain values, is kept beside the files that it writes. What is small is saved each time."""
        self.at = ("step", step, self.steps)
        now = self.host.now()
        ending = self.host.stopping
        if now - self._asked > self._until_asked:
            with contextlib.suppress(faults.Passing):  # a disk that does not answer just now says nothing
                if not self._wanted():
                    raise Superseded
                ending = ending or bool(self._ordered())
            self._asked = self.host.now()
            seldom = min(_SELDOM * (self._asked - now), _LONGEST)  # one slow answer makes nobody deaf
            self._until_asked = max(_ASK, 6 * self.writer.store.breath, seldom)
        if small or ending or now - self._saved > self._every:
            with contextlib.suppress(faults.Full, faults.Passing):  # no snapshot is no reason to lose the work
                snapshots.take(self.writer, step, save)
            self._saved = now
        if ending:
            raise Interrupted

    def _wanted(self) -> bool:
        """Nobody else has finished it, or finished it and was found damaged: the files carry the version's number."""
        self.history.hear()
        return not self.history.finished(self.id) and self.history.slot(self.id).version == self._version


Maker = Callable[[Work], Mapping[str, Any]]


def prefix_of(id: str) -> str:
    """How the names of all attempts at a recipe begin."""
    round, _, slot = id.partition("/")
    return f"{int(round):05d}.{slot}."
