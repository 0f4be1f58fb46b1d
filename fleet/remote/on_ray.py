"""An actor for each accelerator of a Ray cluster, or for each node without one, holds a worker and its place."""

import logging
import sys
from dataclasses import dataclass
from typing import Any

from fleet.run_config import UserError

_SPACE = "fleet"


@dataclass(frozen=True)
class Ray:
    address: str
    program: str
    words: str
    each: int  # accelerators of a worker

    def plan(self, tasks: int, threads: int, run_id: str, folder: str) -> str:
        many = "each accelerator" if self.each == 1 else f"each {self.each} accelerators"
        return f"On {many} of the Ray cluster, or node without one, an actor runs agent.py with:\n{self.words}"

    def start(self, tasks: int, threads: int, run_id: str, folder: str) -> str:
        ray = self._connected()
        holder, asked = ray.remote(_holder()), []
        for node in sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeID"]):
            devices = int(node["Resources"].get("GPU", 0))
            near = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            for seat in range(max(1, devices // self.each)):
                name = f"{node['NodeID'][:8]}-{seat}"
                actor = holder.options(
                    name=f"{run_id}-{name}", namespace=_SPACE, lifetime="detached", scheduling_strategy=near,
                    num_cpus=0 if devices else 1, num_gpus=self.each if devices else 0,
                ).remote()  # fmt: skip
                asked.append(actor.start.remote(self.program, self.words, name))
        try:
            return "\n".join(f"An actor holds a worker on {host}" for host in ray.get(asked, timeout=120))
        except ray.exceptions.GetTimeoutError:
            raise UserError("Ray does not start all actors within 120 s: are other jobs in their places?") from None

    def kill(self, run_id: str) -> str:
        """Their supervisors end with them, at their workers' next step."""
        ray, mine = self._connected(), self._actors(run_id)
        for name in mine:
            ray.kill(ray.get_actor(name, namespace=_SPACE))
        return f"{len(mine)} actors killed"

    def working(self, run_id: str) -> int:
        return len(self._actors(run_id))

    def _actors(self, run_id: str) -> list[str]:
        found = self._connected().util.list_named_actors(all_namespaces=True)
        return [each["name"] for each in found if each["namespace"] == _SPACE and each["name"].startswith(run_id)]

    def _connected(self) -> Any:
        try:
            import ray
            import ray.util.scheduling_strategies
        except ImportError:
            raise UserError(f"Ray is missing here: {sys.executable} -m pip install -r requirements-ray.txt") from None
        if ray.is_initialized():
            return ray
        try:
            ray.init(address=self.address or "auto", namespace=_SPACE, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = self.address or "this machine"
            raise UserError(f"no Ray cluster at {where}: {error}; `ray start --head` makes one") from None
        return ray


def _holder() -> type:
    """Made here, so that it travels by its own text: the project need not lie on the cluster's nodes."""

    class WorkerActor:
        def start(self, program: str, words: str, name: str) -> str:
            import os
            import socket
            import subprocess
            import sys
            import threading

            command = [sys.executable, "-P", "-c", program, words, name, "leash"]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL)

            def hold() -> None:
                process.wait()
                os._exit(0)  # the worker's place is free again

            threading.Thread(target=hold, daemon=True).start()
            return socket.gethostname()

    return WorkerActor
