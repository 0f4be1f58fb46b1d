"""`python -m train.compare CONFIG`: EDT, DiLoCo, one machine with a small batch, synchronous training, side by side.

Each is a run of its own in one folder, on the same data and with as many tokens; the same command goes on with whatever
is not over. It ends with the page that `python -m fleet.report compare` draws.
"""

import json
import subprocess
import sys
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import count
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from fleet.errors import absolute
from fleet.help_pages import app
from fleet.history import History, opened
from fleet.host import Host
from fleet.plain import say
from fleet.run import create_run
from fleet.run_config import load
from train.command_line import run
from train.exchange_config import FOR_WEIGHTS
from train.training_commands import found_from, prepare
from train.training_config import USUAL_BETAS, TrainConfig

_ROOT = Path(__file__).resolve().parent.parent
PAGE = "compared.html"
# Of one model that never parts: it stays where its outer step finds it.
ONE_MODEL: Mapping[str, Any] = {
    "algorithm": "diloco", "population_size": 1, "outer_lr": 1.0, "outer_momentum": 0.0, "wire_dtype": "fp32",
    "error_feedback": False, "quorum": 1.0, "inner_optimizer_state": "exact", "overlap": 0, "fragments": 1,
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

    All have the configuration's learning rate; the best one differs between methods. With LR_SPREAD, EDT's members
    begin around it, and that of the fittest goes on.
    """
    where = config.absolute().parent
    wanted = found_from(load(config, TrainConfig), where)
    out = absolute(out or where / wanted.base_dir / "compared")
    told = cache(say)  # what is said of several runs once
    runs = {name: prepare(each, where, told) for name, each in variants(wanted, out).items()}
    out.mkdir(parents=True, exist_ok=True)
    if wanted.lr_spread > 1:
        say(f"EDT's members begin with rates {wanted.lr_spread:g} times apart, as LR_SPREAD says; all others have LR")
    for number, (name, each) in enumerate(runs.items(), 1):
        if _is_over(each, out):
            say(f"{number} of {len(runs)}: {name}, which is over")
            continue
        say(f"{number} of {len(runs)}: {name}")
        if code := _run(each, out, min(workers or each.num_machines, each.population_size)):
            return code
    page = [sys.executable, "-m", "fleet.report", "compare", *(str(out / name) for name in runs)]
    if code := subprocess.run([*page, "--out", str(out / PAGE)], cwd=_ROOT).returncode:
        return code
    say(*_table({name: opened(out / name) for name in runs}, runs), sep="\n")
    return 0


def _is_over(config: TrainConfig, out: Path) -> bool:
    """If it is the run of this very configuration, which is made sure of."""
    if not (out / config.project_name / "run.json").is_file():
        return False
    create_run(out, config.project_name, config.bound(), Host(), TrainConfig)
    return opened(out / config.project_name).over


def variants(config: TrainConfig, out: Path) -> dict[str, TrainConfig]:
    """The averaged model of all is evaluated after as many tokens."""
    slots, apart = config.population_size, config.model_copy(update={"base_dir": str(out), "average_every": 1})
    one = apart.model_copy(update=ONE_MODEL)
    evolves = {"algorithm": "edt", "wire_dtype": config.wire_dtype if config.wire_dtype in FOR_WEIGHTS else ""}
    found = {
        "edt": apart.model_copy(update={**evolves, "overlap": 0, "fragments": 1}),
        "diloco": apart.model_copy(update={"algorithm": "diloco"}),
        "small-batch": _one_by_one(one, slots),
        "synchronous": one.model_copy(update={"gradient_accumulation": config.gradient_accumulation * slots}),
    }
    return {name: each.model_copy(update={"project_name": name}) for name, each in found.items()}


def _one_by_one(config: TrainConfig, slots: int) -> TrainConfig:
    """All slots' batches one after the other, in rounds that are as long as theirs, or about so: the last of them ends
    with the last batch. AdamW's averages are those of small batches."""
    steps, first = config.total_steps * slots, config.first_inner_steps * slots
    about = min(config.inner_steps * slots, steps)
    keys = {"warmup_steps": config.warmup_steps * slots, "betas": config.betas or USUAL_BETAS}
    for length in (length for away in count() for length in {about + away, about - away} - {0}):
        more = {"inner_steps": length, "first_inner_steps": min(first, 10**7)}
        found = config.model_copy(update={**keys, **more})
        if (rounds := _rounds(found, steps)) and rounds <= 90_000:
            return found.model_copy(update={"max_generations": rounds})
    raise AssertionError


def _rounds(config: TrainConfig, steps: int) -> int:
    """After which so many steps are done; 0 if there are no such."""
    last = 1 + bisect_left(range(1, steps), steps, key=lambda round: config.steps_before(round + 1))
    return last if config.steps_before(last + 1) == steps and config.steps_in(last) == config.inner_steps else 0


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
    yield f"{'':12} {'tokens':>12} {'steps':>9} {'in a batch':>10} {'test loss':>14}"
    for name, history in found.items():
        c, last = configs[name], history.round(history.first_open - 1)
        batch = c.batch_size * c.gradient_accumulation
        loss = next(m.metrics["loss"] for m in last if m.recipe.role == "summary" and m)  # of all together
        yield f"{name:12} {c.sequences * c.seq_length:12,} {c.total_steps:9,} {batch:10,} {loss:14.4f}"


if __name__ == "__main__":
    run(app("python -m train.compare", compare.__doc__, _EXAMPLES, default_command=compare))
