"""What `join` gives to the user's loop: batches of whose turn it is, and a word after each step."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from fleet.context import Stopped
from fleet.places import address
from fleet.plain import say
from fleet.run_config import UserError
from train.own_loop.own_model import OwnModel, numbers_of
from train.own_loop.own_worker import OwnWorker
from train.own_loop.turn_taking import Ended, GoOn, Hands, OwnTurn
from train.own_loop_config import OwnLoopConfig

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_IDLE = 1000  # times that a loop may ask whether the run is over without a step between
_SPEAKS = 10.0  # seconds: no more often is it said how far this process is
_STOPPED = "Stopped; what was done is kept, and the same command goes on from here."
Loader = Callable[[int, int], Iterable[Any]]  # of a slot and a round: its batches


class OwnLoopRun:
    """A run as the user's loop sees it: `with join(...) as run`. Whose turn it is, changes with a step."""

    def __init__(
        self, config: OwnLoopConfig, model: OwnModel, hands: Hands, worker: OwnWorker | None, rank: int = 0
    ) -> None:
        """Where several ranks share a model, the first one has the worker."""
        self.config, self._over = config, False
        self._model, self._hands, self._worker, self._rank = model, hands, worker, rank
        self._pid, self._steps, self._asked, self._gone = os.getpid(), 0, 0, False
        self._idle, self._spoke = 0, time.monotonic()
        self._turn: OwnTurn | None = None
        self._handlers: dict[int, Any] = {}

    # -- whose turn it is ---------------------------------------------------------------------------------------------

    @property
    def slot(self) -> int:
        return self._now.slot

    @property
    def round(self) -> int:
        return self._now.round

    @property
    def steps_taken(self) -> int:
        """Of this turn."""
        return self._now.done

    @property
    def genome(self) -> Mapping[str, float]:
        """GENES, as this member has inherited them."""
        return self._now.genome

    @property
    def total_steps(self) -> int:
        """Of one slot, from the first round to the last: what a schedule of the learning rate is to be made for."""
        return self.config.total_steps

    @property
    def over(self) -> bool:
        """For a loop that goes on as it is; one that takes no steps would never end, nor hear that it is to stop."""
        self._idle += 1
        if self._over:
            return True
        if self._asked and self._idle > 1:
            say(_STOPPED)
            raise SystemExit(130)
        if self._idle > _IDLE:
            raise UserError(f"run.over was asked {_IDLE:,} times and run.step() was not called: call it after each "
                            "step of the optimizer, with the loss")  # fmt: skip
        return False

    @property
    def _now(self) -> OwnTurn:
        if os.getpid() != self._pid:
            raise UserError(f"process {os.getpid()} was forked from the one that has joined the run, {self._pid}: a "
                            "data loader's worker knows nothing of the run; ask before, in make_loader")  # fmt: skip
        if self._turn is None:
            said = "the run is over" if self._over else "nobody's turn: with join(...) as run"
            raise UserError(f"{said}; what a loop asks for belongs to a member that it trains")
        return self._turn

    # -- the loop -----------------------------------------------------------------------------------------------------

    def batches(self, make_loader: Loader) -> Iterator[Any]:
        """Of whose turn it is, until the run is over; a loader that is used up within a round is made again. Who goes
        on with another's turn draws the batches again that are behind it."""
        while not self._over:
            turn, again, number = self._now, [*self._now.drawn], 0
            self._seed(turn, 0)
            while turn is self._turn:
                before, taken = number, turn.done
                for batch in make_loader(turn.slot, turn.round):
                    number += 1
                    if again and number <= again[-1]:
                        if number in again:
                            self._seed(turn, again.index(number) + again.count(number))
                        continue
                    turn.number = number
                    yield batch
                    if turn is not self._turn:
                        break
                else:
                    self._check_loader(number - before, turn.done - taken + len(again))

    def step(self, loss: Any = None) -> None:
        """After each step of the optimizer, as the last line of the loop. After the last step of a turn, the model is
        another's: of whoever's turn is next."""
        turn = self._now
        if loss is not None:
            turn.losses, turn.total = True, turn.total + (loss.detach().double() if torch.is_tensor(loss) else loss)
        turn.done += 1
        turn.drawn.append(turn.number)
        self._steps, self._idle = self._steps + 1, 0
        self._hands.tell(turn.done)
        self._take()

    def report(self, **metrics: Any) -> None:
        """Of the member whose turn it is, before its last step: `fitness`, the more the better, or `loss` decide who
        has children; others are there to look at."""
        self._now.reported |= numbers_of(metrics)

    def __reduce__(self) -> str:
        raise UserError("a run stays in the process that has joined it: a data loader's worker knows nothing of it; "
                        "ask before, in make_loader")  # fmt: skip

    # -- inside -------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._stop) for number in _SIGNALS}
        if self._worker:
            joined = self._worker.joined
            say(f"{'New run' if joined.new else 'Joined the run'} {address(joined.folder)}")
            self._worker.start()
        try:
            self._take()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        turn, self._turn = self._turn, None
        if isinstance(error, KeyboardInterrupt) or os.getpid() != self._pid:  # asked twice: at once; or forked
            return
        if turn:
            if self._worker:
                self._worker.stop()
            self._hands.tell(error if isinstance(error, Exception) else turn.done)
        self._leave()
        if turn and error is None:
            if not self._steps:
                raise UserError("run.step() was never called: call it after each step of the optimizer, with the loss")
            say(f"The loop ended after step {turn.done} of {turn.steps} of round {turn.round}, slot {turn.slot}: the "
                "run is not over. What was done is kept, and the same command goes on from there.")  # fmt: skip

    def _take(self) -> None:
        """Go on, or take the next turn."""
        before, said = self._turn, self._hands.serve()
        if before and not isinstance(said, GoOn):
            self._tell(before)
        if isinstance(said, Ended):
            self._turn, self._gone, self._over = None, True, said.how == "over"
            return self._ended(said)
        self._turn = self._now if isinstance(said, GoOn) else said
        self._seed(self._now, self._now.done)

    def _tell(self, turn: OwnTurn) -> None:
        """How far this process is, now and then."""
        if self._rank or time.monotonic() - self._spoke < _SPEAKS:
            return
        self._spoke = time.monotonic()
        loss = f": mean loss {float(turn.total) / turn.done:.4g}" if turn.losses else ""
        say(f"Round {turn.round} of {self.config.max_generations}, slot {turn.slot}{loss}")

    def _seed(self, turn: OwnTurn, step: int) -> None:
        self._model.seed(turn.seed(step, self._rank))

    def _ended(self, ended: Ended) -> None:
        if ended.how == "interrupted":
            say(_STOPPED)
            raise SystemExit(130)
        if isinstance(ended.error, Stopped):
            raise UserError(str(ended.error)) from None
        if ended.error:
            raise ended.error

    def _check_loader(self, drawn: int, steps: int) -> None:
        if not drawn:
            raise UserError(f"make_loader({self.slot}, {self.round}) gave no batch")
        if not steps:
            raise UserError(f"a whole loader ({drawn} batches) was used up and run.step() was never called")

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Asked once: end at the next step; asked twice: at once. Of several ranks, the first one says when."""
        if os.getpid() != self._pid:  # forked, as a data loader's workers are: Ctrl-C is not for them
            if number != signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self._asked += 1
        if self._asked > 1:
            raise KeyboardInterrupt
        if self._worker:
            self._worker.stop()

    def _leave(self) -> None:
        """When the worker has ended, which may have asked for more meanwhile."""
        if self._worker:
            self._worker.stop()
        while not self._gone:
            said = self._hands.serve()
            self._gone = isinstance(said, Ended)
            if isinstance(said, OwnTurn):
                self._hands.tell(said.done)
        if self._worker:
            self._worker.join()
        for number, before in self._handlers.items():
            signal.signal(number, before)
