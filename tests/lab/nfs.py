"""Machines with kernels of their own that share a real NFS disk: `python -m tests.lab.nfs` measures who sees what when.

The server is nfs-ganesha on an ext4 image, in namespaces of its own where the machines' network lies, too. Everything
hangs on pipes to this process: however it ends, nothing of a lab is left but its folder.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from types import TracebackType

from tests.lab.machine import PATH
from tests.lab.network import Network, ip
from tests.lab.uml import Apart, Machine, new_key, tell

VERSIONS = ("4.2", "3")
DISK = 1 << 30  # bytes of the shared disk; the box gives what is written
SERVER, FIRST = 2, 21  # numbers in the network: the server's, the first machine's

_TOOLS = {
    "user-mode-linux": ("linux.uml",), "kmod": ("modprobe",), "nfs-common": ("mount.nfs", "rpc.statd"),
    "nfs-ganesha": ("ganesha.nfsd",), "rpcbind": ("rpcbind",), "openssh-server": ("sshd",),
    "openssh-client": ("ssh", "ssh-keygen"), "iproute2": ("ip", "ss"), "e2fsprogs": ("mke2fs",),
    "util-linux": ("unshare", "nsenter"),
}  # fmt: skip

_SERVER = """
hostname srv
mount -t tmpfs run /run
mkdir /run/disk /run/rpcbind /run/ganesha /run/clients
mount -o loop "$1" /run/disk
chmod 777 /run/disk
ip link set lo up
ip link add nowhere type bridge
rpcbind -w
"""
_GANESHA = """
NFS_CORE_PARAM { Protocols = 3, 4; Mount_Path_Pseudo = true; Enable_RQUOTA = false; }
NFSv4 { Lease_Lifetime = 10; Grace_Period = 10; RecoveryRoot = "/run/clients"; Graceless = %s; }
EXPORT { Export_Id = 1; Path = /run/disk; Pseudo = /exp; Access_Type = RW; Squash = No_Root_Squash; SecType = sys;
         FSAL { Name = VFS; } }
"""
_SSH = """Host *
  User root
  IdentityFile {key}
  IdentitiesOnly yes
  UserKnownHostsFile {known_hosts}
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  BatchMode yes
  ConnectTimeout 10
  LogLevel ERROR
