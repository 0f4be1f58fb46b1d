"""Disks of other kinds than this machine's own, each mounted for the length of a block: layers, SSH, other views."""

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.helpers import pids, until

SERVER = Path("/usr/lib/openssh/sftp-server")
SSHFS = {  # how people mount it, and what its server may lack
    "sshfs": "",
    "sshfs without its cache": "-o dir_cache=no",
    "sshfs as clusters.md says": "-o reconnect,dcache_timeout=1",
    "sshfs without links": "-o disable_hardlink",
    "sshfs without renames that replace": "",
}
LACKS = {"sshfs without renames that replace": "-P posix-rename"}
PLAIN = ("overlay", "fuse-overlayfs", "bindfs", "bindfs with late news", *list(SSHFS)[:3])


class Mounted:
    """A disk of one kind at a point. What it holds lies in `behind`, and what lay there before stays as it was."""

    def __init__(self, kind: str, point: Path, behind: Path) -> None:
        self.kind, self.point, self.behind = kind, point, behind
        self._own = behind.with_name(f"{behind.name}-own")  # of layers: what is written, and room for it
        for each in (point, behind, self._own, self._own / "upper", self._own / "work"):
            each.mkdir(exist_ok=True)

    def mount(self) -> None:
        layers = f"lowerdir={self.behind},upperdir={self._own}/upper,workdir={self._own}/work"
        words = {
            "overlay": ["mount", "-t", "overlay", "-o", layers, "layers"],
            "fuse-overlayfs": ["fuse-overlayfs", "-o", layers],
            "bindfs": ["bindfs", "--no-allow-other", str(self.behind)],
            "bindfs with late news": [
                "bindfs", "--no-allow-other", "-o", "attr_timeout=30,entry_timeout=30,negative_timeout=30",
                str(self.behind),
            ],
        }.get(self.kind) or self._sshfs()  # fmt: skip
        subprocess.run([*words, str(self.point)], check=True, capture_output=True)

    def unmount(self) -> None:
        subprocess.run(["umount", "-l", str(self.point)], capture_output=True, check=False)

    def die(self) -> None:
        """Whoever serves it is killed: every call fails from now on."""
        (server,) = pids(str(self.point))
        os.kill(server, 9)
        until(self._is_dead, "every call fails")

    def _is_dead(self) -> bool:
        try:
            os.listdir(self.point)
        except OSError as error:
            return error.errno == errno.ENOTCONN
        return False

    def _sshfs(self) -> list[str]:
        """Without sshd: its program that serves files is asked directly."""
        ssh = self._own / "ssh"
        ssh.write_text(f"#!/bin/sh\nexec {SERVER} {LACKS.get(self.kind, '')}\n")
        ssh.chmod(0o755)
        return ["sshfs", "-o", f"ssh_command={ssh}", *SSHFS[self.kind].split(), f"here:{self.behind}"]


def why_not(kind: str) -> str:
    """Why there can be no such disk here; empty if there can."""
    if os.geteuid() or not os.path.exists("/dev/fuse"):
        return "disks of other kinds need root and /dev/fuse"
    tool = kind.split()[0]
    if tool != "overlay" and not shutil.which(tool) or tool == "sshfs" and not SERVER.exists():
        return f"{tool} is not here (Debian's {tool}; sshfs needs openssh-server, too)"
    return ""


@contextlib.contextmanager
def mounted(kind: str, point: Path, behind: Path) -> Iterator[Mounted]:
    disk = Mounted(kind, point, behind)
    disk.mount()
    try:
        yield disk
    finally:
        disk.unmount()
