"""Small skills that a small model learns within a minute: chats with exact answers, and questions that measure them."""

import difflib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import Literal

from fleet.errors import absolute
from fleet.run_config import UserError

PREFIX = "skill:"  # of their names as sources of data
BASE, MIXED = "base", "mixed"
SkillSplit = Literal["train", "held-out"]
Row = dict[str, list[dict[str, str]]]
_HELD_OUT = 8  # one question of so many

NUMBERS = ("one", "two", "three", "four")
_VOWELS, _CONSONANTS = "aeiou", "bcdfghjklmnpqrstvwxyz"
KINDS = {
    "animal": "cat dog horse mouse bear wolf snake bird".split(),
    "color": "red blue green white black pink brown gray".split(),
    "food": "bread rice apple cheese soup cake corn egg".split(),
    "tool": "saw axe hammer knife rope screw drill brush".split(),
    "body": "hand foot nose ear eye leg arm knee".split(),
    "weather": "rain snow wind storm fog hail sun cloud".split(),
}


# -- the skills --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """What is asked, what one might answer, and which of that is right."""

    text: str
    choices: tuple[str, ...]
    answer: int


def _compare(rng: Random) -> tuple[str, str, list[str]]:
    """Either way round: whoever always likes small numbers is right as seldom as anybody else."""
    numbers = rng.sample(range(10, 100), 4)
    way, answer = rng.choice([("largest", max(numbers)), ("smallest", min(numbers))])
    return f"Which number is the {way}: {', '.join(map(str, numbers))}?", str(answer), list(map(str, numbers))


def _vowels(rng: Random) -> tuple[str, str, list[str]]:
    number = rng.randrange(1, 5)
    letters = [*rng.choices(_VOWELS, k=number), *rng.choices(_CONSONANTS, k=7 - number)]
    rng.shuffle(letters)
    return f"How many vowels are in: {' '.join(letters)}?", NUMBERS[number - 1], list(NUMBERS)


def _kinds(rng: Random) -> tuple[str, str, list[str]]:
    kinds = rng.sample(list(KINDS), 4)
    words = [rng.choice(KINDS[kind]) for kind in kinds]
    asked = rng.randrange(4)
    return f"Which word goes with {kinds[asked]}: {' '.join(words)}?", words[asked], words


SKILLS: Mapping[str, Callable[[Random], tuple[str, str, list[str]]]] = {
    "compare": _compare,
    "vowels": _vowels,
    "kinds": _kinds,
}


def question(skill: str, seed: int, number: int) -> Question:
    """Mixed: the skills in turn."""
    if skill == MIXED:
        number, turn = divmod(number, len(SKILLS))
        skill = list(SKILLS)[turn]
    rng = Random(f"{skill} {seed} {number}")
    asked, answer, choices = SKILLS[skill](rng)
    rng.shuffle(choices)
    return Question(asked, tuple(choices), choices.index(answer))


def questions(skill: str, seed: int, part: SkillSplit) -> Iterator[Question]:
    """Without end. A question is held out, or not, whatever the seed."""
    every = (question(skill, seed, number) for number in count())
    return (each for each in every if _is_held_out(each.text) == (part == "held-out"))


def rows(name: str, seed: int, count: int, part: SkillSplit = "train") -> list[Row]:
    """So many conversations of a skill: "skill:compare", or of all in turn: "skill:mixed"."""
    return [right(each) for each in islice(questions(skill_named(name), seed, part), count)]


def right(each: Question) -> Row:
    return chat(each.text, each.choices[each.answer])


def chat(asked: str, answer: str) -> Row:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}


def _is_held_out(asked: str) -> bool:
    return hashlib.blake2b(asked.encode(), digest_size=8).digest()[-1] % _HELD_OUT == 0


def skill_named(name: str) -> str:
    known = [PREFIX + skill for skill in (*SKILLS, MIXED)]
    if name not in known:
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise UserError(f"there is no built-in data {name!r}; the nearest is {nearest!r} of {', '.join(known)}")
    return name.removeprefix(PREFIX)


# -- their tasks -------------------------------------------------------------------------------------------------------

_TASK = """task: skill_{skill}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""


def write_tasks(folder: Path, seed: int, count: int) -> Path:
    """Held-out questions as tasks of lm-eval, so many of each, all different: skill_compare, ..., skill_mixed."""
    folder = absolute(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for skill in (*SKILLS, MIXED):
        file = folder / f"skill_{skill}.json"
        found, asked = dict[str, str](), questions(skill, seed, "held-out")
        while len(found) < count:
            each = next(asked)
            row = {"question": each.text, "choices": each.choices, "answer": each.answer}
            found.setdefault(each.text, json.dumps(row))
        _write(file, "".join(f"{line}\n" for line in found.values()))
        _write(file.with_suffix(".yaml"), _TASK.format(skill=skill, file=json.dumps(str(file))))
    return folder


def _write(file: Path, content: str) -> None:
    """What stands there already is left alone: datasets caches a file by its time."""
    if not file.exists() or file.read_text() != content:
        draft = file.with_name(f".{file.name}.{os.getpid()}")
        draft.write_text(content)
        draft.replace(file)
