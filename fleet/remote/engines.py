"""Where people have an engine that starts processes already, it starts the same crews: Ray, or Slurm."""

import json
import logging
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fleet.config import Wrong
from fleet.remote.launcher import Launcher
from fleet.start import thread_counts

_FAR = Path(__file__).with_name("far.py")


def words(launcher: Launcher, made: Mapping[str, Any], launch: int, place: str, leash: bool) -> dict[str, Any]:
    """What `far.hold` is called with: the same order that a machine's crew gets over SSH, for one worker."""
    run = f"{launcher.place.folder}/{launcher.code.name}"
    order = {
        "run": launcher.place.folder, "run_id": made["run_id"], "launch": launch, "machine": place,
        "digest": launcher.code.digest, "command": list(launcher.scripts[launcher.place.algorithm]),
        "restarts": made["restarts"], "seats": [{}], "lock": f"{made['run_id']}-{launch}-{place}",
        "umask": 0o027 if made["operational"]["group_readable"] else 0o077,
    }  # fmt: skip
    env = thread_counts(made["threads"])
    return {"tar": run, "digest": launcher.code.digest, "order": order, "env": env, "leash": leash}


def program(call: str) -> str:
    """far.py with a last line: it comes with the order, and not from the disk."""
    return f"{_FAR.read_text()}\n\n{call}\n"


# -- Slurm -------------------------------------------------------------------------------------------------------------


def slurm_script(
    launcher: Launcher, made: Mapping[str, Any], launch: int, tasks: int, python: str, options: Sequence[str]
) -> str:
    """One worker for each task; srun tells each its number, and Slurm its devices."""
    place = launcher.place
    call = "import json\nwords = json.loads(sys.argv[1])\nwords['order']['machine'] = os.environ['SLURM_PROCID']\n"
    call += "words['order']['lock'] += os.environ['SLURM_PROCID']\nhold(**words)"
    order = json.dumps(words(launcher, made, launch, "", leash=False))
    log = f"{place.folder}/workers/slurm-%j.log"
    if any(c in log for c in "\n\"'\\"):
        raise Wrong(f"BASE_DIR {place.base!r}: sbatch cannot be told such a name")
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name=fleet-{place.project}",
        f"#SBATCH --ntasks={tasks}",
        f"#SBATCH --cpus-per-task={made['threads']}",
        f'#SBATCH --output="{log}"',
        *(f"#SBATCH {option}" for option in options),
        "",
        "# Each task checks the code by its hash, copies it to its machine, and runs one worker from there.",
        f"order={shlex.quote(order)}",
        f"program={shlex.quote(program(call))}",
        f'exec srun --kill-on-bad-exit=0 {shlex.quote(python)} -c "$program" "$order"',
        "",
    ]
    return "\n".join(lines)


def submit(script: str) -> str:
    """The job's number."""
    try:
        done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        raise Wrong("sbatch is not here: run this on a machine that can submit Slurm jobs") from None
    if done.returncode:
        raise Wrong(f"Slurm does not take the job: {done.stderr.strip()}")
    return done.stdout.strip()


def cancel(project: str) -> None:
    """Cancel the run's jobs of this user."""
    command = ["scancel", "--me", f"--name=fleet-{project}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise Wrong(f"Slurm does not cancel the job: {done.stderr.strip()}")


# -- Ray ---------------------------------------------------------------------------------------------------------------


def start_on_ray(launcher: Launcher, made: Mapping[str, Any], launch: int, address: str) -> list[str]:
    """An actor for each accelerator of the cluster, or for each node without one; it holds a worker and its device."""
    ray = connected(address)
    holder = ray.remote(_holder())
    started = []
    for node in sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeID"]):
        devices = int(node["Resources"].get("GPU", 0))
        for seat in range(max(1, devices)):
            name = f"fleet-{made['run_id']}-{launch}-{node['NodeID'][:8]}-{seat}"
            affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            actor = holder.options(
                name=name, namespace="fleet", lifetime="detached", num_cpus=0 if devices else min(1, made["threads"]),
                num_gpus=1 if devices else 0, scheduling_strategy=affinity,
            ).remote()  # fmt: skip
            told = words(launcher, made, launch, f"{node['NodeID'][:8]}-{seat}", leash=True)
            call = "import json\nhold(**json.loads(sys.argv[1]))"
            started.append((name, actor.start.remote(program(call), json.dumps(told))))
    return [f"{name} on {ray.get(answer, timeout=120)}" for name, answer in started]


def end_on_ray(run_id: str, address: str) -> int:
    """Kill the actors of a run; each takes its crew along."""
    ray = connected(address)
    found = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True) if each["namespace"] == "fleet"]
    mine = [name for name in found if name.startswith(f"fleet-{run_id}-")]
    for name in mine:
        ray.kill(ray.get_actor(name, namespace="fleet"))
    return len(mine)


def connected(address: str) -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError:
        raise Wrong(f"Ray is missing here: {sys.executable} -m pip install -r requirements-ray.txt") from None
    try:
        ray.init(address=address or "auto", namespace="fleet", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise Wrong(f"no Ray cluster at {address or 'this machine'}: {error}; `ray start --head` makes one") from None
    return ray


def _holder() -> type:
    """Made here, so that it travels by its own text: the project need not lie on the cluster's nodes."""

    class Holder:
        def start(self, program: str, order: str) -> str:
            import os
            import socket
            import subprocess
            import sys
            import threading

            process = subprocess.Popen([sys.executable, "-c", program, order], stdin=subprocess.DEVNULL)

            def hold() -> None:
                process.wait()
                os._exit(0)  # the worker's place is free again

            threading.Thread(target=hold, daemon=True).start()
            return socket.gethostname()

    return Holder
