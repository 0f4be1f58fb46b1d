"""Several machines on one box, by namespaces: each has its own network, name, processes, disk, sshd and power switch.

They share this box's kernel and clock. A machine sees all files of the box, and what it writes stays on its own small
disk. What the outside changes later it may see or not, but in `lab.shared`, and what is written through `Machine.root`.
Everything hangs on pipes to this process: however that ends, nothing of a lab is left but its folder.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from tests.lab.machine import APART, PATH, Held, Machine
from tests.lab.network import Network

TOOLS = ("bash", "unshare", "nsenter", "mount", "pivot_root", "ip", "sshd", "ssh", "ssh-keygen")
FIRST = 11  # the number of the first machine in its network

_RACK = """set -e
for disk; do mkdir -p "$disk"; mount -t tmpfs -o "size=${DISK_MB}m" disk "$disk"; done
echo ready
read -r || :
"""
_TRIAL = """set -e
mount -t tmpfs trial /mnt; mkdir /mnt/upper /mnt/work /mnt/root
mount -t overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work trial /mnt/root
ip link add switch type bridge; ip link add one type veth peer name two
"""


@lru_cache
def why_not() -> str:
    """Why there can be no lab here; empty if there can."""
    if os.geteuid():
        return "a lab needs root"
    if lacking := [tool for tool in TOOLS if not shutil.which(tool, path=PATH)]:
        return f"a lab needs {', '.join(lacking)} (Debian's iproute2, openssh-server, openssh-client and util-linux)"
    tried = subprocess.run([*APART, "bash", "-c", _TRIAL], capture_output=True, text=True, check=False)
    return f"a lab needs namespaces with mounts and a network: {tried.stderr.strip()}" if tried.returncode else ""


class Lab:
    """Machines with what they share, for the length of a block.

    `behind` names machines that only another one reaches, `mounts` those that have the shared folder elsewhere, and
    `unshared` those that do not have it at all; where it is not, `lab.shared` is an empty folder of the machine's own.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[str] = ("h1", "h2", "h3"),
        disk_mb: int = 256,
        behind: Mapping[str, str] | None = None,
        mounts: Mapping[str, Path] | None = None,
        unshared: Collection[str] = (),
    ) -> None:
        self.folder = folder.resolve()
        self.shared = self.folder / "shared"
        self.home = self.folder / "home"  # of a user who has the configuration, the key and the known hosts
        self.ssh_config, self.known_hosts, self.key = (
            self.home / ".ssh" / each for each in ("config", "known_hosts", "id_ed25519")
        )
        self.behind, self._disk_mb = behind or {}, disk_mb
        self._mounts = {**(mounts or {}), **dict.fromkeys(unshared, Path("/"))}
        self._machines = {name: Machine(self, name, n) for n, name in enumerate(names, FIRST)}

    def __getitem__(self, name: str) -> Machine:
        return self._machines[name]

    def __iter__(self) -> Iterator[Machine]:
        return iter(self._machines.values())

    def __enter__(self) -> "Lab":
        with contextlib.ExitStack() as undo:
            for each in (self.shared, self.key.parent, self.folder / "keys"):
                each.mkdir(parents=True, exist_ok=True)
            self.make_keys(str(self.key), *(f"keys/{name}" for name in self._machines))
            disks = [str(self.folder / "disks" / name) for name in self._machines]
            command = ["unshare", "--net", "--mount", "bash", "-c", _RACK, "rack", *disks]
            self.rack = Held(command, self.folder / "rack.log", DISK_MB=str(self._disk_mb))
            undo.callback(self.rack.wait)
            undo.callback(self.rack.kill)
            self.rack.hear()
            self.network = Network(self.rack.pid)
            undo.callback(self.network.remove)
            undo.callback(self._switch_off)
            self._write_files()
            self.boot(list(self))
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def boot(self, machines: Collection[Machine]) -> None:
        """All of them at the same time."""
        for each in machines:
            each.boot()
        for each in machines:
            each.is_there()
        self.network.plug([*machines, *(each for each in self if each.bastion in machines and each not in machines)])
        for each in machines:
            each.is_plugged()
        for each in machines:
            each.is_up()

    def _switch_off(self) -> None:
        for each in self:
            each.kill()
        for each in self:
            each.wait()

    # -- files --------------------------------------------------------------------------------------------------------

    def settings(self, machine: Machine) -> dict[str, str]:
        """What boot.sh has to know."""
        return {
            "NAME": machine.name,
            "ADDRESS": machine.address,
            "FOLDER": str(self.folder),
            "SHARED": str(self.shared),
            "SHARED_AT": str(self._mounts.get(machine.name, self.shared)),
            "LAYERS": " ".join(_layers(Path(__file__), Path(sys.prefix), Path(sys.base_prefix), self.folder)),
            "SSHD": shutil.which("sshd", path=PATH) or "",
        }

    def make_keys(self, *files: str) -> None:
        makers = []
        for file in files:
            (self.folder / file).unlink(missing_ok=True)
            makers.append(
                subprocess.Popen(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", self.folder / file])
            )
        assert not any([maker.wait() for maker in makers])

    def known(self, machine: Machine) -> str:
        key = (self.folder / "keys" / f"{machine.name}.pub").read_text().rpartition(" ")[0]
        return f"{machine.name},{machine.address} {key}\n"

    def _write_files(self) -> None:
        self.known_hosts.write_text("".join(map(self.known, self)))
        names = "".join(f"{each.address} {each.name}\n" for each in self)
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        jumps = {name: f"  ProxyJump {bastion}\n" for name, bastion in self.behind.items()}
        hosts = (f"Host {each.name}\n  HostName {each.address}\n{jumps.get(each.name, '')}" for each in self)
        self.ssh_config.write_text(
            f"{''.join(hosts)}Host *\n  User root\n  IdentityFile {self.key}\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.known_hosts}\n  GlobalKnownHostsFile /dev/null\n"
        )


def _layers(*needed: Path) -> list[str]:
    """The file systems that a machine sees: the box's, and those that hold what it needs; the outermost first."""
    points = {next(str(each) for each in (path, *path.parents) if each.is_mount()) for path in needed}
    apart = ("/dev", "/proc", "/run", "/sys")
    return sorted({"/"} | {each for each in points if not each.startswith(apart)})
