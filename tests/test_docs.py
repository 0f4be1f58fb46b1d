"""docs/configuration.md says what the code says: its tables are made from it by `python -m tests.test_docs`."""

import json
import re
from pathlib import Path

import pytest

from fleet import machines
from fleet.config import FleetConfig, load, table
from tests.toy.config import ToyConfig, ToyRoom

DOC = Path(__file__).parent.parent / "docs" / "configuration.md"
TABLES = {
    "run": lambda: table([FleetConfig]),
    "machines": lambda: table([machines.Machine], spelled=str),
    "toy": lambda: table([ToyRoom, ToyConfig]),
}
PLACE = r"(<!-- begin {name}: made by `make docs` -->\n).*?(<!-- end {name} -->)"


def renewed(text: str) -> str:
    for name, rows in TABLES.items():
        place = re.compile(PLACE.format(name=name), re.S)
        if not place.search(text):
            raise SystemExit(f"{DOC}: the place of the table {name!r} is missing")
        text = place.sub(lambda found, rows=rows: f"{found[1]}{rows()}{found[2]}", text)
    return text


def test_the_tables_are_those_of_the_code():
    assert DOC.read_text() == renewed(DOC.read_text()), "run `make docs`"


@pytest.mark.parametrize("room", [ToyConfig])
def test_every_key_stands_in_one_row(room):
    rows = re.findall(r"^\| `([A-Z_]+)` \|", DOC.read_text(), re.M)
    assert {*rows} == {key.upper() for key in room.model_fields}
    assert {key for key in rows if rows.count(key) > 1} == {"ALGORITHM"}  # the toys' own names for it


def test_every_machine_key_stands_in_one_row():
    rows = re.findall(r"^\| `([a-z_]+)` \|", DOC.read_text(), re.M)
    assert rows == [*machines.Machine.model_fields]


def test_the_examples_are_accepted(tmp_path):
    examples = re.findall(r"^```json\n(.*?)^```", DOC.read_text(), re.M | re.S)
    assert [type(json.loads(each)) for each in examples] == [dict, list]
    for each, file in zip(examples, ("evolution.json", "machines.json"), strict=True):
        (tmp_path / file).write_text(each)
    assert load(tmp_path / "evolution.json", ToyConfig) != ToyConfig()
    assert len(machines.load(tmp_path / "machines.json")) > 1


if __name__ == "__main__":
    DOC.write_text(renewed(DOC.read_text()))
