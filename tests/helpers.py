"""Toy runs in a folder of the test's own: started for real, watched from outside, and compared by their digest."""

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from fleet import faults, launches
from fleet.context import Stopped
from fleet.digest import digest
from fleet.history import History
from fleet.host import Host
from fleet.processes import options
from fleet.run import create_run, open_run
from fleet.run_config import UserError
from fleet.work import Work
from fleet.worker import Worker
from fleet.worker_notes import events_in
from tests.toy.config import ToyConfig
from tests.toy.maker import maker
from tests.toy.strategies import strategy

ROOT = Path(__file__).resolve().parent.parent
TOY = [sys.executable, "-m", "tests.toy"]
MISHAPS = [sys.executable, "-m", "tests.mishaps"]
SOON, LONG = 60.0, 180.0  # seconds within which something happens; generous, for a busy machine


def until(condition: Callable[[], Any], what: str, seconds: float = SOON, pause: float = 0.01) -> Any:
    """Wait for something to be true, and return it."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"{what}: not within {seconds:g} s"
        time.sleep(pause)
    return found


@dataclass
class Started:
    """A process of the test's own, and what it has said."""

    process: subprocess.Popen[bytes]
    out: Path

    @property
    def said(self) -> str:
        return self.out.read_text(errors="replace")

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def freeze(self) -> None:
        freeze(self.process.pid)

    def thaw(self) -> None:
        self.send(signal.SIGCONT)

    def end(self, seconds: float = LONG) -> int:
        """Its exit code, once it has ended by itself."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end within {seconds:g} s; it said:\n{self.said[-3000:]}") from None

    def ends(self, code: int = 0, seconds: float = LONG) -> None:
        assert self.end(seconds) == code, self.said[-3000:]


@dataclass
class Toys:
    """One run of toys below `place`, which also holds its configuration and what its processes said."""

    place: Path
    keys: dict[str, Any]
    script: list[str] = field(default_factory=lambda: [*TOY])
    started: list[Started] = field(default_factory=list)

    @property
    def config(self) -> ToyConfig:
        return ToyConfig(**{**self.keys, "project_name": "toy"})

    @property
    def folder(self) -> Path:
        return self.place / "runs" / "toy"

    # -- processes ----------------------------------------------------------------------------------------------------

    def start(self, workers: int = 2, before: tuple[str, ...] = (), **changed: Any) -> Started:
        """The command that a user gives, with some keys changed from now on."""
        self.keys |= changed
        file = self.place / "evolution.json"
        file.write_text(json.dumps({"project_name": "toy", "base_dir": "runs", **self.keys}))
        return self.run([*before, *self.script, "--config", str(file), "--workers", str(workers)])

    def prepare(self, **changed: Any) -> "Toys":
        """A run that is made and launched, for workers that are started one by one."""
        self.keys |= changed
        base = self.place / "runs"
        store, _ = create_run(base, "toy", self.config.bound(), Host())
        launches.begin(store, self.config.operational())
        return self

    def worker(self, name: str, before: tuple[str, ...] = ()) -> Started:
        return self.run([*before, *self.script, "--worker", name, str(self.folder)])

    def run(self, command: list[str], **more: Any) -> Started:
        out = self.place / f"{len(self.started)}.out"
        more = {"env": {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}, **more}
        with out.open("wb") as file:
            process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                start_new_session=True, **more,
            )  # fmt: skip
        self.started.append(Started(process, out))
        return self.started[-1]

    def alive(self) -> dict[str, int]:
        """The processes that work on this run right now, by worker's name."""
        found = {}
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                line = (folder / "cmdline").read_bytes()
                words = line.decode().split("\0")
                if str(self.folder) not in words or "--worker" not in words or state(int(folder.name)) in "ZX":
                    continue
                if (folder.parent / parent_of(int(folder.name)) / "cmdline").read_bytes() != line:
                    found[words[words.index("--worker") + 1]] = int(folder.name)  # not what a worker is about to start
        return found

    def kill_all(self) -> None:
        """Everything that this test started, by number; starters first, lest they start more."""
        for each in self.started:
            if each.process.poll() is None:
                each.process.kill()
            each.process.wait()
        for pid in self.alive().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # -- in this process ----------------------------------------------------------------------------------------------

    def work(self, recipes: int | None = None, name: str = "here", **changed: Any) -> str:
        """Be a worker, which is asked to end after so many recipes."""
        host, made = Host(), 0
        store, _ = open_run(self.folder, host, name)
        config = self.config.model_copy(update={"sleep": 0.0})
        make = maker(config)

        def counted(work: Work) -> Mapping[str, Any]:
            nonlocal made
            made += 1
            metrics = make(work)
            if made == recipes:
                host.stop()
            return metrics

        how = replace(options(config, launches.latest(store)), **{"tick_seconds": 0.2, **changed})
        return Worker(store, strategy(config), counted, how).run()

    def history(self) -> History:
        history = History(open_run(self.folder, Host(), "test")[0])
        history.look(probe=8)
        return history

    def digest(self) -> str:
        """Of the run, which must be over."""
        history = self.history()
        assert history.over, f"not over: {history.first_open} rounds are finished"
        return digest(history)

    def refuses(self, path: str) -> None:
        """A worker that goes on with the run stops, and names what is wrong."""
        with pytest.raises((Stopped, UserError, faults.Fault), match=re.escape(path)):
            self.work()

    def is_over(self) -> bool:
        return self.history().over

    def same(self) -> None:
        """The run is over and has the bytes of an undisturbed one."""
        assert self.digest() == undisturbed(json.dumps(self.keys, sort_keys=True))

    # -- looking ------------------------------------------------------------------------------------------------------

    def events(self, what: str = "", of: str = "") -> list[dict[str, Any]]:
        found = []
        for path in sorted(self.folder.glob("workers/*.events")):
            if path.name.startswith(of):
                found += [{**e, "worker": path.stem} for e in events_in(path.read_bytes()) if what in ("", e["what"])]
        return found

    def registers(self, pattern: str) -> list[str]:
        """Registers below rounds/ whose path matches: "00003/.*done"."""
        paths = (str(p.relative_to(self.folder / "rounds")) for p in self.folder.glob("rounds/*/*"))
        return sorted(path for path in paths if re.fullmatch(pattern, path))

    def register(self, path: str) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((self.folder / "rounds" / path).read_text().splitlines()[0])
        return value

    def makers(self, pattern: str) -> dict[str, str]:
        """Who has claimed recipes whose path matches "00001/m.": worker -> member, from the registers."""
        claims = {path: self.register(path) for path in self.registers(pattern + r"\.[0-9]+\.claim\.[0-9]+")}
        return {claim["by"]: f"{int(path[:5])}/{path[6:].split('.')[0]}" for path, claim in claims.items()}

    def attempts(self, id: str = "") -> list[Path]:
        """The folders of all attempts, or of those at one recipe."""
        round, _, slot = id.partition("/")
        return sorted(self.folder.glob(f"files/{int(round):05d}.{slot}.*" if id else "files/*"))

    def check_files(self) -> int:
        """Every file of every member whose files are still kept has the checksum of its register; how many files."""
        checked = 0
        for path in self.registers(r".*\.done"):
            done = self.register(path)
            folder = self.folder / "files" / done["attempt"]
            if done["attempt"] and folder.exists():
                for name, (size, sha) in done["files"].items():
                    data = (folder / name).read_bytes()
                    assert (len(data), hashlib.sha256(data).hexdigest()) == (size, sha), f"{folder / name}"
                    checked += 1
        return checked


