"""A machine's supervisor: starts its workers, starts them again when they crash, and writes down how each one ended.

Started by `agent.start` with an order on its standard input; it outlives the connection. Bare Python, so that it is
there in a moment and small beside its workers. workers/MACHINE.supervisor tells people what it knows; nothing acts on
that file.
"""

import contextlib
import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fleet.seats import OutOfMemoryKills, Seat

_OURS = ("again_at", "process")  # of a seat: what means nothing to others
_BEAT = 0.1
_TOLD = 10.0  # seconds until it writes again, so that a silent supervisor is seen to be gone
_LINKS = os.O_NOFOLLOW | os.O_NONBLOCK  # who else writes to the disk must not lead us to other files


@dataclass
class SupervisedSeat(Seat):
    """A seat on this machine: its device and the process that sits there."""

    env: Any = None
    name: str = ""
    pid: int = 0
    born: str = ""
    said: str = ""  # how the last process ended
    process: subprocess.Popen[bytes] | None = None


class Supervisor:
    def __init__(self, order: dict[str, Any]) -> None:
        os.umask(order["umask"])
        self.order = order
        self.posts = [SupervisedSeat(number, env=env) for number, env in enumerate(order["seats"], order["first"])]
        self.shipper: subprocess.Popen[bytes] | None = None
        self.workers = self._own_folder() if _is_address(order["run"]) else _folder_of(order["run"], order["run_id"])
        self.signals = self.passed_on = 0
        self.memory = OutOfMemoryKills()
        self.lock = _only_one(order["locks"], order["lock"])

    def _own_folder(self) -> int:
        """Of a run in a bucket: what is written here is brought there by a process that ends after this one."""
        order = self.order
        place = Path(order["locks"]).with_name("logs") / f"{order['lock']}-{order['machine']}"
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        words = [order["python"], "-m", "fleet.remote.shipping", str(place), order["run"]]
        self.shipper = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=order["code"],
            start_new_session=True,
        )  # fmt: skip
        return os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)

    def run(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, self._signal)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for post in self.posts:
            self._sit(post)
        self._tell()
        print(json.dumps(self.state()), flush=True)
        _let_go()
        told = time.monotonic()
        while any(post.code is None for post in self.posts):
            self._forward()
            self.memory.look(time.monotonic())
            if [post for post in self.posts if self._changed(post)] or time.monotonic() - told > _TOLD:
                self._tell()
                told = time.monotonic()
            time.sleep(_BEAT)
        self._tell()

    def state(self) -> dict[str, Any]:
        seats = [{key: value for key, value in vars(post).items() if key not in _OURS} for post in self.posts]
        about = {key: self.order[key] for key in ("machine", "launch", "digest")}
        return {
            **about, "host": os.uname().nodename, "boot": _boot(), "pid": os.getpid(), "born": _born(os.getpid()),
            "seats": seats,
        }  # fmt: skip

    # -- seats ---------------------------------------------------------------------------------------------------------

    def _sit(self, post: SupervisedSeat) -> None:
        """Start a process; what the machine cannot do now it may be able to do later."""
        order = self.order
        post.name = f"{order['machine']}-{post.number}-{uuid.uuid4().hex[:8]}"
        command = [order["python"], *order["command"], "--worker", post.name, order["run"]]
        try:
            with os.fdopen(self._log(post), "ab") as log:
                post.process = subprocess.Popen(
                    [*command, "--launch", str(order["launch"])], stdin=subprocess.DEVNULL, stdout=log,
                    stderr=subprocess.STDOUT, cwd=order["code"], env={**os.environ, **post.env}, start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            post.said, post.again_at = f"cannot be started: {error}", time.monotonic() + _TOLD
            return self._look_anew()
        post.pid, post.born = post.process.pid, _born(post.process.pid)
        post.started, post.again_at = time.monotonic(), None

    def _changed(self, post: SupervisedSeat) -> bool:
        now = time.monotonic()
        if due := post.process is None and post.code is None and now >= (post.again_at or 0.0):
            self._sit(post)
        if due or post.process is None or (code := post.process.poll()) is None:
            return due
        post.process = None
        post.said = self.memory.ending(code, now)
        again = post.ended(code, now, self.order["restarts"], leaving=bool(self.signals))
        self._note(post, f"{post.name} {post.said}{'; another takes its place' if again else ''}")
        return True

    def _forward(self) -> None:
        """The first signal lets each worker end at its next step; the second, or a SIGQUIT, ends it at once."""
        if self.signals == self.passed_on:
            return
        self.passed_on = self.signals
        for post in self.posts:
            if post.process and self.signals == 1:
                post.process.terminate()
            elif post.process:
                os.killpg(post.process.pid, signal.SIGKILL)
            elif post.code is None:
                post.code = 130

    def _signal(self, number: int, _: Any) -> None:
        self.signals += 2 if number == signal.SIGQUIT else 1

    # -- what people read ----------------------------------------------------------------------------------------------

    def _log(self, post: SupervisedSeat) -> int:
        name = f"{self.order['machine']}-{post.number}.log"
        log = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _LINKS, 0o640, dir_fd=self.workers)
        if not stat.S_ISREG(os.fstat(log).st_mode):
            os.close(log)
            raise OSError(f"{name} is not a file")
        os.set_blocking(log, True)
        return log

    def _note(self, post: SupervisedSeat, line: str) -> None:
        with contextlib.suppress(OSError), os.fdopen(self._log(post), "a") as log:  # a full disk must not end it
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")

    def _tell(self) -> None:
        name = f"{self.order['machine']}.supervisor"
        draft = f"{name}.{uuid.uuid4().hex}"
        try:
            file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _LINKS, 0o640, dir_fd=self.workers)
            with os.fdopen(file, "w") as text:
                text.write(json.dumps(self.state()))
            os.rename(draft, name, src_dir_fd=self.workers, dst_dir_fd=self.workers)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(draft, dir_fd=self.workers)
            self._look_anew()

    def _look_anew(self) -> None:
        """The mount may have died and come back: the old handle means the dead one for ever."""
        if self.shipper:
            return
        with contextlib.suppress(SystemExit, OSError):
            workers = _folder_of(self.order["run"], self.order["run_id"], (0.0,))
            os.close(self.workers)
            self.workers = workers


def _is_address(run: str) -> bool:
    return "://" in run


def _folder_of(run: str, run_id: str, waits: tuple[float, ...] = (0.1, 0.5, 2.0, 0.0)) -> int:
    """A handle on workers/ of the very run that is meant; it stays the same when something is mounted over it."""
    for wait in waits:  # a network disk may answer wrongly once
        try:
            found = json.loads(Path(run, "run.json").read_text().splitlines()[0]).get("id")
            handle = os.open(Path(run, "workers"), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            break
        except (OSError, ValueError, IndexError, AttributeError) as error:
            why = error
            time.sleep(wait)
    else:
        raise SystemExit(f"{run}: not the folder of a run; is the shared disk mounted? {why}")
    if found != run_id:
        raise SystemExit(f"{run}: another run than the one that was meant ({found}, not {run_id})")
    return handle


def _only_one(folder: str, name: str) -> IO[str]:
    """No second one in the same place; the lock ends with this process. The folder may be seen by other machines, of
    which containers on one kernel each count."""
    file = Path(folder, f"{name}-{_boot()}-{os.stat('/proc/self/ns/pid').st_ino}.lock").open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise SystemExit("another supervisor of this run is there already") from None
    return file


def _let_go() -> None:
    """Nothing more is said to whoever started us."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _born(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()[19]
    except OSError:
        return ""


if __name__ == "__main__":
    Supervisor(json.load(sys.stdin)).run()
