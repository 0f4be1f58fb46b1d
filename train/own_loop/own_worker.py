"""The worker beside a user's loop, in a thread of its own: it looks for work, and makes what needs no training."""

import threading

import torch

from fleet.joined_worker import JoinedWorker
from train.own_loop.loop_ranks import LeadingRank
from train.own_loop.own_model import OwnModel
from train.own_loop.own_runtime import OwnLoopRuntime, own_maker
from train.own_loop.run_result import result_of
from train.own_loop.turn_taking import HandOver, Told
from train.own_loop_config import OwnLoopConfig


class OwnWorker:
    def __init__(self, joined: JoinedWorker, config: OwnLoopConfig, model: OwnModel, lead: LeadingRank | None) -> None:
        self.joined, self.config, self.model = joined, config, model
        answer = lead.answer if lead else lambda what, given: getattr(model, what)(*given)
        self.hands = HandOver(answer, joined.host.stop, lead.told if lead else _unheard)
        self._runtime = OwnLoopRuntime(config, model, self.hands)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.joined.host.stop()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            with torch.no_grad():
                how = self.joined.run(own_maker(self.config, self._runtime), own_maker(self.config, self._runtime))
                if how == "over":
                    result_of(self.joined.history, self.config).into(self.hands, bool(self.model.of_two_modes))
            self.hands.end(how)
        except BaseException as error:
            self.hands.end(error=error)


def _unheard(said: Told) -> None:
    """Nobody else is there."""
