"""The questions of an environment in one file: which are learned from, which only measure."""

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from fleet.run_config import UserError
from train.chat_examples import ChatWriter
from train.posttrain.example_rows import HELD
from train.posttrain.posttrain_config import PosttrainConfig
from train.posttrain.posttrain_sections import DatasetSource
from train.rl import environments
from train.rl.checkers import checked_question, whole_question
from train.splits import SPLITS, SplitName
from train.text_sources import Row, located

_LOOK = 20  # questions
_FEW = 20  # questions that decide who is fit, of which an error of 0.1 is left
_MOST = 1_000_000  # of one environment that a run keeps


@dataclass(frozen=True)
class QuestionRows:
    """Of one environment."""

    rows: Sequence[Row]
    parts: Mapping[SplitName, range]  # their numbers

    @classmethod
    def open(cls, path: Path) -> "QuestionRows":
        found = json.loads(gzip.decompress(path.read_bytes()))
        ends = [0]
        for count in found["parts"]:
            ends.append(ends[-1] + count)
        return cls(found["rows"], {part: range(ends[n], ends[n + 1]) for n, part in enumerate(SPLITS)})


def made_questions(
    c: PosttrainConfig, source: DatasetSource, tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[str, int], bytes]:
    """As many as the run can make use of, and what became of them. What is too long for a row is left out."""
    check = whole_question if c.of_answers.verifier else checked_question
    found = environments.questions_of(source, c.seed, wanted(c), c.holdout, check)
    writer, kept = ChatWriter(tokenizer), {part: list[Row]() for part in SPLITS}
    for row, part in zip(found.rows, found.parts, strict=True):
        if len(writer.prompt(row["prompt"])) + c.of_answers.max_tokens <= c.seq_length:
            kept[part].append(row)
    if missing := [part for part, rows in kept.items() if not rows]:
        raise UserError(
            f"environment {source.source}: none of its {len(found.rows)} questions is left for {missing[0]}: with "
            f"max_tokens {c.of_answers.max_tokens} they must fit into SEQ_LENGTH {c.seq_length}"
        )
    there = sum(map(len, kept.values()))
    told = {"rows": there, "held": there - len(kept["train"]), "cut": 0, "left_out": len(found.rows) - there}
    data = {"parts": [len(kept[part]) for part in SPLITS], "rows": [row for part in SPLITS for row in kept[part]]}
    return told, gzip.compress(json.dumps(data, separators=(",", ":")).encode(), 6, mtime=0)


def check_first_questions(c: PosttrainConfig, source: DatasetSource, tokenizer: PreTrainedTokenizerBase) -> None:
    """Before a run begins."""
    writer = ChatWriter(tokenizer)
    there = [*islice(environments.placed(source, c.seed, wanted(c)), _LOOK)]
    if len(there) < 3:
        raise UserError(f"environment {source.source}: {len(there)} questions in it; at least 3 are needed")
    prompts = [located(lambda row: writer.prompt(row["prompt"]), row, where) for where, row in there]
    shortest = min(map(len, prompts))
    if shortest + c.of_answers.max_tokens > c.seq_length:
        raise UserError(
            f"environment {source.source}: the shortest of its first questions has {shortest} tokens, and with "
            f"max_tokens {c.of_answers.max_tokens} it does not fit into SEQ_LENGTH {c.seq_length}"
        )
    if len(there) < _LOOK:  # that is all
        environments.sides_of(source, [row for _, row in there], c.holdout)


def few_held_out(c: PosttrainConfig, source: DatasetSource) -> str:
    """Of a file in which so few questions are held out that fitness is hardly more than chance."""
    if not source.is_file:
        return ""
    count = sum(1 for _ in islice(environments.placed(source, c.seed, wanted(c)), wanted(c)))
    held = HELD * count
    fit, test = (max(1, round(held * part)) for part in (1 - c.holdout, c.holdout))
    told = f"environment {Path(source.source).name}: of its {count} questions about {fit} decide who is fit"
    return f"{told}, and about {test} are the test: so few say little" if fit < _FEW else ""


def wanted(c: PosttrainConfig) -> int:
    """With so many no child is asked one twice."""
    return min(_MOST, max(1000, 2 * c.sft_examples) + 10 * c.questions)
