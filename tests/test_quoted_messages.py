"""What docs/troubleshooting.md quotes is what the code says."""

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from fleet.host import Host
from fleet.run import create_run
from fleet.run_config import UserError, load
from tests.helpers import ROOT
from tests.pages import ALL, of, same
from train import text_sources
from train.training_config import Dataset, TrainConfig

LEAST = 15  # signs of a message that must stand in the code as they are
QUOTED = [line for block in of("troubleshooting.md", *dict.fromkeys(b.section for b in ALL)) if block.kind == "text"
          for line in block.text.splitlines()]  # fmt: skip


@cache
def written() -> list[re.Pattern[str]]:
    """Every text in the code that is long enough to be known again; what is filled in may be anything."""
    found = []
    files = [*ROOT.glob("*.py"), *(file for room in ("fleet", "train") for file in (ROOT / room).rglob("*.py"))]
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
        choices = [choices_of(part) for part in node.values] if isinstance(node, ast.JoinedStr) else [choices_of(node)]
        if sum(min(map(len, each)) for each in choices) >= LEAST:
            each = ("|".join(map(re.escape, some)) if any(some) else ".+" for some in choices)
            found.append(re.compile("".join(f"(?:{one})" for one in each)))
    return found


def choices_of(part: ast.AST) -> list[str]:
    """What may stand in this part of a text; an empty one where that cannot be known."""
    match part:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.FormattedValue(value=ast.IfExp(body=ast.Constant(str(one)), orelse=ast.Constant(str(other)))):
            return [one, other]
        case _:
            return [""]


def refusals(place: Path) -> Iterator[str]:
    """Messages that are put together from several places, as they are really said."""
    (place / "my-text.jsonl").write_text('{"title": "a", "body": "b"}\n')
    for said in ('{"POPULATON_SIZE": 8}', '{"POPULATION_SIZE": "8"}', '{\n  "POPULATION_SIZE": 8, // eight\n}'):
        (place / "evolution.json").write_text(said)
        yield refusal(lambda: load(place / "evolution.json", TrainConfig))
    yield refusal(lambda: text_sources.check(Dataset(source=str(place / "my-text.jsonl"))))
    create_run(place, "edt", {"lr": 0.002}, Host())
    yield refusal(lambda: create_run(place, "edt", {"lr": 0.001}, Host()))


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as error:
        call()
    return str(error.value)


def test_every_quoted_message_is_one_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "runs").mkdir()
    said = "\n".join(refusals(tmp_path)).replace(f"{tmp_path}/edt", "runs/edt").replace(f"{tmp_path}/", "")
    assert len(QUOTED) > 30
    for line in QUOTED:
        alike = (line, f"{line}\n  a command")  # which stands on a line of its own
        known = any(pattern.fullmatch(each) for pattern in written() for each in alike) or any(
            same(line, one) for one in said.splitlines()
        )
        assert known, f"troubleshooting.md quotes what nobody says: {line}"


@pytest.mark.parametrize("line", ["the disk is nearly full", "worker 1 was eaten; nobody takes its place", "New run x"])
def test_a_message_that_nobody_says_is_found_out(line):
    assert not any(pattern.fullmatch(line) for pattern in written())
