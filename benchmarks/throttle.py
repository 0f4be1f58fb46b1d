"""A shared disk that is as slow as one likes: sshfs to OpenSSH's server through a pipe of so many bytes a second and so
long a delay, which all mounts share. One way of the pipe does not hold up the other, as in a cable.
"""

import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shutil import which

SERVER = "/usr/lib/openssh/sftp-server"
_PIECE = 1460  # of a packet: small calls of one host wait for no large files of another
SOON = 0.1  # what sshfs remembers for a second would be minutes beside rounds as short as most benchmarks have


def why_not() -> str:
    """What is missing here."""
    return next((f"{each} is missing" for each in ("/dev/fuse", SERVER) if not Path(each).exists()), "") or (
        "" if which("sshfs") else "sshfs is missing: apt install sshfs openssh-server"
    )


class Rate:
    """So many bytes a second, in one direction, for everybody together."""

    def __init__(self, bytes_a_second: float) -> None:
        self.bytes_a_second, self.sent = bytes_a_second, 0
        self._free, self._lock = 0.0, threading.Lock()

    def wait_for(self, count: int) -> None:
        with self._lock:
            self.sent += count
            self._free = max(self._free, time.monotonic()) + count / self.bytes_a_second
            until = self._free
        time.sleep(max(0.0, until - time.monotonic()))


class Pipe:
    """One direction of a connection."""

    def __init__(
        self, read: Callable[[int], bytes], write: Callable[[bytes], object], rate: Rate, delay: float
    ) -> None:
        self._read, self._write, self._rate, self._delay = read, write, rate, delay
        self._under_way = deque[tuple[float, bytes]]()
        self._there = threading.Condition()
        for each in (self._take, self._hand_on):
            threading.Thread(target=each, daemon=True).start()

    def _take(self) -> None:
        piece = b"-"
        while piece:
            try:
                piece = self._read(_PIECE)
            except OSError:
                piece = b""
            self._rate.wait_for(len(piece))
            with self._there:
                self._under_way.append((time.monotonic() + self._delay, piece))
                self._there.notify()

    def _hand_on(self) -> None:
        while True:
            with self._there:
                self._there.wait_for(lambda: bool(self._under_way))
                at, piece = self._under_way.popleft()
            time.sleep(max(0.0, at - time.monotonic()))
            try:
                self._write(piece)
            except (OSError, ValueError):
                return
            if not piece:
                return


@contextmanager
def mounts(
    folder: Path,
    places: list[Path],
    bytes_a_second: float,
    delay: float = 0.0,
    both: bool = True,
    remembered: float = SOON,
) -> Iterator[tuple[Rate, Rate]]:
    """This folder, at all of these places; what went to the disk and what came from it. Not `both` ways at a time, like
    a disk itself: then what went and what came together. Names are `remembered` for so many seconds."""
    to = Rate(bytes_a_second)
    back = Rate(bytes_a_second) if both else to
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        threading.Thread(target=_serve, args=(listening, folder, to, back, delay / 2), daemon=True).start()
        for place in places:
            place.mkdir(parents=True)
            port = listening.getsockname()[1]
            options = f"directport={port},auto_cache,max_conns=1,{_caches(remembered)}"
            subprocess.run(["sshfs", f"127.0.0.1:{folder}", place, "-o", options], check=True)
            stack.callback(subprocess.run, ["fusermount3", "-u", "-z", place], check=False)
        yield to, back


def _caches(seconds: float) -> str:
    """sshfs can remember whole folders for whole seconds only."""
    folders = f"dcache_timeout={seconds:.0f}" if seconds >= 1 else "dir_cache=no"
    return f"{folders},entry_timeout={seconds:g},attr_timeout={seconds:g}"


def _serve(listening: socket.socket, folder: Path, to: Rate, back: Rate, delay: float) -> None:
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server = subprocess.Popen([SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder, bufsize=0)
        assert server.stdin and server.stdout
        Pipe(connection.recv, server.stdin.write, to, delay)
        Pipe(server.stdout.read, connection.sendall, back, delay)
