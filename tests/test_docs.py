"""docs/configuration.md says what the code says: its tables are made from it by `python -m tests.test_docs`."""

import json
import re
from pathlib import Path

from fleet import machines
from fleet.config import FleetConfig, load, table
from train.config import Dataset, EvolutionRoom, ExchangeRoom, TrainConfig, TrainRoom

DOC = Path(__file__).parent.parent / "docs" / "configuration.md"
TABLES = {
    "run": lambda: table([FleetConfig]),
    "machines": lambda: table([machines.Machine], spelled=str),
    "train": lambda: table([TrainRoom]),
    "datasets": lambda: table([Dataset], spelled=str),
    "exchange": lambda: table([ExchangeRoom]),
    "evolution": lambda: table([EvolutionRoom]),
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


def test_every_key_stands_in_one_row():
    rows = re.findall(r"^\| `([A-Z0-9_]+)` \|", DOC.read_text(), re.M)
    found_out = {"stdlib_digest"}  # nobody writes it down
    assert sorted(rows) == sorted(key.upper() for key in TrainConfig.model_fields.keys() - found_out)


def test_every_key_of_a_dataset_and_a_machine_stands_in_one_row():
    rows = re.findall(r"^\| `([a-z_]+)` \|", DOC.read_text(), re.M)
    assert rows == [*Dataset.model_fields, *machines.Machine.model_fields]


def test_the_examples_are_accepted(tmp_path):
    examples = re.findall(r"^```json\n(.*?)^```", DOC.read_text(), re.M | re.S)
    assert [type(json.loads(each)) for each in examples] == [dict, list]
    for each, file in zip(examples, ("evolution.json", "machines.json"), strict=True):
        (tmp_path / file).write_text(each)
    assert load(tmp_path / "evolution.json", TrainConfig) != TrainConfig()
    assert len(machines.load(tmp_path / "machines.json")) > 1


if __name__ == "__main__":
    DOC.write_text(renewed(DOC.read_text()))
