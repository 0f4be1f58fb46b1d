"""Machines that are kernels of their own: user-mode Linux, each with its own NFS client, clock, memory and sshd.

A machine sees the files of the box through hostfs, and what it writes stays in its own memory. The folders of which
everybody has their own are empty there (/home, /mnt, /root, /run, /tmp), but for the project and its Python.
"""

import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.lab.machine import PATH, Held
from tests.lab.network import ip

PROJECT = Path(__file__).resolve().parents[2]
BOOT = Path(__file__).with_name("uml.sh")
MEMORY = 512  # MiB that a machine may use; it takes from the box what it has touched
BOOTS_WITHIN = 60.0  # seconds; five are usual

# The kernel finds the machine's folder and keeps its memory where nobody but this process sees it.
_POWER = f"""
cd "$1"
mount -t tmpfs -o size=100% memory /run
mkdir /run/machine
mount --bind . /run/machine
TMPDIR=/run linux.uml mem={MEMORY}M umid=kernel uml_dir=/run/ rootfstype=hostfs rootflags=/ ro init=/run/machine/boot \\
  con=null con0=null,fd:1 quiet vec0:transport=tap,ifname="$2",mac="$3",depth=128,gro=1 </dev/null >console 2>&1 &
"""


def cannot_run() -> str:
    """Why such a kernel can start no process here: where the processor is younger than it, it does not know all of the
    registers that it has to keep for its processes."""
    with tempfile.TemporaryDirectory() as place:
        command = ["linux.uml", "mem=64M", "umid=probe", f"uml_dir={place}/", "rootfstype=hostfs", "rootflags=/", "ro"]
        command += ["init=/bin/true", "con=null", "con0=null,fd:1", "quiet"]
        done = subprocess.run(
            command, env={**os.environ, "TMPDIR": place}, stdin=subprocess.DEVNULL, capture_output=True, timeout=60
        )
    if b"ptrace set fp regs failed" in done.stdout:
        return "user-mode Linux is too old for this processor (it cannot set its registers): real NFS is not tested"
    return ""


class Apart(Held):
    """A shell in namespaces of its own, or inside others'. When its script is done it waits for the end of its input;
    all that it has started is killed then."""

    def __init__(
        self, script: str, *arguments: str, log: Path, apart: tuple[str, ...] = (), inside: "Apart | None" = None
    ) -> None:
        shell = ["unshare", "--pid", "--fork", "--kill-child", *apart, "sh", "-ec", f"{script}\necho ready\nread -r _"]
        super().__init__([*(inside.enter if inside else ()), *shell, "sh", *arguments], log)
        try:
            self.hear()
        except OSError:
            self.end()
            raise

    @property
    def enter(self) -> list[str]:
        """What stands before a command in these namespaces."""
        return ["nsenter", "-t", str(self.pid), "-n", "-m", "-u", "--"]

    def freeze(self) -> None:
        os.killpg(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.killpg(self.pid, signal.SIGCONT)

    def end(self) -> None:
        if self._process.poll() is None:
            self.thaw()
        assert self._process.stdin
        self._process.stdin.close()
        self.wait()


class Machine:
    """Off at first. Its line to the switch is a tap that has its name there."""

    def __init__(self, name: str, address: str, switch: Apart, folder: Path, ssh_config: Path) -> None:
        self.name, self.address, self.folder = name, address, folder
        self._switch, self._ssh = switch, ["ssh", "-F", str(ssh_config), name]
        self._power: Apart | None = None
        ip([f"tuntap add {name} mode tap", f"link set {name} master switch up"], switch.pid)

    @property
    def home(self) -> Path:
        return Path(f"/home/w-{self.name}")

    def furnish(self, settings: dict[str, str], hosts: str, authorized: str) -> str:
        """Its folder, with all that it is to know when it boots; returns its public host key."""
        self.folder.mkdir()
        settings |= {"NAME": self.name, "ADDRESS": self.address, "SEEN": " ".join(_seen())}
        (self.folder / "settings").write_text("".join(f"{key}={shlex.quote(settings[key])}\n" for key in settings))
        (self.folder / "hosts").write_text(hosts)
        (self.folder / "authorized_keys").write_text(authorized)
        (self.folder / "lib").mkdir()
        (self.folder / "lib" / "modules").symlink_to("/usr/lib/uml/modules")  # where modprobe -d looks
        (self.folder / "boot").write_text(BOOT.read_text())
        (self.folder / "boot").chmod(0o700)
        return new_key(self.folder / "host_key")

    # -- power and network --------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.switch_on()
        self.wait()

    def switch_on(self) -> None:
        """It begins to boot, with an empty local disk."""
        assert not self._power, f"{self.name} is on"
        card = "02:00:" + ":".join(f"{int(number):02x}" for number in self.address.split("."))  # the same at each boot
        self._power = Apart(
            _POWER, str(self.folder), self.name, card,
            log=self.folder / "power.log", apart=("--mount",), inside=self._switch,
        )  # fmt: skip

    def wait(self) -> None:
        """Until the shared disk is mounted there and it lets people in."""
        end = time.monotonic() + BOOTS_WITHIN
        while not self._answers():
            said = (self.folder / "console").read_text(errors="replace")
            if "Kernel panic" in said or time.monotonic() > end:
                raise OSError(f"{self.name} does not boot; its console says:\n{said[-3000:]}")
            time.sleep(0.1)

    def power_off(self) -> None:
        """Everything dies at once, and nobody is told. Its own disk was in its memory."""
        if self._power:
            self._power.end()
            self._power = None

    def cut(self) -> None:
        """Unplug the network. A tap that is set down would never work again for the kernel at its other end."""
        ip([f"link set {self.name} master nowhere"], self._switch.pid)

    def heal(self) -> None:
        ip([f"link set {self.name} master switch"], self._switch.pid)

    # -- inside -------------------------------------------------------------------------------------------------------

    def ssh(self, *command: str, folder: Path | None = None) -> list[str]:
        """The command line, on this side, of a command there."""
        line = shlex.join(command)
        return [*self._ssh, f"cd {shlex.quote(str(folder))} && exec {line}" if folder else line]

    def run(self, *command: str, input: str | None = None, timeout: float = 20) -> subprocess.CompletedProcess[str]:
        """A command as root, through SSH."""
        line = self.ssh(*command)
        return subprocess.run(line, input=input or "", timeout=timeout, capture_output=True, text=True, check=False)

    def do(self, script: str, timeout: float = 20) -> str:
        """What a bash script says, which must succeed."""
        done = self.run("bash", "-ec", script, timeout=timeout)
        assert not done.returncode, f"{self.name}: {script}: {done.stderr}"
        return done.stdout

    def _answers(self) -> bool:
        try:
            with socket.create_connection((self.address, 22), timeout=1) as line:
                return line.recv(4) == b"SSH-"
        except OSError:
            return False


def _seen() -> list[str]:
    """The project and its Python, wherever they lie; what is below /usr is seen anyway."""
    paths = {Path(path) for path in (PROJECT, sys.prefix, sys.base_prefix)}
    paths |= {path.resolve() for path in paths}
    outer = [path for path in paths if not any(path.is_relative_to(other) for other in (paths - {path}))]
    return sorted(str(path) for path in outer if not path.is_relative_to("/usr"))


def new_key(file: Path) -> str:
    """Makes an SSH key; returns the public one."""
    tell("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(file))
    return file.with_suffix(".pub").read_text().strip()


def tell(*command: str) -> str:
    """What a command says, which must not fail."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": PATH})
    if done.returncode:
        raise OSError(f"{shlex.join(command)}: {done.stderr.strip()}")
    return done.stdout
