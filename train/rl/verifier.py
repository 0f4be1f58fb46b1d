"""A verifier of the user's own, asked in a process that has a time limit and none of this one's secrets."""

import contextlib
import hashlib
import json
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
        more = {key: value for key, value in row.items() if key != "prompt"}
        said = self._asked(json.dumps({"file": self.file, "of": [row["prompt"], answer, more]}))
        self._limit = self.seconds
        found: Terms = said.get("terms", {})
        wrong = said.get("error") or next((_wrong(*each) for each in found.items() if _wrong(*each)), "")
        if wrong:
            raise UserError(f"verifier {self.file}: {first_line(ValueError(wrong))}; the answer was {answer[:80]!r}")
        return found

    def _asked(self, line: str) -> dict[str, Any]:
        process, said = self._process, b""
        assert process.stdin and process.stdout
        with contextlib.suppress(BrokenPipeError), selectors.DefaultSelector() as selector:
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(self._limit):
                return {"error": f"no answer within {self._limit:g} seconds (verifier_seconds)"}
            said = process.stdout.readline()
        found: dict[str, Any] = json.loads(said) if said else {"error": "its process ended"}
        return found


def _wrong(name: str, value: float) -> str:
    return "" if 0 <= value <= 1 else f"its term {name!r} is {value}, not from 0 to 1"


def digest_of(file: str) -> str:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise UserError(f"verifier {file}: cannot be read: {error.strerror}") from None
