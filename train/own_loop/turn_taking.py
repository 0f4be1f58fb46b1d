"""Two threads of one process that take turns: the worker's, which makes members, and the user's, which trains them.

While one works, the other waits. All that touches the model happens in the user's thread: the worker's asks for it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Protocol

from train.seeds import mixed
from train.verdicts import NotFinite


@dataclass(eq=False)
class OwnTurn:
    """A member that the user's loop trains."""

    round: int
    slot: int
    steps: int
    genome: dict[str, float]
    base: int  # the run's seed
    done: int = 0  # steps that are taken, perhaps by an earlier attempt
    total: Any = 0.0  # of their losses
    losses: bool = False  # whether there were any
    number: int = 0  # of batches that are drawn
    drawn: list[int] = field(default_factory=list)  # that were before each of those steps ended
    reported: dict[str, float] = field(default_factory=dict)

    def seed(self, step: int, rank: int = 0) -> int:
        """Of all that is drawn in this step: of several ranks, each draws for itself."""
        return mixed(self.base, self.round, self.slot, step, *([rank] if rank else [])) & 0x7FFFFFFF


@dataclass(frozen=True)
class Ask:
    """What the user's thread is to do with the model."""

    what: str
    given: tuple[Any, ...]


@dataclass(frozen=True)
class GoOn:
    """Take the turn's next step."""


@dataclass(frozen=True)
class Ended:
    """The worker has ended: why, if it should not have."""

    how: str = ""
    error: BaseException | None = None


Told = OwnTurn | GoOn | Ended
Answer = Callable[[str, tuple[Any, ...]], Any]


class Hands(Protocol):
    """The user's side."""

    def tell(self, what: int | BaseException) -> None: ...
    def serve(self) -> Told: ...


class HandOver:
    def __init__(self, answer: Answer, stop: Callable[[], None], pass_on: Callable[[Told], None]) -> None:
        """What `answer` says is what the user's thread does when it is asked; `stop` lets the worker end; `pass_on` is
        given what the user's loop is told."""
        self._answer, self._stop, self._pass_on = answer, stop, pass_on
        self._to_loop, self._to_worker = SimpleQueue[Any](), SimpleQueue[Any]()

    # -- the worker's side --------------------------------------------------------------------------------------------

    def ask(self, what: str, *given: Any) -> Any:
        self._to_loop.put(Ask(what, given))
        return self._heard()

    def train(self, turn: OwnTurn) -> Iterator[int]:
        """After each step of the user's loop; it goes on when the next one is asked for."""
        self._to_loop.put(turn)
        while True:
            yield (done := self._heard())
            if done >= turn.steps:
                return
            self._to_loop.put(GoOn())

    def end(self, how: str = "", error: BaseException | None = None) -> None:
        self._to_loop.put(Ended(how, error))

    def _heard(self) -> Any:
        """What the other side says; its errors are raised here."""
        if isinstance(said := self._to_worker.get(), BaseException):
            raise said
        return said

    # -- the user's side ----------------------------------------------------------------------------------------------

    def tell(self, what: int | BaseException) -> None:
        """So many steps are taken; or what has happened."""
        self._to_worker.put(what)

    def serve(self) -> Told:
        """Do what is asked, until there is a step or a turn to take, or the worker has ended."""
        while isinstance(said := self._to_loop.get(), Ask):
            try:
                self._to_worker.put(self._answer(said.what, said.given))
            except NotFinite as verdict:
                self._to_worker.put(verdict)
            except BaseException as error:  # of the user's own functions, or of his model: he is to hear of it
                self._stop()
                self._to_worker.put(error)
                raise
        told: Told = said
        self._pass_on(told)
        return told