def one_of(values: Iterable[Any], quick: Iterable[Any]) -> list[Any]:
    """Parameters of a test; only these few of them are quick enough for every run of the tests."""
    quick = list(quick)
    return [
        value
        if value in quick
        else pytest.param(*(value if isinstance(value, tuple) else [value]), marks=pytest.mark.slow)
        for value in values
    ]


@lru_cache
def undisturbed(keys: str) -> str:
    """The digest that a run of this configuration has when nothing happens to it."""
    with tempfile.TemporaryDirectory() as place:
        toys = Toys(Path(place), json.loads(keys)).prepare(sleep=0.0)
        assert toys.work() == "over"
        return toys.digest()


def listing(folder: Path, contents: bool = True) -> dict[str, Any]:
    """Everything below a folder: kinds, sizes, times of change and contents."""
    found: dict[str, Any] = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        seen = path.lstat()
        text = path.read_bytes() if contents and path.is_file() and not path.is_symlink() else b""
        found[str(path.relative_to(folder))] = (
            seen.st_mode,
            seen.st_size,
            seen.st_mtime_ns,
            hashlib.md5(text).digest(),
        )
    return found


# -- processes ---------------------------------------------------------------------------------------------------------


def pids(*words: str) -> list[int]:
    """Processes whose command line has all of these."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if {*words} <= {*file.read_text(errors="replace").split("\0")}:
                found.append(int(file.parent.name))
    return found


def state(pid: int) -> str:
    """R, S, D, T (stopped), Z (ended, not waited for); X if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "X"


def parent_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]


def freeze(pid: int) -> None:
    """SIGSTOP, and it has arrived."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: state(pid) in "TZX", "a process stands still", pause=0.0005)


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


# -- file systems ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def mounted(point: Path, kind: str = "tmpfs", options: str = "size=16m", source: str = "none") -> Iterator[None]:
    """A file system for the length of a block; skips where that is not allowed."""
    point.mkdir(exist_ok=True)
    tried = subprocess.run(
        ["mount", "-t", kind, "-o", options, source, str(point)], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        pytest.skip(f"cannot mount a {kind} here (root is needed): {tried.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(point)], capture_output=True, check=False)