"""


def why_not() -> str:
    """Why there can be no such lab here; empty if there can."""
    if os.geteuid():
        return "a lab needs root"
    lacking = [
        f"{tool} ({package})"
        for package, tools in _TOOLS.items()
        for tool in tools
        if not shutil.which(tool, path=PATH)
    ]
    if not [*Path("/usr/lib").glob("*/ganesha/libfsalvfs.so")]:
        lacking.append("libfsalvfs.so (nfs-ganesha-vfs)")
    if lacking:
        return f"a lab with NFS needs {', '.join(lacking)}"
    nodes = [node for node in ("/dev/net/tun", "/dev/loop-control") if not Path(node).exists()]
    return f"a lab with NFS needs {' and '.join(nodes)}" if nodes else ""


class Server:
    """Of the shared disk."""

    def __init__(self, box: Apart, folder: Path) -> None:
        self._box, self._log, self._configuration = box, folder / "ganesha.log", folder / "ganesha.conf"
        self._process: Apart | None = None

    def start(self, anew: bool = False) -> None:
        """Clients have a while to claim what they had open; a new disk has none."""
        self._configuration.write_text(_GANESHA % str(anew).lower())
        script = 'ganesha.nfsd -F -L "$1" -f "$2" -p /run/ganesha/pid -N NIV_EVENT >/dev/null 2>&1 &'
        self._process = Apart(
            script, str(self._log), str(self._configuration),
            log=self._log.with_suffix(".err"), inside=self._box,
        )  # fmt: skip
        end = time.monotonic() + 30
        while not tell(*self._box.enter, "ss", "-Hltn", "sport = 2049"):
            if time.monotonic() > end:
                raise OSError(f"nfs-ganesha does not start; it says:\n{self._log.read_text()[-3000:]}")
            time.sleep(0.05)

    def stop(self) -> None:
        """It stands still: nobody gets an answer, and nothing is lost."""
        assert self._process
        self._process.freeze()

    def go_on(self) -> None:
        assert self._process
        self._process.thaw()

    def crash(self) -> None:
        """The process dies, and what it knew of its clients; `start` brings another one."""
        if self._process:
            self._process.end()
            self._process = None


class NfsLab:
    """All machines are on and have the shared disk at `shared`, where the outside has none."""

    def __init__(self, folder: Path, names: Sequence[str] = ("m1", "m2", "m3"), version: str = "4.2") -> None:
        self.folder, self.names, self.version = folder.absolute(), names, version
        self.shared = Path("/mnt/shared")
        self.ssh_config, self.known_hosts, self.key = (
            self.folder / name for name in ("ssh_config", "known_hosts", "key")
        )
        self.machines: dict[str, Machine] = {}
        self._undo = contextlib.ExitStack()

    def __getitem__(self, name: str) -> Machine:
        return self.machines[name]

    def __iter__(self) -> Iterator[Machine]:
        return iter(self.machines.values())

    def __enter__(self) -> "NfsLab":
        with self._undo:
            self._build()
            self._undo = self._undo.pop_all()  # nothing went wrong: it is kept until the end
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._undo.close()

    def _build(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        disk = self.folder / "disk"
        disk.touch(exist_ok=False)
        os.truncate(disk, DISK)
        tell("mke2fs", "-q", "-t", "ext4", str(disk))
        box = Apart(_SERVER, str(disk), log=self.folder / "box.log", apart=("--net", "--mount", "--uts"))
        self._undo.callback(box.end)
        network = Network(box.pid)
        self._undo.callback(network.remove)
        ip([f"addr add {network.prefix}.{SERVER}/24 dev switch"], box.pid)
        self.server = Server(box, self.folder)
        self._undo.callback(self.server.crash)
        self.server.start(anew=True)
        self._furnish(box, network.prefix)
        for machine in self:
            self._undo.callback(machine.power_off)
            machine.switch_on()
        for machine in self:
            machine.wait()

    def _furnish(self, box: Apart, prefix: str) -> None:
        addresses = {name: f"{prefix}.{FIRST + n}" for n, name in enumerate(self.names)}
        known = {"localhost": "127.0.0.1", "srv": f"{prefix}.{SERVER}", **addresses}
        hosts = "".join(f"{address} {name}\n" for name, address in known.items())
        settings = {"SHARE": "srv:/exp", "OPTIONS": f"vers={self.version},hard", "SHARED": str(self.shared)}
        mine, keys, entries = new_key(self.key), "", ""
        for name, address in addresses.items():
            machine = Machine(name, address, box, self.folder / name, self.ssh_config)
            self.machines[name] = machine
            keys += f"{name},{address} {machine.furnish(settings, hosts, mine)}\n"
            entries += f"Host {name}\n  HostName {address}\n"
        self.known_hosts.write_text(keys)
        self.ssh_config.write_text(entries + _SSH.format(key=self.key, known_hosts=self.known_hosts))


# -- who sees what when ------------------------------------------------------------------------------------------------

_CREATE = """
import os, sys
for name in sys.stdin:
    os.close(os.open(name.strip(), os.O_CREAT | os.O_EXCL))
    print("created", flush=True)
"""
_LOOK = """
import os, sys, time
def there():
    return name in os.listdir() if sys.argv[1] == "lists" else os.path.exists(name)
for line in sys.stdin:
    name = line.strip()
    print(there(), flush=True)
    while not there():
        time.sleep(0.01)
    print("seen", flush=True)
"""


class _Program:
    """One that answers each line with another, in a machine's folder on the shared disk."""

    def __init__(self, machine: Machine, folder: Path, *words: str) -> None:
        line = machine.ssh(sys.executable, "-c", *words, folder=folder)
        self.process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def tell(self, text: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(f"{text}\n")

    def hear(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()


def delays(lab: NfsLab, how: str, count: int) -> list[float]:
    """Seconds, by this side's clock, from the end of a creation on one machine until another sees the name for which it
    has looked in vain."""
    one, other = list(lab)[:2]
    one.do(f"mkdir -p {lab.shared}/{how}")
    create = _Program(one, lab.shared / how, _CREATE)
    look = _Program(other, lab.shared / how, _LOOK, how)
    found = []
    with create.process, look.process:
        for n in range(count):
            look.tell(f"name-{n}")
            assert look.hear() == "False"
            create.tell(f"name-{n}")
            assert create.hear() == "created"
            created = time.monotonic()
            assert look.hear() == "seen"
            found.append(time.monotonic() - created)
    return found


def main() -> None:
    if why := why_not():
        sys.exit(why)
    for version in VERSIONS:
        with tempfile.TemporaryDirectory() as folder, NfsLab(Path(folder), ("m1", "m2"), version) as lab:
            for how, words, count in (("lists", "lists the folder", 30), ("asks", "asks for the name only", 2)):
                found = delays(lab, how, count)
                print(
                    f"NFS {version}: after {count} creations, whoever {words} sees them"
                    f" {median(found):.3f} s later (longest {max(found):.3f} s)",
                    flush=True,
                )


if __name__ == "__main__":
    main()
