"""One machine of a lab: what runs in it, its power switch, and what can happen to it."""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.lab.machines import Lab

BOOT = Path(__file__).with_name("boot.sh")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NAMESPACES = {"mount": "mnt", "net": "net", "uts": "uts", "ipc": "ipc", "pid": "pid"}  # options, and names in /proc
APART = ("unshare", *(f"--{each}" for each in NAMESPACES), "--fork", "--kill-child")


class Held:
    """A process that ends with this one: it waits for the end of its input."""

    def __init__(self, command: Sequence[str], log: Path, **settings: str) -> None:
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, bufsize=1,
                start_new_session=True, env={"PATH": PATH, **settings},
            )  # fmt: skip
        self.pid = self._process.pid

    def hear(self) -> str:
        assert self._process.stdout
        if not (line := self._process.stdout.readline().strip()):
            raise OSError(f"{self._log.stem} does not start: {self._log.read_text(errors='replace')[-2000:]}")
        return line

    def tell(self) -> None:
        assert self._process.stdin
        self._process.stdin.write("\n")

    def kill(self, pid: int = 0) -> None:
        """Itself, or the child for which it waits."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid or self.pid, signal.SIGKILL)

    def wait(self) -> None:
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            with contextlib.suppress(OSError):
                pipe.close()


class Machine:
    """One of a lab's, switched on from the beginning."""

    def __init__(self, lab: "Lab", name: str, number: int) -> None:
        self.lab, self.name, self.number = lab, name, number
        self.pid = 0  # of its first process, seen from outside; 0 while it is off
        self.home = Path(f"/home/w-{name}")
        self._init: Held | None = None

    @property
    def address(self) -> str:
        return f"{self.lab.network.prefix}.{self.number}"

    @property
    def bastion(self) -> "Machine | None":
        """The machine that it stands behind."""
        return self.lab[self.lab.behind[self.name]] if self.name in self.lab.behind else None

    @property
    def root(self) -> Path:
        """Its files, to be read and written from outside while it is on."""
        return Path(f"/proc/{self.pid}/root")

    def inside(self, folder: Path | None = None) -> tuple[str, ...]:
        """What to put before a command that is to run there, without SSH and with the environment of a login."""
        assert self.pid, f"{self.name} is off"
        enter = (f"--{option}=/proc/{self.pid}/ns/{name}" for option, name in NAMESPACES.items())
        login = (f"HOME={self.home}", "USER=root", "LOGNAME=root", "SHELL=/bin/bash", f"PATH={PATH}", "LANG=C.UTF-8")
        return ("nsenter", *enter, "--", "env", "-i", "-C", str(folder or self.home), *login)

    def run(self, *command: str, input: str | None = None, timeout: float = 20) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.inside(), *command], input=input or "", timeout=timeout, capture_output=True, text=True, check=False
        )

    def do(self, script: str) -> str:
        """What a bash script says, which must succeed."""
        done = self.run("bash", "-ec", script)
        assert not done.returncode, f"{self.name}: {script}: {done.stderr}"
        return done.stdout

    def pids(self, text: str) -> list[int]:
        """Its processes with this text in their command lines, by their numbers inside."""
        found = []
        for folder in (self.root / "proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if text in (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                    found.append(int(folder.name))
        return sorted(found)

    # -- power --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """A new boot, on the disk as it was."""
        assert not self.pid, f"{self.name} is on"
        self.lab.boot([self])

    def power_off(self) -> None:
        """Everything dies at once, and nobody is told."""
        self.cut()
        self.kill()
        self.wait()

    def boot(self) -> None:
        """The first of four steps, so that several machines take them side by side."""
        enter = ("nsenter", f"--mount=/proc/{self.lab.rack.pid}/ns/mnt")
        log = self.lab.folder / f"{self.name}.log"
        self._init = Held([*enter, *APART, "bash", str(BOOT)], log, **self.lab.settings(self))

    def is_there(self) -> None:
        self.pid = int(self._on.hear())

    def is_plugged(self) -> None:
        self._on.tell()

    def is_up(self) -> None:
        self._on.hear()

    @property
    def _on(self) -> Held:
        assert self._init, f"{self.name} is off"
        return self._init

    def kill(self) -> None:
        if self._init:
            self._init.kill(self.pid)

    def wait(self) -> None:
        if self._init:
            self._init.wait()
        self._init, self.pid = None, 0

    # -- misfortunes --------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Unplug the network."""
        self.lab.network.cut(self)

    def heal(self) -> None:
        self.lab.network.heal(self)

    def hang(self) -> None:
        """Whoever connects to its sshd is let in and never hears anything."""
        self.do("kill -STOP $(cat /run/sshd.pid)")

    def answer(self) -> None:
        """No longer hang."""
        self.do("kill -CONT $(cat /run/sshd.pid)")

    def new_host_key(self) -> str:
        """Show another key than the one in `lab.known_hosts`; returns the line that would have to stand there."""
        self.lab.make_keys(f"keys/{self.name}")
        shutil.copy(self.lab.folder / "keys" / self.name, self.root / "run/host_key")
        self.do("kill $(cat /run/sshd.pid); while [ -e /run/sshd.pid ]; do sleep 0.01; done; bash /run/serve")
        return self.lab.known(self)

    def read_only_home(self) -> None:
        """Until its next boot."""
        self.do('mount --bind "$HOME" "$HOME"; mount -o remount,bind,ro "$HOME"')

    def fill(self, spare_kb: int = 0) -> None:
        """Leave no more room than this on its disk."""
        self.do(f"fallocate -l $(($(df --output=avail -k / | tail -1) - {spare_kb}))k /var/filler")

    def make_room(self) -> None:
        self.do("rm /var/filler")
