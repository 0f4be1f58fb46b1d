"""Every key of the toy's configuration is turned, and changes what it should change: no more and no less.

A bound key changes the run's digest, or has an effect of its own below. An operational one has its effect, and may
change between two launches of a run, which still ends with the same bytes.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from fleet import launches, planning, processes, strictjson
from fleet.claims import Claims, Watch
from fleet.context import Stopped
from fleet.digest import digest
from fleet.history import History
from fleet.host import Host
from fleet.remote.code import pack
from fleet.remote.launcher import Launcher, place
from fleet.run import create_run, open_run
from fleet.run_config import UserError, is_bound
from fleet.worker import Worker
from tests import sinks
from tests.helpers import listing
from tests.toy.config import ToyConfig
from tests.toy.maker import maker
from tests.toy.strategies import strategy

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Turn:
    """What a key is turned to, and the circumstances in which it matters."""

    to: Any
    given: dict[str, Any] = field(default_factory=dict)


RANK, DILOCO, SEARCH = {"algorithm": "rank"}, {"algorithm": "diloco"}, {"algorithm": "search"}
BOUND = {
    "algorithm": Turn("rank"),
    "project_name": Turn("other"),
    "seed": Turn(2),
    "population_size": Turn(6),
    "max_generations": Turn(4),
    "threads": Turn(3),
    "quorum": Turn(0.5),
    "grace_seconds": Turn(900.0, {"quorum": 0.5}),
    "initial_population": Turn((7, 8)),
    "inner_steps": Turn(6),
    "size": Turn(64),
    "shards": Turn(2, DILOCO),
    "eval_batch_size": Turn(7),
    "outer_lr": Turn(0.5),
    "outer_momentum": Turn(0.5),
    "outer_nesterov": Turn(False),
    "mutation_probability": Turn(0.0, RANK),
    "mutation_strength": Turn(0.6, RANK),
    "elitism": Turn(1, RANK),
    "cliff": Turn(2.0, SEARCH),
}
OPERATIONAL = {
    "base_dir": Turn("elsewhere"),
    "num_machines": Turn(3),
    "snapshot_minutes": Turn(1.0),
    "dead_seconds": Turn(500.0),
    "poll_seconds": Turn(7.0),
    "disk_lane": Turn(True, {"algorithm": "diloco"}),
    "backup_factor": Turn(2.0),
    "time_limit_hours": Turn(0.5),
    "restarts": Turn(1),
    "keep_every": Turn(3),
    "log_level": Turn("WARNING"),
    "metrics": Turn(("tensorboard",)),
    "wandb_project": Turn("mine"),
    "wandb_entity": Turn("ours"),
    "local_package": Turn("mine"),
    "group_readable": Turn(True),
    "sleep": Turn(600.0),
}
TURNS = BOUND | OPERATIONAL


class Clock(Host):
    """This machine, but time passes only where somebody sleeps; then it passes at once."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.naps = 0.0, [0.0]

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        self.naps.append(seconds)

    def background(self, function: Any) -> None:
        """No pulse: nobody else is there to hear it."""


@pytest.fixture(autouse=True)
def own_memory(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))


def config_of(**keys: Any) -> ToyConfig:
    return ToyConfig(**{"population_size": 4, "max_generations": 3, **keys})


def launch(base: Path, config: ToyConfig) -> tuple[Clock, Worker]:
    """Register a launch, as a starter does, and a worker of it that reads its configuration from the run."""
    store, _ = create_run(base, "run", config.bound(), Host())
    number = launches.begin(store, config.operational())
    clock = Clock()
    store, run = open_run(base / "run", clock, f"w{number}")
    config = ToyConfig.joined(run["config"], launches.settings(store, number))
    return clock, Worker(store, strategy(config), maker(config), processes.options(config, number))


def finished(base: Path, **keys: Any) -> History:
    """A whole run."""
    _, worker = launch(base, config_of(**keys))
    assert worker.run() == "over"
    return worker.history


def results(history: History) -> list[Any]:
    """What was made, whatever the plans say: metrics and bytes."""
    return [(m.id, m.absent, m.metrics, m.digests) for r in range(history.first_open) for m in history.round(r)]


# -- what each key changes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ToyConfig.model_fields)
def test_turning_a_key_changes_what_it_should(key, tmp_path):
    """A new key without an entry above fails here."""
    turn = TURNS[key]
    assert is_bound(ToyConfig, key) == (key in BOUND)
    if key in EFFECTS:
        EFFECTS[key](tmp_path, turn)
        return
    before, again = (finished(tmp_path / name, **turn.given) for name in ("before", "again"))
    after = finished(tmp_path / "after", **{**turn.given, key: turn.to})
    assert digest(before) == digest(again) != digest(after)
    assert results(before) == results(again) != results(after)


