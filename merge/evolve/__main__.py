"""Search for the best merge: recipes that CMA-ES proposes, scored by lm-eval's tasks.

For example:

    python -m merge.evolve genome.yml --storage-path searches/mine --task-search-path my-tasks
    python -m merge.evolve genome.yml --storage-path searches/mine --max-fevals 200 --holdout 0.3 --save-final-model
    python -m merge.evolve genome.yml --storage-path /nfs/search --machines machines.json
    python -m merge.evolve genome.yml --storage-path searches/mine --strategy pool --num-gpus 4

genome.yml says what is searched and what is scored:

    genome:
      models: [org/math-model, org/code-model, ./my-model]
      base_model: org/base
      merge_method: ties
      layer_granularity: 8        # so many layers share their parameters
    tasks:
      - my_task                   # its acc,none
      - {name: other_task, metric: "perplexity,none", weight: -0.1}
    limit: 200

Ctrl-C ends it well; the same command goes on. docs/merge-search.md explains everything.
"""

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from fleet import gpus, help_pages
from fleet.errors import absolute, refuse
from fleet.method import Method
from fleet.metrics import sinks
from fleet.places import address
from fleet.run_config import UserError
from merge.evolve import search_config
from merge.search import search_command
from merge.search.search_command import flags, folder_named, given, make_parents

_SEARCH, _WHERE = Group("Search", sort_key=1), Group("Where candidates are made", sort_key=2)
_HOW, _AFTER = Group("How they are made and scored", sort_key=3), Group("Results", sort_key=4)
_EVILS = ("--allow-benchmark-tasks", "--i-understand-the-depths-of-the-evils-i-am-unleashing")
_QUANTIZED = ("load_in_8bit", "load_in_4bit")

_STRATEGIES = (
    "fleet: processes here, or on --machines. On Ray: pool, an actor for each device; buffered, an actor that merges "
    "ahead to disk while others score; serial, each candidate merged to disk and scored in one placement group. By "
    "default pool if Ray is installed, else fleet."
)

app = help_pages.app("python -m merge.evolve", __doc__)

if TYPE_CHECKING:
    Keys = Any
else:
    Keys = flags(
        {
            _SEARCH: {
                **dict.fromkeys(("max_fevals", "sigma0", "population_size", "holdout")),
                **dict.fromkeys(("fitness_from", "fitness_questions")),
                "seed": "--random-seed",
            },
            _WHERE: {"threads": None},
            _HOW: {
                **dict.fromkeys((*("in_memory", "merge_cuda", "vllm", "reshard", "trust_remote_code"), *_QUANTIZED)),
                "task_path": "--task-search-path",
                "allow_benchmark_tasks": _EVILS,
            },
            _AFTER: dict.fromkeys(("metrics", "wandb_project", "wandb_entity")),
        },
        search_config.SearchConfig,
    )


@Parameter(name="*")
@dataclass(frozen=True)
class Placed:
    strategy: Annotated[
        Literal["pool", "buffered", "serial", "fleet"] | None, Parameter(group=_WHERE, help=_STRATEGIES)
    ] = None
    workers: Annotated[int | None, Parameter(group=_WHERE, validator=Number(gte=1, lte=1024))] = None
    "Candidates at a time; by default one for each GPU, or for each --threads processors."
    machines: Annotated[Path | None, Parameter(group=_WHERE)] = None
    "Machines that share the disk of --storage-path: a machines.json, as launch_to_machines.py reads it."
    ssh_config: Annotated[Path | None, Parameter(group=_WHERE)] = None
    "For --machines: another SSH client configuration than ~/.ssh/config."
    num_gpus: Annotated[int | None, Parameter(group=_WHERE, validator=Number(gte=0))] = None
    "How many GPUs to use; all by default."
    ray_address: Annotated[str, Parameter(group=_WHERE)] = ""
    "A Ray cluster to join; by default a local one is started."


