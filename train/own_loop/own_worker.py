"""The worker beside a user's loop, in a thread of its own: it looks for work, and makes what needs no training."""

import json
import threading
from copy import copy

import torch

from fleet.context import Stopped
from fleet.joined_worker import JoinedWorker
from fleet.work import CannotServe
from train.kept_rounds import files_of
from train.member.global_model import GlobalModel
from train.own_loop.loop_ranks import LeadingRank
from train.own_loop.own_model import OwnModel
from train.own_loop.own_runtime import MODEL, OwnLoopRuntime, own_maker
from train.own_loop.run_result import result_of
from train.own_loop.turn_taking import HandOver, Told
from train.own_loop_config import OwnLoopConfig
from train.recipe_arguments import FIRST


class OwnWorker:
    def __init__(self, joined: JoinedWorker, config: OwnLoopConfig, model: OwnModel, lead: LeadingRank | None) -> None:
        self.joined, self.config, self.model = joined, config, model
        answer = lead.answer if lead else lambda what, given: getattr(model, what)(*given)
        self.hands = HandOver(answer, joined.host.stop, lead.pass_on if lead else _unheard)
        self._runtime = OwnLoopRuntime(config, model, self.hands)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.joined.host.stop()

    def join(self) -> None:
        self._thread.join()

    def _take_result(self) -> None:
        """Also of a run that was over before this process came, with whatever model."""
        history = self.joined.history
        try:
            self._runtime.check_beside(json.loads(files_of(history, FIRST).read(MODEL)))
        except CannotServe as why:
            raise Stopped(str(why)) from None
        result_of(history, self.config).into(self.hands, bool(self.model.of_two_modes))

    def _run(self) -> None:
        try:
            with torch.no_grad():
                beside = copy(self._runtime)
                beside.global_model = GlobalModel()  # or one lane would read what the other changes
                how = self.joined.run(own_maker(self.config, self._runtime), own_maker(self.config, beside))
                if how == "over":
                    self._take_result()
            self.hands.end(how)
        except BaseException as error:
            self.hands.end(error=error)


def _unheard(said: Told) -> None:
    """Nobody else is there."""