def toy(base: Path, environment: Mapping[str, str] = MappingProxyType({}), **keys: Any) -> Path:
    """The real thing: the toy's script, its configuration file and its workers."""
    base.mkdir()
    file = base / "evolution.json"
    file.write_text(json.dumps({"POPULATION_SIZE": 4, "MAX_GENERATIONS": 2, **keys}))
    command = [sys.executable, "-m", "tests.toy", "--config", str(file)]
    env = {**os.environ, **environment}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return base


def workers(run: Path) -> int:
    return len([*run.glob("workers/*.events")])


@cache
def usual(kind: Callable[..., Path]) -> Path:
    """Before any key was turned: made once for all keys."""
    return kind(Path(tempfile.mkdtemp(prefix="usual-")) / "a")


def alone(base: Path, **keys: Any) -> Path:
    return toy(base, **{"num_machines": 1, **keys})


def algorithm(tmp_path, turn):
    assert results(finished(tmp_path / "a")) != results(finished(tmp_path / "b", algorithm=turn.to))
    toy(tmp_path / "c", algorithm=turn.to, num_machines=1)
    assert (tmp_path / "c" / "runs" / turn.to / "run.json").is_file()  # its name is the project's


def project_name(tmp_path, turn):
    toy(tmp_path / "a", project_name=turn.to, num_machines=1)
    assert [each.name for each in (tmp_path / "a" / "runs").iterdir() if each.is_dir()] == [turn.to]


def base_dir(tmp_path, turn):
    toy(tmp_path / "a", base_dir=turn.to, num_machines=1)
    toy(tmp_path / "b", base_dir=str(tmp_path / "absolute"), num_machines=1)
    assert (tmp_path / "a" / turn.to / "matching" / "run.json").is_file()
    assert (tmp_path / "absolute" / "matching" / "run.json").is_file()
    assert not (tmp_path / "a" / "runs").exists()


def num_machines(tmp_path, turn):
    toy(tmp_path / "a", num_machines=turn.to)
    assert workers(tmp_path / "a" / "runs" / "matching") == turn.to


def log_level(tmp_path, turn):
    for base in (usual(alone), alone(tmp_path / "a", log_level=turn.to)):
        (log,) = (base / "runs" / "matching" / "workers").glob("*.log")
        assert (" INFO published" in log.read_text()) == (base == usual(alone))


def metrics(tmp_path, turn):
    sinks.needs("tensorboard")
    for base in (usual(alone), alone(tmp_path / "a", metrics=turn.to)):
        run = base / "runs" / "matching"
        assert len(sinks.table(run)) == 10 and (run / "tensorboard").is_dir() == (base != usual(alone))


def wandb_project(tmp_path, turn):
    assert told(usual(with_wandb)).project == "matching"
    assert told(with_wandb(tmp_path / "a", wandb_project=turn.to)).project == turn.to


def wandb_entity(tmp_path, turn):
    assert told(usual(with_wandb)).entity == ""
    assert told(with_wandb(tmp_path / "a", wandb_entity=turn.to)).entity == turn.to


def with_wandb(base: Path, **keys: Any) -> Path:
    sinks.needs("wandb")
    return alone(base, environment={"WANDB_MODE": "offline"}, metrics=("wandb",), **keys)


def told(place: Path) -> Any:
    """What wandb hears at first."""
    records = sinks.wandb_records(place / "runs" / "matching")
    return next(each.run for each in records if each.WhichOneof("record_type") == "run")


def group_readable(tmp_path, turn):
    for base in (usual(alone), alone(tmp_path / "a", group_readable=turn.to)):
        run, allowed = base / "runs" / "matching", base != usual(alone)
        assert {bool(each.stat().st_mode & 0o040) for each in (run, *run.glob("files/*/*"))} == {allowed}
        assert not [each for each in run.rglob("*") if each.stat().st_mode & 0o007]


def local_package(tmp_path, turn):
    """What the launcher packs."""
    (tmp_path / turn.to).mkdir()
    (tmp_path / turn.to / "mine.py").write_text("mine = True\n")
    scripts, digests = {"edt": ("edt.py",)}, []
    for package in ("", turn.to):
        (tmp_path / "evolution.json").write_text(json.dumps({"LOCAL_PACKAGE": package}))
        digests.append(Launcher(place(tmp_path / "evolution.json", "", scripts), (), scripts, ROOT).code.digest)
    apart = [ROOT / name for name in ("machines.json", "evolution.json")]
    assert digests == [pack(ROOT, apart).digest, pack(tmp_path / turn.to).digest]


