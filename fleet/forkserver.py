"""A process that has loaded what takes seconds to load, and forks whenever another one like it is wanted: the workers
of one machine load their libraries once, and so does who shows the result.

It does nothing else, so it has one thread and no device, and what is forked from it is sound. Who is forked goes on as
if it had been started with the words of its order, in a session of its own.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from fleet.busy_notice import loading
from fleet.host import born
from fleet.permissions import begun_with
from fleet.plain import say

_LONGEST = 1 << 16  # bytes of an order
_ROOM = 256  # characters that the words of who is forked may have more than the server's own
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")  # whoever has opened one cannot hand it on

# -- who wants processes -----------------------------------------------------------------------------------------------


class ForkServer:
    """The starter's end. Nothing here waits for the other one, which may take a while to load."""

    def __init__(
        self, script: Sequence[str], algorithm: str, folder: Path, env: dict[str, str], log: IO[bytes]
    ) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [*script, "--forkserver", algorithm, str(folder), "." * _ROOM],
                stdin=theirs.fileno(), stdout=log, stderr=subprocess.STDOUT,
                env={**os.environ, **env}, start_new_session=True, umask=begun_with(),
            )  # fmt: skip
        self._orders = 0
        self._told: dict[int, dict[str, int]] = {}  # what came of each order

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def fork(self, words: Sequence[str], out: IO[Any], errors: IO[Any]) -> "ForkedWorker":
        """On a leash: its standard input ends when its starter is gone."""
        self._orders += 1
        order = json.dumps({"order": self._orders, "words": [*words]}).encode()
        theirs, leash = os.pipe()
        try:
            socket.send_fds(self._socket, [order], [theirs, out.fileno(), errors.fileno()])
        except OSError:
            os.close(leash)
            raise
        finally:
            os.close(theirs)
        return ForkedWorker(self, self._orders, leash)

    def status_of(self, order: int) -> dict[str, int]:
        """What is known of a process: its pid, and once it has ended its code."""
        with contextlib.suppress(OSError):
            while said := self._socket.recv(_LONGEST):
                found = json.loads(said)
                self._told.setdefault(found.pop("order"), {}).update(found)
        known = self._told.setdefault(order, {})
        if "code" not in known and (code := self._process.poll()) is not None:
            if "pid" not in known:
                known["code"] = code or 1
            elif not born(known["pid"]):
                known["code"] = -signal.SIGKILL  # nobody is left who could say it
        return known

    def kill(self) -> None:
        """Who was forked lives on."""
        self._process.kill()

    def close(self) -> None:
        self.kill()
        self._process.wait()
        self._socket.close()


class ForkedWorker:
    """A process that may not be there yet."""

    def __init__(self, server: ForkServer, order: int, leash: int) -> None:
        self._server, self._order, self._leash = server, order, leash

    def poll(self) -> int | None:
        return self._server.status_of(self._order).get("code")

    def terminate(self) -> None:
        """As soon as it is there, and comes to a step boundary."""
        self.close()

    def kill(self) -> None:
        known = self._server.status_of(self._order)
        if "pid" not in known:
            self._server.kill()
        elif "code" not in known:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(known["pid"], signal.SIGKILL)  # its own children go with it

    def close(self) -> None:
        if self._leash >= 0:
            os.close(self._leash)
            self._leash = -1


# -- the process that forks --------------------------------------------------------------------------------------------


def serve(script: Sequence[str], load: Callable[[], object]) -> list[str]:
    """Load, then fork at each order on the standard input, until whoever gives them is gone. It returns in those that
    are forked alone, with their words."""
    with loading():  # what it freezes is looked at by nobody who is forked: its pages stay shared
        load()
    orders, alive, (ended, end) = socket.socket(fileno=0), dict[int, int](), os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(end, warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([orders.fileno(), ended], [], [])
        if ended in ready:
            os.read(ended, _LONGEST)
            _tell_ends(orders, alive)
        if orders.fileno() in ready:
            text, handles, _, _ = socket.recv_fds(orders, _LONGEST, 3)
            if not text:
                raise SystemExit(0)
            order, sound = json.loads(text), _can_be_forked()
            if (pid := _forked()) == 0:
                orders.detach()
                _begin(handles, (ended, end))
                return _called(script, order["words"]) if sound else os.execv(script[0], [*script, *order["words"]])
            for handle in handles:
                os.close(handle)
            alive |= {pid: order["order"]} if pid else {}
            _tell(orders, order=order["order"], **({"pid": pid} if pid else {"code": 1}))


def _forked() -> int | None:
    """Nothing where the machine has no room for another process."""
    try:
        return os.fork()
    except OSError as error:
        say(f"no worker can be forked: {error.strerror}", file=sys.stderr)
        return None


def _can_be_forked() -> bool:
    """Some library might have begun a thread, or have opened a device: whoever is forked then starts anew."""
    opened = (os.path.realpath(f"/proc/self/fd/{handle}") for handle in os.listdir("/proc/self/fd"))
    return len(os.listdir("/proc/self/task")) == 1 and not any(name.startswith(_DEVICES) for name in opened)


def _tell_ends(orders: socket.socket, alive: dict[int, int]) -> None:
    for pid in list(alive):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            _tell(orders, order=alive.pop(pid), code=os.waitstatus_to_exitcode(status))


def _tell(orders: socket.socket, **what: int) -> None:
    try:
        orders.send(json.dumps(what).encode())
    except OSError:
        raise SystemExit(0) from None  # nobody listens


def _begin(handles: Sequence[int], ours: Sequence[int]) -> None:
    """In a session of its own, with streams of its own."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for stream, handle in enumerate(handles):
        os.dup2(handle, stream)
    for handle in (*handles, *ours):
        os.close(handle)


def _called(script: Sequence[str], words: list[str]) -> list[str]:
    """Known by its own words to whoever lists processes: the kernel reads them where they were when this program was
    started."""
    with contextlib.suppress(OSError):
        fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
        first, last = int(fields[45]), int(fields[46])
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(first)
            memory.write(os.fsencode("\0".join([*script, *words]))[: last - first - 1].ljust(last - first, b"\0"))
    sys.argv[1:] = words
    return words
