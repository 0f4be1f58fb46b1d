"""The tables in docs/ say what the code says: they are made from it by `python -m tests.test_docs`."""

import ast
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import get_type_hints

import pytest
from pydantic import BaseModel

from evomerge.config import Configuration, EvaluationSettings, EvolutionSettings, MergeSettings, TaskSettings
from fleet import machines
from fleet.run_config import FleetConfig, allowed, table
from train import memory
from train.cluster.options import CheckpointOptions, HivemindOptions, TrainingOptions
from train.exchange_config import EvolutionSection, ExchangeSection
from train.own_loop_config import OwnLoopSection
from train.posttrain.posttrain_sections import (
    Adapter,
    BreedSection,
    DatasetSource,
    FitnessSection,
    MutationSection,
    Objective,
)
from train.rl.rl_config import Answering, Es, Grpo
from train.training_config import Dataset, GroupSection, TrainConfig, TrainSection

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
DOC = DOCS / "configuration.md"
TABLES = {
    "run": lambda: table([FleetConfig]),
    "machines": lambda: table([machines.Machine], spelled=str),
    "train": lambda: table([TrainSection]),
    "datasets": lambda: table([Dataset], spelled=str),
    "exchange": lambda: table([ExchangeSection]),
    "group": lambda: table([GroupSection]),
    "evolution": lambda: table([EvolutionSection]),
}
EVOMERGE = {
    "configuration": lambda: fields(Configuration),
    "merge_settings": lambda: fields(MergeSettings),
    "evolution_settings": lambda: fields(EvolutionSettings),
    "evaluation_settings": lambda: fields(EvaluationSettings),
    "tasks": lambda: fields(TaskSettings),
}
POSTTRAIN = {
    "breeding": lambda: table([BreedSection]),
    "fitness": lambda: table([FitnessSection]),
    "objective": lambda: table([Objective], spelled=str),
    "mutation": lambda: table([MutationSection]),
    "source": lambda: table([DatasetSource], spelled=str),
    "adapter": lambda: table([Adapter], spelled=str),
}
RL = {
    "answering": lambda: table([Answering], spelled=str),
    "grpo": lambda: table([Grpo], spelled=str),
    "es": lambda: table([Es], spelled=str),
}
FSDP = {
    "options": lambda: options(TrainingOptions),
    "ckpt": lambda: options(CheckpointOptions, "ckpt."),
    "hv": lambda: options(HivemindOptions, "hv."),
}
OWN_LOOP = {"own_loop": lambda: table([OwnLoopSection])}
GPUS = {"fits": lambda: memory.table(ROOT / "configs")}
MAP = {"files": lambda: the_map()}
PAGES = {
    DOCS / "map.md": MAP,
    DOCS / "gpus.md": GPUS,
    DOCS / "own-loop.md": OWN_LOOP,
    DOCS / "train_fsdp.md": FSDP,
    DOC: TABLES,
    DOCS / "evomerge.md": EVOMERGE,
    DOCS / "post-training.md": POSTTRAIN,
    DOCS / "rl.md": RL,
}
PLACE = r"(<!-- begin {name}: made by `make docs` -->\n).*?(<!-- end {name} -->)"


def fields(model: type[BaseModel]) -> str:
    """The keys of a record that people edit in a program."""
    lines = ["| key | default | allowed | what it is |", "|---|---|---|---|"]
    for key, field in model.model_fields.items():
        if field.description:
            default = "" if field.is_required() else f"`{json.dumps(field.get_default(call_default_factory=True))}`"
            lines.append(f"| `{key}` | {default} | {allowed(model, key)} | {field.description} |")
    return "\n".join(lines) + "\n"


def options(group: type, before: str = "") -> str:
    """Of a command line."""
    lines, made = ["| option | default | what it is |", "|---|---|---|"], group()
    for name, said in get_type_hints(group, include_extras=True).items():
        if about := getattr(said, "__metadata__", ()):
            value = getattr(made, name)
            default = "" if value in (None, []) else f"`{' '.join(value) if isinstance(value, list) else value}`"
            lines.append(f"| `--{before}{name.replace('_', '-')}` | {default} | {about[0].help} |")
    return "\n".join(lines) + "\n"


def the_map() -> str:
    """Every file of the project in its folder, with the first sentence that it says about itself."""
    files = [
        *ROOT.glob("*.py"),
        *(file for name in ("fleet", "merge", "train", "evomerge") for file in (ROOT / name).rglob("*.py")),
    ]
    lines = ["\n## At the top\n\n| file | what it is |\n|---|---|"]
    folder = ROOT
    for file in sorted(files, key=lambda file: (file.parent != ROOT, str(file.parent), file.name)):
        said = first_sentence(file)
        if file.parent != folder:
            folder = file.parent
            about = f"\n{said}\n" if file.name == "__init__.py" and said else ""
            lines.append(f"\n## {folder.relative_to(ROOT)}/\n{about}\n| file | what it is |\n|---|---|")
        if file.name != "__init__.py":
            assert said, f"{file}: says nothing about itself"
            lines.append(f"| `{file.name}` | {said.replace('|', chr(92) + '|')} |")
    return "\n".join(lines).lstrip("\n") + "\n"


def first_sentence(file: Path) -> str:
    first = " ".join((ast.get_docstring(ast.parse(file.read_text())) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s", first)[0].rstrip(":")


def renewed(page: Path, tables: dict[str, Callable[[], str]]) -> str:
    text = page.read_text()
    for name, rows in tables.items():
        place = re.compile(PLACE.format(name=name), re.S)
        if not place.search(text):
            raise SystemExit(f"{page}: the place of the table {name!r} is missing")
        text = place.sub(lambda found, rows=rows: f"{found[1]}{rows()}{found[2]}", text)
    return text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_tables_are_those_of_the_code(page):
    assert page.read_text() == renewed(page, PAGES[page]), "run `make docs`"


def test_every_key_stands_in_one_row():
    rows = re.findall(r"^\| `([A-Z0-9_]+)` \|", DOC.read_text(), re.M)
    found_out = {"stdlib_digest", "forked"}  # nobody writes them down
    assert sorted(rows) == sorted(key.upper() for key in TrainConfig.model_fields.keys() - found_out)


def test_every_key_of_a_dataset_and_a_machine_stands_in_one_row():
    rows = re.findall(r"^\| `([a-z_]+)` \|", DOC.read_text(), re.M)
    assert rows == [*Dataset.model_fields, *machines.Machine.model_fields]


if __name__ == "__main__":
    for page, tables in PAGES.items():
        page.write_text(renewed(page, tables))