CRASHING = """
import os
from fleet.method import Method
from fleet.start import main
from tests.helpers import listing
from tests.toy.config import ToyConfig
from tests.toy.strategies import strategy

def crash(work):
    print("threads:", os.environ["OMP_NUM_THREADS"], flush=True)
    os._exit(7)

if __name__ == "__main__":
    main(Method("matching", "Crashes.", ToyConfig, strategy, lambda config: crash))
"""


def crashing(base: Path, **keys: Any) -> Path:
    """The folder of a run of which every worker ends at its first recipe, and none takes its place."""
    base.mkdir()
    (base / "crashing.py").write_text(CRASHING)
    (base / "evolution.json").write_text(json.dumps({"num_machines": 1, "restarts": 0, **keys}))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "crashing.py"], cwd=base, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and "All workers ended" in done.stderr, done.stderr
    return base / "runs" / "matching"


def keep_every(tmp_path, turn):
    """Files of old rounds, of which only the last ones and such ones stay."""
    for every, stay in ((0, {8, 9}), (turn.to, {3, 6, 8, 9})):
        history = finished(tmp_path / str(every), max_generations=9, keep_every=every)
        folders = {int(name.partition(".")[0]) for name in history.store.names("files")}
        assert folders - {0} == stay


def restarts(tmp_path, turn):
    assert workers(usual(crashing)) == 1
    assert workers(crashing(tmp_path / "a", restarts=turn.to)) == turn.to + 1


def threads(tmp_path, turn):
    """A worker's libraries are told before it starts."""
    for count, run in ((1, usual(crashing)), (turn.to, crashing(tmp_path / "a", threads=turn.to))):
        assert f"threads: {count}\n" in (run / "workers" / "local-1.log").read_text()


def sleep(tmp_path, turn):
    times = []
    for seconds in (0.0, turn.to):
        clock, worker = launch(tmp_path / str(seconds), config_of(sleep=seconds))
        assert worker.run() == "over"
        times.append(clock.time)
    recipes = 1 + 3 * (4 + 1)
    assert times[0] < turn.to and times[1] == pytest.approx(times[0] + recipes * turn.to, rel=0.01)


def snapshot_minutes(tmp_path, turn):
    """Ten minutes of training in five steps: a snapshot after each, or none."""
    for minutes, steps in ((20.0, set()), (turn.to, {1, 2, 3, 4, 5})):
        config = config_of(sleep=600.0, snapshot_minutes=minutes)
        _, worker = launch(tmp_path / str(minutes), config)
        settled = offered_names(worker)
        assert worker.run() == "over"
        snapshots = {name.rpartition("/")[2] for name in settled if "snapshot" in name}
        assert snapshots == {f"snapshot.{step}.json" for step in steps}


def offered_names(worker: Worker) -> list[str]:
    """The names of all registers that a worker will offer."""
    names, settle = [], worker.store.settle

    def noted(name, *more, **how):
        names.append(name)
        return settle(name, *more, **how)

    worker.store.settle = noted
    return names


def time_limit_hours(tmp_path, turn):
    """Sixteen recipes of ten minutes take longer than half an hour."""
    _, worker = launch(tmp_path, config_of(sleep=600.0, time_limit_hours=turn.to))
    with pytest.raises(Stopped, match="time limit of 0.5 hours"):
        worker.run()
    assert "time limit" in launches.ordered(worker.store, 99) and "end" in worker.store.names("launches")
    assert not worker.history.over
    _, worker = launch(tmp_path / "free", config_of(sleep=600.0))
    assert worker.run() == "over" and "end" not in worker.store.names("launches")


# -- keys that matter when another worker is silent or slow ------------------------------------------------------------


def beside_a_silent_worker(base: Path, **keys: Any) -> tuple[Clock, History]:
    """A whole run by one worker, while another holds a recipe of round 1 and does nothing, slowly."""
    config = config_of(**{"dead_seconds": 2000.0, "poll_seconds": 5.0, "sleep": 1.0, **keys})
    clock, worker = launch(base, config)
    store, _ = open_run(base / "run", clock, "silent")
    planning.plan_ahead(store, strategy(config), history := History(store))
    store.post("workers/silent.pulse", strictjson.text({"beat": 1, "seconds": {"m": 400.0}}))
    assert Claims(store, history, Watch(store, clock, 1e9), 0).take("1/m3")
    assert worker.run() == "over"
    return clock, worker.history


def quorum(tmp_path, turn):
    clock, history = beside_a_silent_worker(tmp_path / "all", quorum=1.0, grace_seconds=300.0)
    assert history["1/m3"] and clock.time > 2000
    clock, history = beside_a_silent_worker(tmp_path / "some", quorum=turn.to, grace_seconds=300.0)
    assert history["1/m3"].absent == "closed" and clock.time < 1000
    clock, history = beside_a_silent_worker(tmp_path / "most", quorum=0.9, grace_seconds=300.0)
    assert history["1/m3"] and clock.time > 2000


