"""Engines that start processes themselves, for real: a Slurm of one node, a Ray of two."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.helpers import LONG, Toys, until
from tests.lab import slurm
from tests.launching import LAUNCHER

pytestmark = pytest.mark.slow
SMALL = {"algorithm": "diloco", "population_size": 3, "max_generations": 8, "dead_seconds": 5.0, "num_machines": 2}


def asked(run: Toys, *words: str, code: int = 0, env: dict[str, str] | None = None, **changed) -> str:
    """The launcher, without any machines.json."""
    run.keys |= changed
    known = {"project_name": "toy", "base_dir": str(run.place / "runs"), **run.keys}
    (run.place / "evolution.json").write_text(json.dumps(known))
    command = [*LAUNCHER, *words, f"--config={run.place / 'evolution.json'}"]
    done = run.run(command, env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})})
    done.ends(code)
    assert "Traceback" not in done.said, done.said
    return done.said


@pytest.mark.skipif(bool(slurm.why_not()), reason=f"no Slurm: {slurm.why_not()}")
def test_slurm_starts_the_same_workers(toys, tmp_path, monkeypatch):
    run = toys(**SMALL, size=24, sleep=0.2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with slurm.slurm(tmp_path / "slurm") as env:
        env = {**env, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": f"{Path(sys.executable).parent}:{env['PATH']}"}
        assert "#SBATCH --ntasks=2" in asked(run, "launch", "--dry-run", "--via", "slurm", env=env)
        assert "Slurm job" in asked(run, "launch", "--via", "slurm", "--detach", env=env)
        until(lambda: len(run.alive()) == 2, "two workers", LONG)
        assert "No worker is left" in asked(run, "stop", "--via", "slurm", env=env)
        assert not run.alive()
        assert "The run is over" in asked(run, "launch", "--via", "slurm", env=env, sleep=0.0)
    run.same()


def test_ray_starts_the_same_workers(toys, tmp_path, monkeypatch):
    ray = pytest.importorskip("ray", reason="Ray is missing (requirements-ray.txt)")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    run = toys(**SMALL, size=24, sleep=0.3)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        cluster.add_node(num_cpus=2)
        via = ("--via", "ray", cluster.address)
        said = asked(run, "launch", *via, "--detach")
        assert said.count("An actor holds a worker") == 2
        until(lambda: len(run.alive()) == 2, "two workers", LONG)
        assert "No worker is left" in asked(run, "stop", *via)
        until(lambda: not run.alive(), "none is left")
        asked(run, "launch", *via, "--detach")
        until(lambda: len(run.alive()) == 2, "two workers again", LONG)
        assert "actors killed" in asked(run, "stop", *via, "--now")
        until(lambda: not run.alive(), "they went with their actors", LONG)
        assert "The run is over" in asked(run, "launch", *via, sleep=0.0)
    finally:
        ray.shutdown()
        cluster.shutdown()
    run.same()
