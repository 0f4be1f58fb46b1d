"""What models' own answers were worth, where they learn from rewards: a small picture for each reward, the best and the
worst answers. Pure."""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fleet.ancestry.genes import GeneHistory, Genes
from fleet.ancestry.tree import finite, natural
from fleet.report.family import constant, gene_rows, genome
from fleet.report.formatting import figure, name, text
from fleet.report.page_parts import plain_table, table
from fleet.report.registers import RoundRegisters
from fleet.reward_hacking import Rewards, hacked

_NOTE = (
    "What answers were worth that models learned from: the mean over a round's members, and one standard deviation "
    "around it. Reward is by each member's own weights, silent the share of questions to which all answers were worth "
    "the same, ended that of answers that came to an end."
)
_ANSWERS = 24  # of a round, that are shown


def answering(found: RoundRegisters) -> Iterator[Mapping[str, Any]]:
    """What is told of those that answered, each once: a child has the same numbers again."""
    for outcome in found.made.values():
        if outcome.member and outcome.member.recipe.role == "tool" and "silent" in outcome.member.metrics:
            yield outcome.member.metrics


def answers_of(found: RoundRegisters) -> list[list[str]]:
    """The best and the worst of each that answered, with their rewards; whatever cannot be read is left out."""
    rows = list[list[str]]()
    for id, metrics in ((id, each.member.metrics) for id, each in found.made.items() if each.member):
        try:
            said = json.loads(metrics["samples"])
            for kind in ("best", "worst"):
                rows += [[id, kind, str(each.pop("question")), str(each.pop("answer")), _in_words(each)]
                         for each in said[kind]]  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            continue
    return rows[:_ANSWERS]


def rewards_part(rounds: Mapping[int, Rewards], answers: Sequence[Sequence[str]]) -> str:
    """Nothing where nobody learns from rewards."""
    if not (found := curves_of(rounds)).genes:
        return ""
    same, drawn = constant(found)
    more = f"<p>The same in all rounds: {name('; '.join(same), 2000)}.</p>" if same else ""
    warning = f"<p><strong>{text(why, 2000)}</strong></p>" if (why := hacked(rounds)) else ""
    pictures = f'{warning}<p class="note">{_NOTE}</p><div class="smalls">{"".join(genome(drawn, "reward"))}</div>{more}'
    columns = ["whose", "", "question", "answer", "rewards"]
    shown = f"<h3>Answers of the last round</h3>{plain_table('Answers', columns, answers, True)}" if answers else ""
    return pictures + table("rewards-table", "Rewards by round", *gene_rows(found)) + shown


def curves_of(rounds: Mapping[int, Rewards]) -> Genes:
    numbers = sorted(round for round, found in rounds.items() if found)
    names = sorted({key for round in numbers for key in rounds[round]}, key=natural)
    return Genes(numbers, [_curve(key, [rounds[round].get(key, ()) for round in numbers]) for key in names], [])


def _curve(key: str, rounds: Sequence[Sequence[float]]) -> GeneHistory:
    means = [math.fsum(values) / len(values) if values else None for values in rounds]
    spreads = [statistics.pstdev(values) if values else None for values in rounds]
    return GeneHistory(key, means, spreads, [value for values in rounds for value in values])


def _in_words(terms: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {figure(finite(value))}" for key, value in terms.items())
