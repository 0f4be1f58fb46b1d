"""`python -m train.compare CONFIG`: EDT, DiLoCo, one machine with a small batch, synchronous training, side by side.

Each is a run of its own in one folder, on the same data and with as many tokens; the same command goes on with whatever
is not over. It ends with the page that `python -m fleet.report compare` draws.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from cyclopts.validators import Number

from fleet import faults
from fleet.config import UserError, load
from fleet.history import History, opened
from fleet.plain import say
from train.config import TrainConfig
from train.training_commands import prepared

_ROOT = Path(__file__).resolve().parent.parent
PAGE = "compared.html"
# Of one model that never parts: it stays where its outer step finds it.
ONE_MODEL: Mapping[str, Any] = {
    "algorithm": "diloco", "population_size": 1, "outer_lr": 1.0, "outer_momentum": 0.0, "wire_dtype": "fp32",
    "error_feedback": False, "quorum": 1.0, "inner_optimizer_state": "average",
}  # fmt: skip
_EXAMPLES = """Everything goes to runs/compared, beside the configuration file:

    python -m train.compare evolution.json

With three local workers, somewhere else:

    python -m train.compare evolution.json --workers 3 --out /mnt/shared/compared"""


def compare(
    config: Path,
    *,
    out: Annotated[Path | None, Parameter(help="The folder of all runs; BASE_DIR/compared by default.")] = None,
    workers: Annotated[
        int | None, Parameter(help="Local workers; NUM_MACHINES by default.", validator=Number(gte=1, lte=1024))
    ] = None,
) -> int:
    """Train by EDT, by DiLoCo, on one machine with one slot's small batch, and synchronously with all slots' batches as
    one, on the same data with as many tokens. Interrupted, the same command goes on.

    All have the configuration's learning rate; the best one differs between methods.
    """
    where, wanted = config.absolute().parent, load(config, TrainConfig)
    out = (out or where / wanted.base_dir / "compared").absolute()
    runs = {name: prepared(each, where) for name, each in variants(wanted, out).items()}
    out.mkdir(parents=True, exist_ok=True)
    for number, (name, each) in enumerate(runs.items(), 1):
        say(f"{number} of {len(runs)}: {name}")
        if code := _run(each, out, min(workers or each.num_machines, each.population_size)):
            return code
    page = [sys.executable, "-m", "fleet.report", "compare", *(str(out / name) for name in runs)]
    if code := subprocess.run([*page, "--out", str(out / PAGE)], cwd=_ROOT).returncode:
        return code
    say(*_table({name: opened(out / name) for name in runs}, runs), sep="\n")
    return 0


def variants(config: TrainConfig, out: Path) -> dict[str, TrainConfig]:
    """The averaged model of all is evaluated after as many tokens."""
    apart = {"base_dir": str(out), "average_every": 1}
    together = {
        "gradient_accumulation": config.gradient_accumulation * config.population_size,
        "project_name": "synchronous",
    }
    return {
        "edt": _changed(config, apart, algorithm="edt", project_name="edt"),
        "diloco": _changed(config, apart, algorithm="diloco", project_name="diloco"),
        "small-batch": _one_by_one(_changed(config, apart, **ONE_MODEL), config.population_size),
        "synchronous": _changed(config, apart, **ONE_MODEL, **together),
    }


def _one_by_one(config: TrainConfig, slots: int) -> TrainConfig:
    """All slots' batches one after the other, in rounds that are as long as theirs, or about so: the last of them ends
    with the last batch."""
    steps, name = config.total_steps * slots, "small-batch"
    first, about = config.first_inner_steps * slots, min(config.inner_steps * slots, steps)
    for away in count():
        for length in {about + away, about - away} - {0}:
            more = {"inner_steps": length, "first_inner_steps": min(first, 10**7), "project_name": name}
            found = _changed(config, more, warmup_steps=config.warmup_steps * slots)
            if (rounds := _rounds(found, steps)) and rounds <= 90_000:
                return _changed(found, {"max_generations": rounds})
    raise AssertionError


def _rounds(config: TrainConfig, steps: int) -> int:
    """After which so many steps are done; 0 if there are no such."""
    low, high = 1, steps
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if config.steps_before(middle + 1) < steps else (low, middle)
    return low if config.steps_before(low + 1) == steps and config.steps_in(low) == config.inner_steps else 0


def _changed(config: TrainConfig, keys: Mapping[str, Any], **more: Any) -> TrainConfig:
    return config.model_copy(update={**keys, **more})


def _run(config: TrainConfig, out: Path, workers: int) -> int:
    """By the method's own script, as if somebody had called it."""
    file = out / f"{config.project_name}.json"
    file.write_text(json.dumps(config.model_dump(mode="json", exclude_defaults=True), indent=2) + "\n")
    script = _ROOT / f"{config.algorithm}.py"
    command = [sys.executable, str(script), "--config", str(file), "--workers", str(workers)]
    with subprocess.Popen(command) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # which it has heard, too, and ends well
                continue


def _table(found: Mapping[str, History], configs: Mapping[str, TrainConfig]) -> Iterator[str]:
    yield f"{'':12} {'tokens':>12} {'steps':>9} {'in a batch':>10} {'held-out loss':>14}"
    for name, history in found.items():
        c = configs[name]
        batch = c.batch_size * c.gradient_accumulation
        yield f"{name:12} {c.sequences * c.seq_length:12,} {c.total_steps:9,} {batch:10,} {last_loss(history):14.4f}"


def last_loss(history: History) -> float:
    """Of the model that all members are together, at the end."""
    losses = (m.metrics["loss"] for m in history.round(history.first - 1) if m.recipe.role == "summary" and m)
    return float(next(losses))


if __name__ == "__main__":
    try:
        app = App(name="python -m train.compare", help_epilogue=_EXAMPLES, version_flags=[], default_command=compare)
        raise SystemExit(app(result_action="return_value"))
    except (UserError, faults.Fault) as error:
        say(error, file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
