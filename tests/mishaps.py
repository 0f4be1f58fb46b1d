"""A method whose recipes go wrong in the way that MISHAP says: `python -m tests.mishaps --config FILE`."""

import os
import signal
import time
from typing import Literal

from fleet.config import bound, operational
from fleet.method import Method
from fleet.recipe import Past, Recipe, Strategy
from fleet.start import main
from fleet.work import Failed, Maker, Work
from tests.toy.config import ToyConfig


class MishapConfig(ToyConfig):
    mishap: Literal["none", "segfault", "raise", "nan", "verdict", "sleep"] = operational("none", "What goes wrong.")
    spared: bool = bound(False, "The bad recipe is optional.")


class TwoRounds:
    """A good recipe and a bad one, then one that comes from both."""

    def __init__(self, config: MishapConfig) -> None:
        self.spared = config.spared

    def plan(self, round: int, history: Past) -> list[Recipe]:
        good, bad = Recipe("good", merge={"x": 1}), Recipe("bad", merge={"x": 2}, optional=self.spared)
        return [[good, bad], [Recipe("child", ("0/good", "0/bad"), merge={"x": 3})], []][round]


def maker(config: MishapConfig) -> Maker:
    def make(work: Work) -> dict[str, float]:
        if work.recipe.slot == "bad":
            happens(config.mishap)
        work.write("weights", b"".join(parent.read("weights") for parent in work.parents.values()) + b"x")
        return {"loss": float("nan") if (work.recipe.slot, config.mishap) == ("bad", "nan") else 1.0}

    return make


def happens(mishap: str) -> None:
    match mishap:
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "raise":
            raise RuntimeError("the card is on fire")
        case "verdict":
            raise Failed("it does not converge")
        case "sleep":
            time.sleep(600)  # whoever asks it to end at the next step asks in vain


def strategy(config: MishapConfig) -> Strategy:
    return TwoRounds(config)


if __name__ == "__main__":
    main(Method("", "Recipes that go wrong.", MishapConfig, strategy, maker))
