"""A Slurm of one node on this box, with its own folder, key and ports; it ends with the block."""

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from tests.helpers import until

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")


@lru_cache
def why_not() -> str:
    """Why there can be no Slurm here; empty if there can."""
    if os.geteuid():
        return "Slurm's daemons need root"
    lacking = [tool for tool in TOOLS if not shutil.which(tool, path=PATH)]
    return f"{', '.join(lacking)} are missing (Debian's slurm-wlm and munge)" if lacking else ""


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """The environment that its commands need."""
    folder.mkdir()
    host, ports = socket.gethostname().split(".")[0], _free_ports(2)
    key, talk = folder / "key", folder / "munge"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    (folder / "slurm.conf").write_text(
        f"ClusterName=lab\nSlurmctldHost={host}(127.0.0.1)\nSlurmUser=root\nSlurmdUser=root\nAuthType=auth/munge\n"
        f"AuthInfo=socket={talk}\nSlurmctldPort={ports[0]}\nSlurmdPort={ports[1]}\nStateSaveLocation={folder}/state\n"
        f"SlurmdSpoolDir={folder}/spool\nSlurmctldPidFile={folder}/ctld.pid\nSlurmdPidFile={folder}/slurmd.pid\n"
        "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nMpiDefault=none\nReturnToService=2\n"
        "SchedulerType=sched/builtin\nSelectType=select/cons_tres\nKillWait=10\n"
        f"NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} State=UNKNOWN\n"
        "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
    )
    env = {"PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf"), "HOME": str(folder)}
    daemons = [
        ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={talk}", f"--pid-file={folder}/munge.pid",
         f"--log-file={folder}/munge.log", f"--seed-file={folder}/seed"],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", host],
    ]  # fmt: skip
    with contextlib.ExitStack() as undo:
        for command in daemons:
            log = undo.enter_context((folder / f"{command[0]}.log").open("wb"))
            process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
            undo.callback(process.wait)
            undo.callback(process.terminate)
            if command[0] == "munged":
                until(talk.exists, "munge is up")
        until(lambda: "idle" in _said(["sinfo", "-h", "-o", "%T"], env), "the node is idle", pause=0.2)
        yield env


def _said(command: list[str], env: dict[str, str]) -> str:
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False).stdout


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
