"""Workers of a search that Ray finds places for: an actor for each holds a process of the code that runs without it.

pool: an actor for each device. buffered: one that merges to disk, ahead of others that score. serial: an actor in a
placement group of its own for each, that merges to disk and scores.
"""

import logging
import os
import secrets
import sys
from pathlib import Path
from typing import Any

from fleet.local import Starter
from fleet.processes import this_script, thread_counts
from fleet.run_config import UserError
from merge.evolve.search_config import SearchConfig
from merge.evolve.search_method import MERGER, SCORER
from merge.evolve.search_view import SearchView

_PATIENCE = 60.0  # seconds that a placement group may take


class OnRay(Starter):
    def __init__(self, config: SearchConfig, where: Path, seats: int, strategy: str, gpus: int, ray: Any) -> None:
        super().__init__(config, where, seats, SearchView)
        self.strategy, self.gpus, self.ray = strategy, gpus, ray

    def title(self, number: int) -> str:
        if self.strategy == "buffered":
            return SCORER if number else MERGER
        return self.strategy

    def hired(self, name: str) -> "Held":
        scores = not name.startswith(MERGER)
        needs = {"num_cpus": self.config.threads, "num_gpus": 1 if self.gpus and scores else 0}
        group, strategy = self._group(needs) if self.strategy == "serial" else (None, None)
        options = {**needs, "max_concurrency": 2, **({"scheduling_strategy": strategy} if strategy else {})}
        actor = self.ray.remote(_holder()).options(**options).remote()
        log = str(self._log.file.name if self._log else os.devnull)
        words = [*this_script(), "--leash", "--worker", name, str(self.folder)]
        return Held(self.ray, actor, actor.run.remote(words, log, thread_counts(self.config.threads)), group)

    def _group(self, needs: dict[str, int]) -> tuple[Any, Any]:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = placement_group([{"CPU": needs["num_cpus"], "GPU": needs["num_gpus"]}], strategy="STRICT_PACK")
        if not group.wait(_PATIENCE):
            raise UserError(f"Ray finds no place for {needs} within {_PATIENCE:.0f} s: are other jobs in their places?")
        return group, PlacementGroupSchedulingStrategy(placement_group=group)


class Held:
    """A process that an actor holds."""

    def __init__(self, ray: Any, actor: Any, end: Any, group: Any) -> None:
        self._ray, self._actor, self._end, self._group = ray, actor, end, group

    def poll(self) -> int | None:
        if not self._ray.wait([self._end], timeout=0)[0]:
            return None
        try:
            return int(self._ray.get(self._end))
        except self._ray.exceptions.RayError:
            return -9  # the actor, or its node, is gone

    def terminate(self) -> None:
        self._actor.end.remote()

    def kill(self) -> None:
        self._ray.kill(self._actor)

    def close(self) -> None:
        self._ray.kill(self._actor)
        if self._group:
            self._ray.util.remove_placement_group(self._group)


def search(config: SearchConfig, where: Path, strategy: str, seats: int, gpus: int | None, address: str) -> int:
    ray = _connected(address, seats, config.threads, gpus)
    try:
        there = int(ray.cluster_resources().get("GPU", 0))
        used = there if gpus is None else min(gpus, there)
        if gpus and gpus > there:
            raise UserError(f"--num-gpus {gpus}: Ray knows of {there}")
        count = (used or seats) + (strategy == "buffered")
        if count * config.threads > (cpus := int(ray.cluster_resources().get("CPU", 0))):
            raise UserError(
                f"{count} workers of {config.threads} threads each: Ray knows of {cpus} CPUs; give --workers"
            )
        return OnRay(config, where.parent, count, strategy, used, ray).run()
    finally:
        ray.shutdown()


def _connected(address: str, seats: int, threads: int, gpus: int | None) -> Any:
    """A cluster; or one of this machine alone, on its own address, without a dashboard. Some of Ray's ports are open to
    all addresses whatever one says: they ask for a token that nobody else has."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not address and "RAY_AUTH_MODE" not in os.environ:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    try:
        import ray
        import ray.util.placement_group
    except ImportError:
        raise UserError(f"Ray is missing here: {sys.executable} -m pip install -r requirements-ray.txt") from None
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address:
            ray.init(address=address, **quiet)
        else:
            cpus = max(len(os.sched_getaffinity(0)), (seats + 1) * threads)
            more = {} if gpus is None else {"num_gpus": gpus}
            ray.init(
                address="local", include_dashboard=False, num_cpus=cpus, _node_ip_address="127.0.0.1", **quiet, **more
            )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(f"no Ray {'at ' + address if address else 'can be started here'}: {error}") from None
    return ray


def _holder() -> type:
    """Made here, so that it travels by its own text."""

    class SearchWorkerActor:
        process: Any = None

        def run(self, words: list[str], log: str, env: dict[str, str]) -> int:
            import os
            import subprocess

            with open(log, "ab") as file:
                self.process = subprocess.Popen(
                    words, stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **env}
                )
            return int(self.process.wait())

        def end(self) -> None:
            if self.process:
                self.process.terminate()

    return SearchWorkerActor
