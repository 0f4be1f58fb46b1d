"""The card of a model that comes from a run, README.md in its folder: which run that was, its digest, its curve."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fleet.digest import digest
from fleet.history import History
from fleet.places import of_hub, on_hub
from fleet.plain import several
from fleet.status import metrics_text
from train import loss_picture
from train.training_config import PRESETS, TrainConfig

CURVE = "curve.svg"
_TITLE = "## The run"


def complete(folder: Path, history: History) -> None:
    """Say which run it is of, at the end of what the card says already; a second time, in place of the first."""
    readme, curve = folder / "README.md", loss_picture.curve(history)
    card = readme.read_text(encoding="utf-8").partition(f"\n{_TITLE}\n")[0] if readme.is_file() else ""
    if curve:
        (folder / CURVE).write_bytes(curve)
    run = history.store.read("run.json")
    readme.write_text(f"{card.rstrip()}\n\n{of_run(history, run, card, bool(curve))}", encoding="utf-8")


def of_run(history: History, run: Mapping[str, Any], card: str, has_curve: bool) -> str:
    config, rounds = (
        run["config"],
        f"{several(max(0, history.first_open - 1), 'round')}{'' if history.over else ', and it goes on'}",
    )
    begun = f", begun by {run['code']}" if run.get("code") else ""
    parts = [
        _TITLE,
        f"`{config.get('algorithm')}`{begun}: {rounds}. Their digest, one number for all that was made "
        f"(`python -m fleet.digest`): `{digest(history)}`",
        *(
            f"On the test, {' and '.join(each.recipe.parents) or each.id}: {metrics_text(each.metrics)}"
            for each in _winners(history)
        ),
        f"![What was measured, round by round]({CURVE})" if has_curve else "",
        "" if "## Configuration" in card else f"```json\n{json.dumps(config, indent=2)}\n```",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _winners(history: History) -> list[Any]:
    last = history.round(history.first_open - 1) if history.first_open else []
    return [each for each in last if each and each.recipe.role == "winner"]


# -- of pre-training ---------------------------------------------------------------------------------------------------


def front(config: TrainConfig) -> str:
    """The fields that the hub reads."""
    named = [each for each in config.initial_population if isinstance(each, str) and each not in PRESETS]
    base = [id for id in dict.fromkeys(of_hub(each)[0] for each in named) if on_hub(id)]
    data = [each.source for each in config.datasets if on_hub(each.source)]
    fields = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": [config.algorithm],
        **({"base_model": base} if base else {}),
        **({"datasets": data} if data else {}),
    }
    return f"---\n{yaml.safe_dump(fields, sort_keys=False).strip()}\n---"


def data_of(config: TrainConfig, counts: Sequence[Mapping[str, Any]]) -> str:
    """Of each source: how many tokens there were to learn from, and how many were held out."""
    return "## Data\n\n" + "\n".join(_sources(config, counts))


def _sources(config: TrainConfig, counts: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    total = sum(each.weight for each in config.datasets)
    for source, each in zip(config.datasets, counts, strict=True):
        share = f", {source.weight / total:.0%} of what was learned from" if len(counts) > 1 else ""
        held = sum(value for key, value in each.items() if key in ("held", "validation", "test"))
        name = source.source if on_hub(source.source) else Path(source.source).name
        part = f" ({source.name})" if source.name else ""
        yield f"- `{name}`{part}: {each['train']:,} tokens to learn from, {held:,} held out{share}"
