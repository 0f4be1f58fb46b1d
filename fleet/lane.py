"""A worker's second lane: there, what was made is sealed and published, and what needs no device is made, while the
first lane is at the next member.

To everybody else both are one worker, with one name and one pulse. Each has its own view of the run, and takes what the
other leaves. One member at a time is on its way to the disk, and the next one is made of it before it is there.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fleet import faults
from fleet.events import Events
from fleet.host import Host
from fleet.payload import InputMember, PayloadWriter
from fleet.round_state import Outcome
from fleet.store import Value

_PAUSE, _GLANCE = 0.005, 0.02  # seconds between two looks at the other lane: by the first, by the second
_LEAD = 1.0  # that the first lane's small calls have, at most
_OVER = 5.0  # and at a run that is over, for what was voided since
_UNSAID = ("waited", "over")  # of the second lane


@dataclass(eq=False)
class Pending:
    """A member that is made, and whose outcome does not stand yet; nor need its files be on the disk."""

    outcome: Outcome
    writer: PayloadWriter
    parents: tuple["Pending", ...] = ()  # that it was made of: it counts only if they do
    stands: Value | None = None  # at the end: what stands there, which may be another's; or why nothing does
    fault: faults.Fault | None = None

    @property
    def id(self) -> str:
        return self.outcome.member.id

    @property
    def input(self) -> InputMember:
        """As its children read it."""
        member, files = self.outcome.member, self.outcome.files
        return InputMember(self.writer.store, self.outcome.attempt, files, held=self.writer.held, member=member)

    @property
    def counts(self) -> bool:
        """Those bytes are the member's, whoever has published them."""
        return self.stands is not None and self.stands.get("files") == self.outcome.record["files"]

    @property
    def ended(self) -> bool:
        return bool(self.stands or self.fault)


@dataclass
class Pendings:
    """Those of one worker, in turn; what its first lane knows of them."""

    known: dict[str, Pending] = field(default_factory=dict)

    def __contains__(self, id: str) -> bool:
        return id in self.known

    def get(self, id: str) -> Pending | None:
        return self.known.get(id)

    def ended(self) -> list[Pending]:
        """They are pending no more."""
        found = [each for each in self.known.values() if each.ended]
        for each in found:
            del self.known[each.id]
        return found


class Lane:
    """The second one, and how the first one deals with it."""

    def __init__(
        self, host: Host, publish: Callable[[Pending], None], turn: Callable[[], bool], leave: Callable[[], None]
    ) -> None:
        """`turn` makes something, or waits a moment; it says when the run is over. At the end it may `leave`."""
        self._host, self._publish, self._turn, self._leave = host, publish, turn, leave
        self._next: Pending | None = None
        self._waits_for_look = self._asked = self._goes_on = False
        self._ending = self._ended = self._called = False
        self._error: BaseException | None = None

    def start(self) -> None:
        self._host.background(self._run)

    def enqueue(self, made: Pending) -> None:
        """Publish it, when what came before is through."""
        self._wait(lambda: self._next is None)
        self._waits_for_look, self._asked = self._goes_on, True
        self._next = made

    def looked(self, found: bool) -> None:
        """The first lane has looked for what comes next. Where it went on at once the last time, large files wait for
        that: on a thin line its small calls would come behind them."""
        if self._asked:
            self._goes_on, self._asked = found, False
        self._waits_for_look = False

    def check(self) -> None:
        """What ends the second lane ends the worker."""
        if self._error:
            error, self._error = self._error, None
            raise error

    def end(self) -> None:
        """Once what it was given is through."""
        self._ending = True
        self._wait(lambda: False)

    @property
    def idle(self) -> bool:
        """Nothing waits to be published, and something could be."""
        return not (self._next or self._ended)

    def call(self) -> None:
        """The first lane waits from now on: who rests for long looks around more often."""
        self._called = True

    def rest(self, seconds: float) -> None:
        """In the second lane, which has nothing to make: until there is something to publish, or it is called."""
        until = self._host.now() + seconds
        while not (self.hurry() or self._called) and (left := until - self._host.now()) > 0:
            self._host.sleep(min(left, _GLANCE))
        self._called = False

    def hurry(self) -> bool:
        """There is something to publish, or to end."""
        return bool(self._next or self._ending or self._host.stopping)

    def _wait(self, until: Callable[[], bool]) -> None:
        while not (self._ended or until()):
            self._host.pause(_PAUSE)

    def _run(self) -> None:
        try:
            while self._next or not (self._ending or self._host.stopping):
                if made := self._next:
                    self._let_first_lane_go_on()
                    self._publish(made)
                    self._next = None
                elif self._turn():  # over, as far as it knows: the first lane may know of something that is void
                    self.rest(_OVER)
        except BaseException as error:
            self._error = error
        finally:
            self._ended = True
            self._leave()

    def _let_first_lane_go_on(self) -> None:
        until = self._host.now() + _LEAD
        while self._waits_for_look and not (self._ending or self._host.stopping) and self._host.now() < until:
            self._host.sleep(_PAUSE)


class LaneEvents(Events):
    """What the second lane notes in the first one's notes: work that nobody waited for."""

    def __init__(self, events: Events) -> None:
        self._events = events

    def note(self, what: str, id: str = "", **more: Any) -> None:
        if what not in _UNSAID:
            self._events.note(what, id, beside=True, **more)

    def flush(self) -> None:
        self._events.flush()
