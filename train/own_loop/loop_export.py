"""A model that was trained in a loop of the user's own leaves its run: a state dict that his script loads, and where it
comes from."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fleet import launches
from fleet.history import History
from fleet.host import Host
from fleet.permissions import leaving
from fleet.plain import say
from fleet.run import open_run
from fleet.run_config import UserError
from fleet.status import metrics_text
from train.kept_rounds import files_of
from train.own_loop.own_runtime import MODEL
from train.own_loop.run_result import RunResult, result_of
from train.own_loop.state_tree import Unpacker
from train.own_loop_config import OwnLoopConfig
from train.recipe_arguments import FIRST
from train.vector_layout import VectorLayout

WEIGHTS = "model.safetensors"


def exported(run_dir: Path, what: str, out: Path) -> None:
    """Into a folder: `model.load_state_dict(safetensors.torch.load_file(...), strict=False)`."""
    store, run = open_run(run_dir, Host(), "export")
    c = OwnLoopConfig.joined(run["config"], launches.settings(store, launches.latest(store)))
    history = History(store)
    history.look_far()
    round, slot = what.split("-", 1) if re.fullmatch("[0-9]{1,5}-.+", what) else ("0", what)
    result = result_of(history, c, slot, int(round))
    about = json.loads(files_of(history, FIRST).read(MODEL))
    with leaving():
        try:
            out.mkdir(parents=True, exist_ok=True)
            save_file(state_dict(about, result), out / WEIGHTS, {"format": "pt"})
            (out / "README.md").write_text(_card(c, result, history), encoding="utf-8")
        except OSError as error:
            raise UserError(f"{out}: cannot be written: {error.strerror}") from None
    say(f"Exported: {out / WEIGHTS}", *_lines(result, history), sep="\n")
    for name in about.get("of_two_modes", ()):
        say(f"Note: these are the weights that {name} trains; your script's model has those of its eval mode, when the "
            "run is over.")  # fmt: skip
    if frozen := about["frozen"]:
        say(f"Without what was frozen ({len(frozen)} tensors, such as {next(iter(frozen))}), which your script has.")


def state_dict(about: Mapping[str, Any], result: RunResult) -> dict[str, Tensor]:
    """By all names that the user's own has, each in its kind of numbers."""
    there = dict(Unpacker({}).unpack(result.said.plain["counters"]))
    for kind, vector in (("parameters", result.weights), ("buffers", result.buffers)):
        shapes = {key: tuple(shape) for key, (_, shape) in about[kind].items()}
        views = VectorLayout(shapes, 0, (), 0).views(vector)
        there |= {key: views[key].to(getattr(torch, dtype)) for key, (dtype, _) in about[kind].items()}
    return {key: there[mine].clone().contiguous() for key, mine in about["names"].items()}


def _lines(result: RunResult, history: History) -> list[str]:
    return [f"- {each.id}: {metrics_text(each.metrics)}" for each in result.measured(history)]


def _card(c: OwnLoopConfig, result: RunResult, history: History) -> str:
    parts = (
        f"# {c.project_name}",
        f"Made by {c.algorithm} in a training loop of the user's own. `{WEIGHTS}` is a state dict.",
        "## Metrics\n\n" + "\n".join(_lines(result, history)),
        f"## Configuration\n\n```json\n{json.dumps(c.bound(), indent=2)}\n```",
    )
    return "\n\n".join(parts) + "\n"
