"""The tournament as a method of the fleet: what its workers make, and what they write for people."""

import contextlib
from collections.abc import Mapping
from typing import Any

from evomerge.config import TournamentConfig
from evomerge.strategy import Tournament, formula_of
from fleet import faults
from fleet.config import Wrong
from fleet.history import History
from fleet.method import Method
from fleet.recipe import NotYet
from fleet.work import Elsewhere, Failed, Maker, Work

ALGORITHM = "evomerge"


def maker(config: TournamentConfig) -> Maker:
    from evomerge.kitchen import Kitchen

    kitchens: list[Kitchen] = []

    def make(work: Work) -> Mapping[str, Any]:
        try:
            if not kitchens:
                kitchens.append(Kitchen(config))
                if kitchens[0].digest != config.text_digest:
                    raise Elsewhere("the text here differs from that of who began: another Python, or a changed file")
            what = work.recipe.merge
            if what["kind"] == "check":
                return kitchens[0].check()
            return kitchens[0].scored(formula_of(work.recipe), work.recipe.evaluate["on"])
        except Wrong as verdict:
            name = work.recipe.merge.get("name", "")
            raise Failed(f"{name}: {verdict}" if name and name not in str(verdict) else str(verdict)) from None

    return make


def report(history: History) -> None:
    """history.json, in the run's folder."""
    from evomerge import results

    with contextlib.suppress(faults.Fault, NotYet, KeyError):
        results.keep(history)


METHOD = Method(ALGORITHM, "", TournamentConfig, Tournament, maker, report=report)
