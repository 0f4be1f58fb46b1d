"""Where questions come from that have verifiable answers: the built-in skills, files, generators of reasoning-gym."""

import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

from fleet.errors import Lacking, first_line
from fleet.run_config import UserError
from train import text_sources
from train.posttrain.example_rows import HELD, divided, drawn
from train.posttrain.posttrain_sections import GYM, DatasetSource
from train.rl.checkers import Said, Terms, checked_question, terms_of
from train.rl.rl_config import CORRECT
from train.skills import PREFIX, questions, skill_named
from train.splits import Split, SplitName, parts_of
from train.text_sources import Check, PlacedRow, Row

OWN_VERIFIER = "gym"  # instead of a name in CHECKERS: reasoning-gym judges


@dataclass(frozen=True)
class Questions:
    """The questions of one environment, and what each is for."""

    rows: tuple[Row, ...]
    parts: tuple[SplitName, ...]


def questions_of(
    source: DatasetSource, seed: int, count: int, holdout: float, check: Check = checked_question
) -> Questions:
    """So many, those that are held out among them; the same text is never on two sides."""
    if source.source.startswith(PREFIX):
        return _of_skill(source.source, seed, count, holdout)
    rows = [row for _, row in drawn(source, placed(source, seed, count, check), count, seed)]
    return Questions(tuple(rows), tuple(sides_of(source, rows, holdout)))


def sides_of(source: DatasetSource, rows: Sequence[Row], holdout: float) -> list[SplitName]:
    """By what is asked alone, as of rows that somebody answered."""
    asked = [{"prompt": row["prompt"]} for row in rows]
    return divided(f"environment {source.source}", asked, Split(HELD, HELD * holdout))


def placed(source: DatasetSource, seed: int, count: int, check: Check = checked_question) -> Iterator[PlacedRow]:
    """Rows and where each stands, checked."""
    if source.source.startswith(PREFIX):
        rows = (_asked(each) for each in islice(questions(skill_named(source.source), seed, "train"), count))
        return text_sources.checked(text_sources.placed(rows, source.source), checked_question)
    if source.source.startswith(GYM):
        return text_sources.placed(_of_gym(source, seed, count), source.source)
    return text_sources.read(source.source, source.name, source.split, check)


def _of_skill(name: str, seed: int, count: int, holdout: float) -> Questions:
    """What is held out of a skill nobody ever learns, not even who made the models that it begins with."""
    held, skill = max(2, round(HELD * count)), skill_named(name)
    kept: dict[str, Row] = {}
    for each in questions(skill, seed, "held-out"):
        kept.setdefault(each.text, checked_question(_asked(each)))
        if len(kept) == held:
            break
    sides = parts_of(f"environment {name}", [*kept], Split(1.0, holdout))
    learned = [checked_question(_asked(each)) for each in islice(questions(skill, seed, "train"), count - held)]
    train: list[SplitName] = ["train"] * len(learned)
    return Questions((*learned, *kept.values()), (*train, *sides))


def _asked(each: Any) -> Row:
    return {
        "prompt": each.text,
        "answer": each.choices[each.answer],
        "checker": "choice",
        "choices": list(each.choices),
    }


# -- reasoning-gym -----------------------------------------------------------------------------------------------------


def _of_gym(source: DatasetSource, seed: int, count: int) -> Iterator[Row]:
    made = _generator(source.source, seed, count, _said(source))
    for number in range(count):
        entry = made[number]
        question, answer = entry["question"], str(entry["answer"])
        yield {"prompt": question, "answer": answer, "checker": OWN_VERIFIER, "entry": [count, number]}


def _said(source: DatasetSource) -> str:
    """What a generator can be remembered by: some options are lists."""
    return json.dumps(source.options, sort_keys=True)


@lru_cache(64)
def _generator(name: str, seed: int, count: int, options: str) -> Any:
    try:
        gym: Any = importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise Lacking(
            f"{name} needs the package reasoning-gym ({error}): {sys.executable} -m pip install -r requirements-rl.txt"
        ) from None
    try:
        return gym.create_dataset(name.removeprefix(GYM), size=count, seed=seed % (1 << 31), **json.loads(options))
    except Exception as error:  # whatever a generator makes of names and options
        raise UserError(f"{name}: reasoning-gym cannot make it: {first_line(error)}") from None


# -- rewards -----------------------------------------------------------------------------------------------------------


def reward_terms(source: DatasetSource, seed: int, row: Row, said: Said, longest: int) -> Terms:
    """Of one answer, by the environment's own checker."""
    if row["checker"] != OWN_VERIFIER:
        return terms_of(row, said, longest)
    count, number = row["entry"]  # made again: not all that belongs to one can be written down
    made = _generator(source.source, seed, count, _said(source))
    score = float(made.score_answer(answer=said.text.strip(), entry=made[number]))
    brief = 1 - len(said.tokens) / longest
    return {CORRECT: min(1.0, max(0.0, score)), "format": float(bool(said.text.strip()) and said.ended), "brief": brief}
