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
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Group, Parameter
from cyclopts.validators import Number

from fleet import faults
from fleet.config import Wrong
from fleet.host import Host
from fleet.start import main as fleet_main
from merge.evolve import config as configs
from merge.evolve.config import SearchConfig
from merge.evolve.method import ALGORITHM, METHOD, configured

ROOT = Path(__file__).parents[2]
_WORKER = ("--worker", "--make")  # the same module is also a worker of a run

_SEARCH, _WHERE = Group("Search", sort_key=1), Group("Where candidates are made", sort_key=2)
_HOW, _AFTER = Group("How they are made and scored", sort_key=3), Group("Results", sort_key=4)
_FLAG: dict[str, Any] = {"negative": ""}

app = App(name="python -m merge.evolve", help=__doc__, help_format="plaintext", version_flags=[])


@Parameter(name="*")
@dataclass(frozen=True)
class Searching:
    max_fevals: Annotated[int, Parameter(group=_SEARCH, validator=Number(gte=1))] = 100
    "Candidates; the last generation is finished."
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
class Made:
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
    wandb: Annotated[bool, Parameter(group=_AFTER, **_FLAG)] = False
    "Report to Weights & Biases."
    wandb_project: Annotated[str, Parameter(group=_AFTER)] = "merge-search"
    "Its project there."
    wandb_entity: Annotated[str, Parameter(group=_AFTER)] = ""
    "Its owner there."


@app.default
def main(
    genome_config_path: Path,
    *,
    storage_path: Path,
    searching: Searching = Searching(),
    placed: Placed = Placed(),
    made: Made = Made(),
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
    where = storage_path.expanduser().resolve()
    config = configs.read(genome_config_path, _options(where, searching, placed, made, kept))
    if placed.machines and strategy != "fleet":
        raise Wrong(f"--machines goes with --strategy fleet, not {strategy}")
    if strategy in ("buffered", "serial"):  # both merge to disk
        config = config.model_copy(update={"in_memory": False, "buffered": strategy == "buffered"})
    if strategy != "fleet":
        from merge.evolve.on_ray import search

        _make_way(config, where)
        where.parent.mkdir(parents=True, exist_ok=True)
        seats = placed.workers or _workers(placed)
        code = search(config, where, strategy, seats, placed.num_gpus, placed.ray_address)
    elif placed.machines:
        code = _launched(config, where, placed.machines, placed.ssh_config)
    else:
        code = _local(config, where, placed)
    if code == 1 and _out_of_time(where):
        code = 0
    return code or _finished(config, where, kept)


def _options(where: Path, searching: Searching, placed: Placed, made: Made, kept: Kept) -> dict[str, Any]:
    """As keys of the configuration."""
    for module, option in (("vllm", made.vllm), ("bitsandbytes", made.load_in_8bit or made.load_in_4bit)):
        if option and not _has(module):
            raise Wrong(f"this needs a package that is not here: {sys.executable} -m pip install {module}")
    if kept.wandb and not _has("wandb"):
        raise Wrong(f"--wandb needs a package that is not here: {sys.executable} -m pip install wandb")
    if made.batch_size != "auto" and not (made.batch_size.isdigit() and int(made.batch_size)):
        raise Wrong(f"--batch-size is {made.batch_size!r}; a whole number from 1, or auto")
    shared = ("max_fevals", "sigma0", "race", "holdout")
    return {
        **{key: getattr(searching, key) for key in shared},
        **{key: getattr(made, key) for key in ("in_memory", "merge_cuda", "load_in_8bit", "load_in_4bit", "vllm")},
        **{key: getattr(made, key) for key in ("reshard", "trust_remote_code", "allow_benchmark_tasks")},
        **{key: getattr(kept, key) for key in ("wandb", "wandb_project", "wandb_entity")},
        **{"population_size": searching.population_size or 0, "seed": searching.random_seed},
        **{"time_limit_hours": (searching.timeout or 0) / 3600, "threads": placed.threads},
        "batch_size": 0 if made.batch_size == "auto" else int(made.batch_size),
        "task_path": tuple(str(folder.expanduser().resolve()) for folder in made.task_search_path),
        "base_dir": str(where.parent),
        "project_name": where.name,
        "algorithm": ALGORITHM,
    }


def _local(config: SearchConfig, where: Path, placed: Placed) -> int:
    """Workers on this machine."""
    from fleet.local import Starter
    from merge.evolve.view import SearchView

    _make_way(config, where)
    where.parent.mkdir(parents=True, exist_ok=True)
    if placed.num_gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(placed.num_gpus)))
    return Starter(config, where.parent, placed.workers or _workers(placed), SearchView).run()


def _launched(config: SearchConfig, where: Path, machines: Path, ssh_config: Path | None) -> int:
    """Workers on other machines, which go on when this command ends; `launch_to_machines.py` knows them by the file."""
    from fleet.remote.commands import main as launcher

    _make_way(config, where)
    where.parent.mkdir(parents=True, exist_ok=True)
    file = where.parent / f"{where.name}.search.json"
    file.write_text(configured(config))
    words = ["launch", "--config", str(file), "--machines", str(machines)]
    words += ["--ssh-config", str(ssh_config)] if ssh_config else []
    try:
        launcher({ALGORITHM: ("-m", "merge.evolve")}, ROOT, __doc__ or "", words)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def _workers(placed: Placed) -> int:
    gpus = _gpus() if placed.num_gpus is None else placed.num_gpus
    return gpus or max(1, len(os.sched_getaffinity(0)) // placed.threads)


def _gpus() -> int:
    """Without torch, which takes seconds to load."""
    return len([path for path in Path("/dev").glob("nvidia[0-9]*")])


def _make_way(config: SearchConfig, where: Path) -> None:
    """A search that never got past its first look holds nothing: another one may take its place."""
    from fleet.run import NoRun, open_run

    try:
        store, run = open_run(where, Host(), "starter-look")
    except NoRun:
        return
    checked = any(name.startswith("check.") and name.endswith(".done") for name in store.names("rounds/00000"))
    if run["config"] != config.bound() and not checked:
        shutil.rmtree(where)


def _out_of_time(where: Path) -> bool:
    from fleet import launches
    from fleet.run import open_run

    return launches.ended(open_run(where, Host(), "starter-look")[0])


def _finished(config: SearchConfig, where: Path, kept: Kept) -> int:
    from rich.console import Console

    from merge.evolve import records, view

    found = records.found_in(where, config)
    (where / records.PICTURE).write_bytes(records.picture(found))
    Console().print(view.table_of(found))
    print(*view.summary(found), sep="\n")
    if not found.best:
        return 1
    print(f"Its recipe: {where / records.BEST}")
    if kept.save_final_model:
        from merge.merging import merge

        merge(where / records.BEST, where / "final_model", overwrite=True)
        print(f"The model: {where / 'final_model'}")
    return 0


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def run() -> None:
    if any(word in _WORKER for word in sys.argv[1:]):
        fleet_main(METHOD)
    os.umask(0o077)
    try:
        sys.exit(app(result_action="return_value"))
    except (Wrong, faults.Fault) as error:
        print(error, file=sys.stderr)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(2)


if __name__ == "__main__":
    run()
