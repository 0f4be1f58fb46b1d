"""A vector on its way through a wire that loses some of it, for whoever goes on with what arrives; with ERROR_FEEDBACK
what was lost is kept, and added to the next one."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import repeat
from typing import Any

from torch import Tensor

from fleet.work import InputMember, Work
from merge.wire import WIRES, received, sender, sender_of_codes
from train.exchange_config import ExchangeConfig

LOST_WIRE = "int8"  # of a part that is small itself


class NarrowSender:
    """Sends piece by piece."""

    def __init__(
        self, config: ExchangeConfig, work: Work, before: InputMember | None, file: str, count: int, stack: ExitStack
    ) -> None:
        """`before` is the member that sent the last one, if it is there."""
        self._wire, lost = WIRES[config.wire], f"lost-{file}"
        self._write = sender_of_codes(stack.enter_context(work.create(file)), count, config.wire)
        self._keep: Callable[[Tensor], None] | None = None
        self._lost: Iterator[Any] = repeat(0.0)
        if config.feeds_back:
            self._keep = sender(stack.enter_context(work.create(lost)), count, LOST_WIRE)
            if before and lost in before.files:
                self._lost = received(stack.enter_context(before.open(lost)), count)

    def send(self, piece: Tensor) -> Tensor:
        """What arrives of it, and of what was lost before."""
        message = piece + next(self._lost)
        self._write(coded := self._wire.encode(message))
        arrived = self._wire.decode(coded, len(message))
        if self._keep:
            self._keep(message - arrived)
        return arrived
