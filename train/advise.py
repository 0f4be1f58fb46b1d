"""What a run of pre-training comes to, and what to change: said before it is begun.

python -m train.advise evolution.json
python -m train.advise configs/150m.json --workers 8 --disk 110 --step 0.9
"""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.table import Table

from fleet import machines
from fleet.busy_notice import loading, saying
from fleet.console import console
from fleet.places import address, here, in_bucket
from fleet.plain import readable_bytes, say
from fleet.run_config import UserError, load
from fleet.single_command import command
from fleet.start import named
from train.auto_settings import resolve_auto
from train.training_commands import found_from
from train.training_config import TrainConfig

MOST_MEASURED = 300_000_000  # parameters of a model whose step is timed here unasked
_UNTRIED = "are too many to try on a CPU: give this command where the GPUs are, or say what a step takes, --step 0.9"
_INSTEAD = (
    "try it with MAX_GENERATIONS 1 and another PROJECT_NAME; from its first generation on a run says how much is left"
)


def advise(
    config: Path = Path("evolution.json"),
    *,
    workers: Annotated[int, Parameter(help="How many; those of --machines, or NUM_MACHINES, by default.")] = 0,
    machines_file: Annotated[Path | None, Parameter(name="--machines", help="The machines of the run.")] = None,
    step: Annotated[float, Parameter(help="Seconds of a step there; measured here by default.")] = 0.0,
    disk: Annotated[float, Parameter(help="MB/s of the shared disk; measured at BASE_DIR by default.")] = 0.0,
) -> None:
    """Say what a run of pre-training comes to, and what to change, without beginning it.

    For example:

        python -m train.advise configs/150m.json --workers 8 --disk 110 --step 0.9

    Nothing is made but a small file that tells how fast the disk is, and is gone at once.
    """
    where = config.absolute().parent
    if (algorithm := named(config) or "edt") not in ("edt", "diloco"):
        raise UserError(f"{config}: advice is there for pre-training (edt, diloco), not for {algorithm}: {_INSTEAD}")
    c = found_from(load(config, TrainConfig).model_copy(update={"algorithm": algorithm}), where)
    if in_bucket(base := here(Path(c.base_dir), where)) and not disk:
        raise UserError(f"{address(base)}: how fast a bucket is depends on where one is: say it, --disk 50")
    c = resolve_auto(c, where)
    workers = workers or (_seats(machines_file, c) if machines_file else c.num_machines)
    with loading("what tries a step", say):
        from train import forecast
        from train.learner import best_device
    sizes = forecast.sizes_of(c)
    if not step and sizes.parameters > MOST_MEASURED and best_device().type == "cpu":
        raise UserError(f"{sizes.parameters:,} parameters {_UNTRIED}")
    with saying("trying a step and the disk", say) if not (step and disk) else nullcontext():
        step_there = step or forecast.timed(c, sizes.longest)
        known = forecast.Circumstances(workers, step_there, disk * 1e6 or forecast.disk_speed(base))
    tried = f"tried here on {best_device().type} with THREADS {c.threads}, by one worker alone"
    basis = (
        f"a step of {forecast.seconds(known.step)}, {'as --step says' if step else tried}; "
        f"{readable_bytes(known.disk)}/s of the disk, {'as --disk says' if disk else 'tried at BASE_DIR'}"
    )
    f = forecast.Forecast(c, sizes, known)
    with saying("counting the tokens of its text", say):
        found = [*forecast.facts(f), ("basis", basis)]
        changes = [*forecast.advice(f)]
    show(found, changes)
    if not (step and disk):
        say("\nFor other machines: the same command there, or --step SECONDS and --disk MB/s.")


def _seats(file: Path, c: TrainConfig) -> int:
    there = ((each, each.devices_per_worker or c.devices_per_worker) for each in machines.load(file))
    return sum(len(each.devices) // devices or each.workers for each, devices in there)


def show(found: Sequence[tuple[str, str]], changes: Sequence[str]) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for row in found:
        table.add_row(*row)
    console().print(table)
    say("", *(f"- {line}" for line in changes) if changes else ("Nothing to change.",), sep="\n")


if __name__ == "__main__":
    command("train.advise", advise)
