"""Search for the best merge: recipes that CMA-ES proposes, scored by lm-eval's tasks.

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
import os
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Group, Parameter
from cyclopts.validators import Number

from fleet import faults, gpus
from fleet.config import Metrics, UserError
from fleet.errors import absolute
from fleet.metrics import sinks
from fleet.plain import say
from fleet.start import main as fleet_main
from merge.evolve import search_config as configs
from merge.evolve import search_running
from merge.evolve.search_config import SearchConfig
from merge.evolve.search_method import ALGORITHM, METHOD

_WORKER = ("--worker", "--make", "--sink")  # the same module is also a worker of a run

_SEARCH, _WHERE = Group("Search", sort_key=1), Group("Where candidates are made", sort_key=2)
_HOW, _AFTER = Group("How they are made and scored", sort_key=3), Group("Results", sort_key=4)
_FLAG: dict[str, Any] = {"negative": ""}

app = App(name="python -m merge.evolve", help=__doc__, help_format="plaintext", version_flags=[])


@Parameter(name="*")
@dataclass(frozen=True)
class Searching:
    max_fevals: Annotated[int, Parameter(group=_SEARCH, validator=Number(gte=1))] = 100
    "Candidates, at most."
    sigma0: Annotated[float, Parameter(group=_SEARCH, validator=Number(gt=0))] = 1 / 6
    "How far the first candidates scatter."
    population_size: Annotated[int | None, Parameter(group=_SEARCH, validator=Number(gte=3))] = None
    "Candidates of a generation; 4 + 3 ln(coordinates) by default."
    timeout: Annotated[float | None, Parameter(group=_SEARCH, validator=Number(gt=0))] = None
    "Seconds after which the search is over, wherever it has got to."
    random_seed: Annotated[int, Parameter(group=_SEARCH, validator=Number(gte=0))] = 0
    "Of the points, of shuffled questions, and of what is held out."
    race: Annotated[bool, Parameter(group=_SEARCH, **_FLAG)] = False
    "Ask eighths, quarters and halves of the questions first, and give up on candidates that fall far behind the best."
    holdout: Annotated[float, Parameter(group=_SEARCH, validator=Number(gte=0, lt=1))] = 0.0
    "Keep this share of the questions for the end, to judge the winner by."


@Parameter(name="*")
@dataclass(frozen=True)
class Placed:
    strategy: Annotated[Literal["pool", "buffered", "serial", "fleet"] | None, Parameter(group=_WHERE)] = None
    """fleet: processes here, or on --machines. On Ray: pool, an actor for each device; buffered, an actor that merges
    ahead to disk while others score; serial, each candidate merged to disk and scored in one placement group. By
    default pool if Ray is installed, else fleet."""
    workers: Annotated[int | None, Parameter(group=_WHERE, validator=Number(gte=1, lte=1024))] = None
    "Candidates at a time; by default one for each GPU, or for each --threads processors."
    machines: Annotated[Path | None, Parameter(group=_WHERE)] = None
    "Machines that share the disk of --storage-path: a machines.json, as launch_to_machines.py reads it."
    ssh_config: Annotated[Path | None, Parameter(group=_WHERE)] = None
    "For --machines: another SSH client configuration than ~/.ssh/config."
    num_gpus: Annotated[int | None, Parameter(group=_WHERE, validator=Number(gte=0))] = None
    "How many GPUs to use; all by default."
    threads: Annotated[int, Parameter(group=_WHERE, validator=Number(gte=1))] = 1
    "Of one worker, on CPUs."
    ray_address: Annotated[str, Parameter(group=_WHERE)] = ""
    "A Ray cluster to join; by default a local one is started."


@Parameter(name="*")
@dataclass(frozen=True)
class CandidateFlags:
    in_memory: Annotated[bool, Parameter(group=_HOW)] = True
    "Build candidates in a model that stays in memory, instead of folders."
    merge_cuda: Annotated[bool, Parameter(group=_HOW, **_FLAG)] = False
    "Merge on the GPU."
    batch_size: Annotated[str, Parameter(group=_HOW)] = "auto"
    "Requests at a time, or auto."
    task_search_path: Annotated[tuple[Path, ...], Parameter(group=_HOW)] = ()
    "A folder with tasks of one's own; may be given several times."
    allow_benchmark_tasks: Annotated[
        bool,
        Parameter(
            name=["--allow-benchmark-tasks", "--i-understand-the-depths-of-the-evils-i-am-unleashing"],
            group=_HOW,
            **_FLAG,
        ),
    ] = False
    "Let lm-eval's own tasks be the target: public test sets, whose scores mean nothing afterwards."
    load_in_8bit: Annotated[bool, Parameter(group=_HOW, **_FLAG)] = False
    "Score candidates in 8 bits (bitsandbytes, on a GPU)."
    load_in_4bit: Annotated[bool, Parameter(group=_HOW, **_FLAG)] = False
    "Score candidates in 4 bits (bitsandbytes, on a GPU)."
    vllm: Annotated[bool, Parameter(group=_HOW, **_FLAG)] = False
    "Let candidates answer in vLLM."
    reshard: Annotated[bool, Parameter(group=_HOW, **_FLAG)] = False
    "Copy each model into one file below the storage path first: quicker where models lie on a slow disk."
    trust_remote_code: Annotated[bool, Parameter(group=_HOW, **_FLAG)] = False
    "Let models run code of their own."


@Parameter(name="*")
@dataclass(frozen=True)
class Kept:
    save_final_model: Annotated[bool, Parameter(group=_AFTER, **_FLAG)] = False
    "Merge the winner into final_model."
    metrics: Annotated[tuple[Metrics, ...], Parameter(group=_AFTER, **_FLAG)] = ("csv",)
    "Where scores go besides the table: tensorboard, wandb, trackio; may be given several times."
    wandb: Annotated[bool, Parameter(group=_AFTER, **_FLAG)] = False
    "Report to Weights & Biases: the same as --metrics wandb."
    wandb_project: Annotated[str, Parameter(group=_AFTER)] = ""
    "Its project there; by default WANDB_PROJECT in the environment, or merge-search."
    wandb_entity: Annotated[str, Parameter(group=_AFTER)] = ""
    "Its owner there."


@app.default
def main(
    genome_config_path: Path,
    *,
    storage_path: Path,
    searching: Searching = Searching(),
    placed: Placed = Placed(),
    made: CandidateFlags = CandidateFlags(),
    kept: Kept = Kept(),
) -> int:
    """Search.

    Parameters
    ----------
    genome_config_path:
        What is searched and scored, a YAML file.
    storage_path:
        The folder of the search; the same one goes on with it.
    """
    strategy = placed.strategy or ("pool" if _has("ray") and not placed.machines else "fleet")
    where = absolute(storage_path)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", where.name) or where.is_file():
        raise UserError(
            f"--storage-path {where}: a folder is expected, its name of up to 64 letters, digits, '.', '-', '_'"
        )
    _check(strategy, placed, made, kept)
    config = configs.read(genome_config_path, _options(where, strategy, searching, placed, made, kept))
    search_running.make_way(config, where)
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--storage-path {where}: cannot be made: {error.strerror}") from None
    if placed.machines:
        from fleet.remote.handed import hand_over

        code = hand_over(config, ("-m", "merge.evolve"), placed.machines, placed.ssh_config)
    elif strategy == "fleet":
        count = gpus.workers(placed.workers, placed.num_gpus, placed.threads)
        code = search_running.local(config, where, count, placed.num_gpus)
    else:
        from merge.evolve.search_on_ray import search

        count = gpus.workers(placed.workers, None, placed.threads)
        code = search(config, where, strategy, count, placed.num_gpus, placed.ray_address)
    return search_running.ended(config, where, kept.save_final_model) if search_running.over(where) else code


def _check(strategy: str, placed: Placed, made: CandidateFlags, kept: Kept) -> None:
    """Options that would have no effect, or need what is not here."""
    far, ray = bool(placed.machines), strategy != "fleet"
    vain = {
        "--machines": far and ray and f"it goes with --strategy fleet, not {strategy}",
        "--workers": far and placed.workers and "machines.json says how many each machine has",
        "--num-gpus": far and placed.num_gpus is not None and "machines.json names each machine's devices",
        "--ssh-config": placed.ssh_config and not far and "it is for --machines",
        "--ray-address": placed.ray_address and not ray and f"{strategy} knows no Ray",
        "--merge-cuda": made.merge_cuda and strategy == "buffered" and "who merges in buffered has no GPU",
        "--load-in-8bit": made.load_in_8bit and made.load_in_4bit and "with --load-in-4bit: one of them",
        "--vllm": made.vllm and (made.load_in_8bit or made.load_in_4bit) and "it reads no bitsandbytes models here",
    }
    for option, why in vain.items():
        if why:
            raise UserError(f"{option}: {why}")
    for module, wanted in (("vllm", made.vllm), ("bitsandbytes", made.load_in_8bit or made.load_in_4bit)):
        if wanted and not _has(module):
            raise UserError(f"this needs a package that is not here: {sys.executable} -m pip install {module}")
    if (placed.num_gpus or 0) > (there := len(gpus.visible())) and not placed.ray_address:
        raise UserError(f"--num-gpus is {placed.num_gpus}; here are {there}")
    here = not (far or placed.ray_address)
    if here and not gpus.visible() and (made.merge_cuda or made.vllm or made.load_in_8bit or made.load_in_4bit):
        raise UserError("--merge-cuda, --vllm, --load-in-8bit and --load-in-4bit need a GPU, and here is none")
    sinks.check(_metrics(kept))


def _metrics(kept: Kept) -> tuple[Metrics, ...]:
    more: tuple[Metrics, ...] = ("wandb",) if kept.wandb else ()
    return (*kept.metrics, *more)


def _options(
    where: Path, strategy: str, searching: Searching, placed: Placed, made: CandidateFlags, kept: Kept
) -> dict[str, Any]:
    """As keys of the configuration."""
    if made.batch_size != "auto" and not (made.batch_size.isdecimal() and int(made.batch_size)):
        raise UserError(f"--batch-size is {made.batch_size!r}; a whole number from 1, or auto")
    given = {**asdict(searching), **asdict(made), **asdict(kept)}
    return {key: each for key, each in given.items() if key in SearchConfig.model_fields} | {
        "population_size": searching.population_size or 0,
        "seed": searching.random_seed,
        "time_limit_hours": (searching.timeout or 0) / 3600,
        "threads": placed.threads,
        "in_memory": made.in_memory and strategy not in ("buffered", "serial"),
        "buffered": strategy == "buffered",
        "batch_size": 0 if made.batch_size == "auto" else int(made.batch_size),
        "task_path": tuple(str(absolute(folder)) for folder in made.task_search_path),
        "base_dir": str(where.parent),
        "project_name": where.name,
        "algorithm": ALGORITHM,
        "metrics": _metrics(kept),
    }


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def run() -> None:
    if any(word in _WORKER for word in sys.argv[1:]):
        fleet_main(METHOD)
    os.umask(0o077)
    try:
        sys.exit(app(result_action="return_value"))
    except (UserError, faults.Fault) as error:
        say(error, file=sys.stderr)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(2)


if __name__ == "__main__":
    run()
