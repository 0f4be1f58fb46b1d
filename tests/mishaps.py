"""A method whose recipes go wrong in the way that MISHAP says: `python -m tests.mishaps --config FILE`."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Literal

from fleet.method import Method
from fleet.recipe import Past, Recipe, Strategy
from fleet.run_config import bound, operational
from fleet.start import main
from fleet.work import CannotServe, Failed, Maker, NotOnThisMachine, Work
from tests.toy.config import ToyConfig


class MishapConfig(ToyConfig):
    mishap: Literal[
        "none", "segfault", "raise", "nan", "verdict", "sleep", "hungry", "device", "lack", "panic", "unfit", "exit",
        "circle", "wordless", "number", "pair",
    ] = operational("none", "What goes wrong.")  # fmt: skip
    spared: bool = bound(False, "The bad recipe is optional.")
    wide: int = bound(0, "So many recipes and nothing else, as in a search; all are bad for who is sick.")
    sick: str = operational("", "How the names of workers begin for whom all recipes are bad.")


class TwoRounds:
    """A good recipe and a bad one, then one that comes from both."""

    def __init__(self, config: MishapConfig) -> None:
        self.spared, self.wide = config.spared, config.wide

    def plan(self, round: int, history: Past) -> list[Recipe]:
        if self.wide:
            many = [Recipe(f"c{k}", "x", args={"x": k}, optional=self.spared) for k in range(self.wide)]
            return [many, []][round]
        good, bad = Recipe("good", "x", args={"x": 1}), Recipe("bad", "x", args={"x": 2}, optional=self.spared)
        return [[good, bad], [Recipe("child", "x", ("0/good", "0/bad"), args={"x": 3})], []][round]


def maker(config: MishapConfig) -> Maker:
    def make(work: Work) -> dict[Any, Any]:
        work.host.sleep(config.sleep)
        if work.recipe.slot == "bad" or config.sick and work.writer.store.name.startswith(config.sick):
            happens(config.mishap)
        work.write("weights", b"".join(parent.read("weights") for parent in work.inputs.values()) + b"x")
        odd = {"nan": {"loss": float("nan")}, "number": {1: 0.5}, "pair": {"word": "\ud83d\ude00"}}
        return odd.get(config.mishap, {"loss": 1.0}) if work.recipe.slot == "bad" else {"loss": 1.0}

    return make


def happens(mishap: str) -> None:
    match mishap:
        case "hungry":
            Path(os.environ["SMALL_MEMORY"], "cgroup.procs").write_text(str(os.getpid()))
            bytearray(os.urandom(1)) * (1 << 29)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "raise":
            raise RuntimeError("the card is on fire")
        case "device":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        case "lack":
            raise NotOnThisMachine("out of memory: 80 GB are needed, 8 GB are there")
        case "unfit":
            raise CannotServe("the questions have changed")
        case "panic":
            from tokenizers import Regex, pre_tokenizers

            pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated").pre_tokenize_str("x" * 60)
        case "exit":
            sys.exit(0)
        case "circle":
            try:
                raise RuntimeError("it came of itself")
            except RuntimeError as error:
                raise error from error
        case "wordless":
            raise Wordless
        case "verdict":
            raise Failed("it does not converge")
        case "sleep":
            time.sleep(600)  # whoever asks it to end at the next step asks in vain


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("there are no words for it")


def strategy(config: MishapConfig) -> Strategy:
    return TwoRounds(config)


if __name__ == "__main__":
    main(Method("", "Recipes that go wrong.", MishapConfig, strategy, maker))
