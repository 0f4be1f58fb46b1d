"""A conversation with far.py on one machine: it is sent along, asked line by line, and leaves nothing there."""

import json
import shlex
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import paramiko

from fleet.diary import plain
from fleet.machines import Machine
from fleet.remote.route import route_to
from fleet.remote.ssh import Connection, Unreachable

FAR = Path(__file__).with_name("far.py")
_BOOT = (
    "import sys; del sys.path[0]; "
    "exec(compile(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())), 'far', 'exec')); "
    "main(sys.argv[1])"
)


class Trouble(Exception):
    """The machine answers, and says what is wrong there."""


def command(machine: Machine, prefix: str) -> str:
    """What the machine's shell is given. Only `setup` is shell, by design; all other words are quoted."""
    python = f"exec {shlex.join([machine.python, '-u', '-c', _BOOT, prefix])}"
    if not machine.setup:
        return python
    inner = f"{{ {machine.setup}\n}} </dev/null && {python}"  # what comes on the standard input is not for it
    return f"exec {shlex.join(['bash', '-lc', inner])}"


class Link:
    def __init__(
        self, machine: Machine, seconds: float, passphrases: Mapping[Path, bytes], ssh_config: Path | None
    ) -> None:
        self.machine, self.seconds, self.closed = machine, seconds, False
        self.prefix = f"@{uuid.uuid4().hex} "  # a setup's own words may stand between the answers
        self._connection = Connection(route_to(machine, ssh_config), seconds, passphrases, ssh_config)
        self.notes = self._connection.notes
        try:
            self._channel = self._connection.execute(command(machine, self.prefix))
            self._lines = self._channel.makefile("rb")
            source = FAR.read_bytes()
            self._send(f"{len(source)}\n".encode() + source)
            self.clock = self._answer(seconds)["clock"] - time.time()  # ahead of ours by so much
        except BaseException:
            self._connection.close()
            raise

    def ask(self, verb: str, wait: float = 0.0, **words: Any) -> dict[str, Any]:
        """One question, one answer, which may take `wait` seconds longer than answers usually may."""
        self._send(json.dumps({"verb": verb, "with": words}).encode() + b"\n")
        return {} if verb == "become" else self._answer(self.seconds + wait)

    def close(self) -> None:
        self.closed = True
        self._connection.close()

    def _send(self, data: bytes) -> None:
        try:
            self._channel.sendall(data)
        except (OSError, EOFError, paramiko.SSHException):
            raise self._ended() from None

    def _answer(self, seconds: float) -> dict[str, Any]:
        """An answer that comes too late would be taken for the next one: then there is no next one."""
        try:
            return self._next(time.monotonic() + seconds)
        except TimeoutError:
            self.close()
            raise Unreachable(f"no answer within {seconds:g} s") from None
        except Unreachable:
            self.close()
            raise

    def _next(self, end: float) -> dict[str, Any]:
        try:
            while self._in_time(end) and (line := self._lines.readline()):
                text = line.decode(errors="replace")
                if text.startswith(self.prefix):
                    answer = json.loads(text[len(self.prefix) :])
                    if "problem" in answer:
                        raise Trouble(plain(answer["problem"], 1000))
                    return dict(answer)
        except TimeoutError:
            raise
        except (OSError, EOFError, ValueError, paramiko.SSHException):
            pass
        raise self._ended()

    def _in_time(self, end: float) -> bool:
        if (left := end - time.monotonic()) <= 0:
            raise TimeoutError
        self._channel.settimeout(left)
        return True

    def _ended(self) -> Exception:
        """Why far.py is not there (any more), from what the shell said last."""
        if not self._channel.status_event.wait(2.0):  # it comes after the end of the stream
            return Unreachable("the connection was lost")
        said = self._channel.makefile_stderr("rb").read(20_000).decode(errors="replace").strip().splitlines()
        code, last = self._channel.recv_exit_status(), plain(said[-1], 300) if said else ""
        if code in (126, 127):
            where = " after its setup line" if self.machine.setup else ""
            return Trouble(f"its python {self.machine.python!r} does not run there{where}: {last}")
        if code == -1:
            return Unreachable("the connection was lost")
        return Trouble(f"its shell ended with code {code}: {last or 'it said nothing'}")
