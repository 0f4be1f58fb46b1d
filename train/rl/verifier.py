"""A verifier of the user's own, asked in a process that has a time limit and none of this one's secrets."""

import contextlib
import hashlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from fleet.errors import first_line
from fleet.run_config import UserError
from train.rl.checkers import Terms
from train.text_sources import Row

_KEPT = ("PATH", "LANG", "LC_ALL", "TZ")  # of the environment
_START = 60.0  # seconds more for the first answer: its own imports may take a while


class Verifier:
    """`reward(prompt, answer, row)` of a file, until it is closed."""

    def __init__(self, file: str, seconds: float) -> None:
        self.file, self.seconds = file, seconds
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        program = str(Path(__file__).with_name("verifier_process.py"))
        self._process = subprocess.Popen(
            [sys.executable, "-I", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        self._limit = seconds + _START

    def __enter__(self) -> "Verifier":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def terms(self, row: Row, answer: str) -> Terms:
        """What it says of one answer, or why that cannot be used."""
        said = self._asked({"file": self.file, "of": [row["prompt"], answer, {k: v for k, v in row.items() if k != "prompt"}]})
        self._limit = self.seconds
        if "error" in said:
            raise UserError(f"verifier {self.file}: {first_line(ValueError(said['error']))}; the answer was {answer[:80]!r}")
        for name, value in said["terms"].items():
            if not (math.isfinite(value) and 0 <= value <= 1):
                raise UserError(
                    f"verifier {self.file}: its term {name!r} is {value}, not from 0 to 1; the answer was {answer[:80]!r}"
                )
        terms: Terms = said["terms"]
        return terms

    def _asked(self, what: Any) -> dict[str, Any]:
        process = self._process
        assert process.stdin and process.stdout
        line = b""
        try:
            process.stdin.write(json.dumps(what).encode() + b"\n")
            process.stdin.flush()
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                line = process.stdout.readline() if selector.select(self._limit) else b"late"
        except BrokenPipeError:
            pass
        if line == b"late":
            raise UserError(
                f"verifier {self.file}: no answer within {self._limit:g} seconds (verifier_seconds); the answer was "
                f"{what['of'][1][:80]!r}"
            )
        if not line:
            raise UserError(f"verifier {self.file}: its process ended; the answer was {what['of'][1][:80]!r}")
        found: dict[str, Any] = json.loads(line)
        return found


def digest_of(file: str) -> str:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise UserError(f"verifier {file}: cannot be read: {error.strerror}") from None
