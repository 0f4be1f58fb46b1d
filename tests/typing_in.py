"""A person at a terminal: programs that ask are answered."""

import os
import pty
import select
import time
from collections.abc import Mapping, Sequence

from tests.helpers import LONG, ROOT


def answered(command: Sequence[str], answers: Mapping[str, str], seconds: float = LONG) -> str:
    """Run it in a terminal, type each answer once its question stands there, and return all that was shown."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.environ["COLUMNS"] = "200"
        os.execv(command[0], list(command))
    said, left, end = "", dict(answers), time.monotonic() + seconds
    while time.monotonic() < end:
        ready, _, _ = select.select([terminal], [], [], 1.0)
        if not ready:
            continue
        try:
            data = os.read(terminal, 4096)
        except OSError:  # it has ended
            data = b""
        if not data:
            break
        said += data.decode(errors="replace")
        for question in [question for question in left if question in said]:
            os.write(terminal, left.pop(question).encode())
    os.close(terminal)
    os.waitpid(pid, 0)
    return said