def grace_seconds(tmp_path, turn):
    for seconds in (300.0, turn.to):
        clock, history = beside_a_silent_worker(tmp_path / str(seconds), **turn.given, grace_seconds=seconds)
        assert history["1/m3"].absent == "closed"
        assert seconds < clock.time < seconds + 100
    clock, history = beside_a_silent_worker(tmp_path / "learned", **turn.given, sleep=40.0)
    assert history["1/m3"].absent == "closed" and 60 < clock.time < 1000, "one and a half of 40 s"


def dead_seconds(tmp_path, turn):
    for seconds in (2000.0, turn.to):
        clock, history = beside_a_silent_worker(tmp_path / str(seconds), dead_seconds=seconds)
        assert history["1/m3"] and seconds < clock.time < seconds + 100


def poll_seconds(tmp_path, turn):
    for seconds in (5.0, turn.to):
        clock, _ = beside_a_silent_worker(tmp_path / str(seconds), poll_seconds=seconds)
        assert max(clock.naps) == seconds


def backup_factor(tmp_path, turn):
    for factor, patient in ((0.0, True), (turn.to, False)):
        clock, history = beside_a_silent_worker(tmp_path / str(factor), backup_factor=factor)
        assert history["1/m3"] and (clock.time > 2000) == patient


def disk_lane(tmp_path, turn):
    for lanes in (False, turn.to):
        run = toy(tmp_path / str(lanes), DISK_LANE=lanes, **{key.upper(): value for key, value in turn.given.items()})
        noted = "".join(path.read_text() for path in run.rglob("workers/*.events"))
        assert ('"beside":true' in noted) == lanes


EFFECTS = {
    each.__name__: each
    for each in (
        *(algorithm, project_name, threads, quorum, grace_seconds, base_dir, num_machines, snapshot_minutes),
        *(
            dead_seconds,
            poll_seconds,
            disk_lane,
            backup_factor,
            time_limit_hours,
            restarts,
            keep_every,
            log_level,
            sleep,
        ),
        *(local_package, group_readable, metrics, wandb_project, wandb_entity),
    )
}


# -- what may change between two launches ------------------------------------------------------------------------------


@pytest.mark.parametrize("key", BOUND)
def test_a_changed_bound_key_is_refused_and_nothing_is_written(key, tmp_path):
    turn = TURNS[key]
    before, after = config_of(**turn.given), config_of(**{**turn.given, key: turn.to})
    create_run(tmp_path / "runs", "run", before.bound(), Host())
    there = listing(tmp_path / "runs")
    with pytest.raises(UserError) as error:
        create_run(tmp_path / "runs", "run", after.bound(), Host())
    (difference,) = [line.strip() for line in str(error.value).splitlines() if line.startswith("  ")]
    old, new = (json.dumps(each.bound()[key]) for each in (before, after))
    assert difference == f"{key.upper()}: the run has {old}, now it says {new}"
    assert listing(tmp_path / "runs") == there


def test_all_differences_are_listed(tmp_path):
    create_run(tmp_path / "runs", "run", config_of().bound(), Host())
    with pytest.raises(UserError) as error:
        create_run(tmp_path / "runs", "run", config_of(seed=3, size=5, sleep=1.0).bound(), Host())
    assert "SEED: the run has 1, now it says 3\n  SIZE: the run has 96, now it says 5\n" in str(error.value)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        return digest(finished(tmp_path_factory.mktemp("runs") / "undisturbed"))


@pytest.mark.parametrize("key", OPERATIONAL)
def test_an_operational_key_may_change_between_launches(key, tmp_path, undisturbed):
    """A first launch stops after a few recipes; the second has another setting and ends with the same bytes."""
    clock, worker = launch(tmp_path / "runs", config_of())
    make, made = worker.execution.make, []

    def some(work):
        made.append(work.id)
        if len(made) == 6:
            clock.stop()
        return make(work)

    worker.execution.make = some
    assert worker.run() == "interrupted" and not worker.history.over
    config = config_of(**{key: TURNS[key].to})
    base = tmp_path / (config.base_dir if key == "base_dir" else "runs")
    if key == "base_dir":
        (tmp_path / "runs").rename(base)
    _, worker = launch(base, config)
    assert worker.options.launch == 2 and worker.options == processes.options(config, 2)
    assert launches.settings(worker.store, 2) == config.operational() != config_of().operational()
    assert worker.run() == "over" and digest(worker.history) == undisturbed