@app.default
def main(
    genome_config_path: Path,
    *,
    storage_path: Path,
    keys: Keys = Keys(),
    placed: Placed = Placed(),
    timeout: Annotated[float, Parameter(group=_SEARCH, validator=Number(gte=0), show_default=False)] = 0.0,
    batch_size: Annotated[str, Parameter(group=_HOW)] = "auto",
    save_final_model: Annotated[bool, Parameter(group=_AFTER, negative="")] = False,
    wandb: Annotated[bool, Parameter(group=_AFTER, negative="")] = False,
    race: Annotated[bool, Parameter(group=_SEARCH, negative="")] = False,
) -> int:
    """Search.

    Parameters
    ----------
    genome_config_path:
        What is searched and scored, a YAML file.
    storage_path:
        The folder of the search; the same one goes on with it.
    timeout:
        Seconds after which the search is over, wherever it has got to.
    batch_size:
        Requests at a time, or auto.
    save_final_model:
        Merge the winner into final_model.
    wandb:
        Report to Weights & Biases: the same as --metrics wandb.
    race:
        The same as --fitness-from racing.
    """
    strategy = placed.strategy or ("pool" if _has("ray") and not placed.machines else "fleet")
    if batch_size != "auto" and not (batch_size.isdecimal() and int(batch_size)):
        raise UserError(f"--batch-size is {batch_size!r}; a whole number from 1, or auto")
    where, known = folder_named(storage_path, "--storage-path"), given(keys)
    known |= {"time_limit_hours": timeout / 3600, "batch_size": 0 if batch_size == "auto" else int(batch_size)}
    known |= {"buffered": strategy == "buffered", "in_memory": known.get("in_memory", True) and strategy in _LIVE}
    known["metrics"] = (*known.get("metrics", ("csv",)), *(("wandb",) if wandb else ()))
    if race:
        refuse([(known.setdefault("fitness_from", "racing") != "racing", "--race: it is --fitness-from racing")])
    known["task_path"] = tuple(str(absolute(Path(each))) for each in known.get("task_path", ()))
    run = {"base_dir": address(where.parent), "project_name": where.name, "algorithm": search_config.ALGORITHM}
    config = search_config.read(genome_config_path, {**known, **run})
    _check(config, strategy, placed)
    from merge.evolve import search_running  # no refusal waits for it

    make_parents(where, "--storage-path")
    search_running.make_way(config, where)
    code = _started(config, where, strategy, placed)
    return search_running.ended(where, save_final_model) if search_running.over(where) else code


_LIVE = ("pool", "fleet")  # strategies whose candidates need no folder


def _started(config: search_config.SearchConfig, where: Path, strategy: str, placed: Placed) -> int:
    """How it ended."""
    if placed.machines:
        from fleet.remote.hand_over import hand_over

        return hand_over(config, ("-m", "merge.evolve"), placed.machines, placed.ssh_config)
    if strategy == "fleet":
        from merge.evolve import search_running

        count = gpus.workers(placed.workers, placed.num_gpus, config.threads)
        return search_running.local(config, where, count, placed.num_gpus)
    from merge.evolve.search_on_ray import search

    count = gpus.workers(placed.workers, None, config.threads)
    return search(config, where, strategy, count, placed.num_gpus, placed.ray_address)


def _check(config: search_config.SearchConfig, strategy: str, placed: Placed) -> None:
    """Options that would have no effect, or need what is not here."""
    far, ray = bool(placed.machines), strategy != "fleet"
    vain: dict[str, object] = {
        "--machines": far and ray and f"it goes with --strategy fleet, not {strategy}",
        "--workers": far and placed.workers and "machines.json says how many each machine has",
        "--num-gpus": far and placed.num_gpus is not None and "machines.json names each machine's devices",
        "--ssh-config": placed.ssh_config and not far and "it is for --machines",
        "--ray-address": placed.ray_address and not ray and f"{strategy} knows no Ray",
        "--merge-cuda": config.merge_cuda and strategy == "buffered" and "who merges in buffered has no GPU",
        "--load-in-8bit": config.load_in_8bit and config.load_in_4bit and "with --load-in-4bit: one of them",
        "--vllm": config.vllm and config.quantized and "it reads no bitsandbytes models here",
    }
    refuse((why, f"{option}: {why}") for option, why in vain.items())
    for module, wanted in (("vllm", config.vllm), ("bitsandbytes", config.quantized)):
        if wanted and not _has(module):
            raise UserError(f"this needs a package that is not here: {sys.executable} -m pip install {module}")
    there, here = len(gpus.visible()), not (far or placed.ray_address)
    refuse(
        [
            (
                (placed.num_gpus or 0) > there and not placed.ray_address,
                f"--num-gpus is {placed.num_gpus}; here are {there}",
            ),
            (
                here and not there and (config.merge_cuda or config.vllm or config.quantized),
                "--merge-cuda, --vllm, --load-in-8bit and --load-in-4bit need a GPU, and here is none",
            ),
        ]
    )
    sinks.check(config.metrics)


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _method() -> Method[Any]:
    from merge.evolve.search_method import METHOD

    return METHOD


def run() -> None:
    search_command.run(app, _method)


if __name__ == "__main__":
    run()
