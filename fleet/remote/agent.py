"""What runs on a machine while somebody asks about it: one line of JSON in, one out, until the stream ends.

The launcher sends this file's text over SSH, so it needs nothing there but a Python's standard library. It runs code
of the project only from a copy whose hash came over SSH too.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import hashlib
import io
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tarfile
import time
import uuid
from importlib import metadata
from pathlib import Path
from typing import Any

_TOKEN = re.compile(r"[0-9a-f]{12}-([0-9]+|here)(\.draft)?")
MARK = "FLEET_RUN"  # in the environment of every process of a run: the run's id
_CODE_LIMIT = 256 << 20


class Problem(Exception):
    """Something that a person can mend."""


# -- what is here ------------------------------------------------------------------------------------------------------


def facts(packages: list[str]) -> dict[str, Any]:
    _cache("code")  # it must be there to start anything
    devices = accelerators()
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "versions": {name: _version(name) for name in packages},
        "cores": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "devices": [name for name, _ in devices],
        "compute": [capability for _, capability in devices],
        "compiles": compiles(),
        "lingers": not _killed_at_logout(),
        "box": _box(),
    }


def _box() -> str:
    """The same for two names of one machine; containers on it are machines of their own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("mnt", "net", "pid", "uts"))])
    except OSError:
        return ""


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def accelerators() -> list[tuple[str, str]]:
    """Their names and, if the driver tells them, compute capabilities; without any library that would take them."""
    for asked in ("name,memory.total,compute_cap", "name,memory.total"):  # drivers of before 2021 know no more
        command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            break
        if done.returncode == 0:
            lines = [[*line.split(", "), ""] for line in done.stdout.splitlines() if line.strip()]
            return [(", ".join(each[:2]), each[2]) for each in lines]
    return []


def compiles() -> bool:
    """Whether torch.compile finds here what it needs."""
    return bool(shutil.which("cc")) and Path(sysconfig.get_path("include"), "Python.h").is_file()


def _killed_at_logout() -> bool:
    """systemd can be told to end all that a user has started when he logs out."""
    files = [Path("/etc/systemd/logind.conf"), *sorted(Path("/etc/systemd/logind.conf.d").glob("*.conf"))]
    said = re.findall("(?m)^KillUserProcesses=(.*)$", "\n".join(map(_text, files)))  # the last one counts
    yes = said and said[-1].strip().lower() in ("yes", "true", "1", "on")
    return bool(yes) and os.getuid() != 0 and not Path(f"/var/lib/systemd/linger/{os.environ.get('USER', '')}").exists()


# -- is it the same disk -----------------------------------------------------------------------------------------------


def show(base: str, token: str) -> dict[str, Any]:
    """Leave a token for the others, in the ways that the store needs."""
    folder = _checks(base)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink():
            raise Problem(f"{folder} is a link: remove it")
        _sweep(folder)
        draft, name = folder / f"{token}.draft", folder / token
        with draft.open("w") as file:
            file.write(token)
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, name)
        draft.unlink()  # of two names of one file, a rename would replace neither
        draft.write_text(token)
        draft.replace(name)
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    except OSError as error:
        raise Problem(f"BASE_DIR {base}: {_why(error, base)}") from None
    return {"free": shutil.disk_usage(base).free}


def seen(base: str, tokens: list[str], seconds: float) -> dict[str, Any]:
    """Which of all machines' tokens come into sight here, and after how long."""
    folder, began, missing = _checks(base), time.monotonic(), set(tokens)
    while True:
        with contextlib.suppress(OSError):
            os.listdir(folder)  # a listing refreshes what a network disk shows
        missing -= {token for token in missing if _text(folder / token) == token}
        if not missing or time.monotonic() - began > seconds:
            return {"missing": sorted(missing), "after": time.monotonic() - began}
        time.sleep(0.05)


def unshow(base: str, token: str) -> dict[str, Any]:
    with contextlib.suppress(OSError):
        (_checks(base) / token).unlink()
    return {}


def _checks(base: str) -> Path:
    return Path(base, f".check-{os.getuid()}")  # others may have runs there


def _sweep(folder: Path) -> None:
    """What a check left that was cut off; only the disk's own clock is looked at."""
    stamp = folder / f"{uuid.uuid4().hex[:12]}-0"
    stamp.touch()
    now = stamp.stat().st_mtime
    stamp.unlink()
    for entry in folder.iterdir():
        with contextlib.suppress(OSError):
            if _TOKEN.fullmatch(entry.name) and now - entry.stat().st_mtime > 3600:
                entry.unlink()


def _bytes(path: Path) -> bytes | None:
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return None


def _text(path: Path) -> str:
    return (_bytes(path) or b"").decode(errors="replace")


def _why(error: OSError, base: str) -> str:
    if not os.path.isdir(base):
        return "not there; is the shared disk mounted?"
    return f"cannot be used for a run (new files, hard links, renames that replace, fsync): {error.strerror or error}"


# -- code --------------------------------------------------------------------------------------------------------------


def receive(digest: str, data: str) -> dict[str, Any]:
    """The project's code over the wire, where the launcher does not see the disk; nothing, if it is not here yet."""
    ready = _cache("code") / digest
    if not data:
        return {"code": str(ready)} if ready.is_dir() else {}
    return {"code": str(_unpacked(base64.b64decode(data), digest))}


def fetch(tar: str, digest: str) -> dict[str, Any]:
    """The project's code from the run's folder to this machine's own disk, if it is the code that was named."""
    why = ""
    for wait in (0.0, 0.2, 1.0, 3.0):  # a network disk may show it late, or answer wrongly once
        time.sleep(wait)
        try:
            os.listdir(os.path.dirname(tar))
            with open(tar, "rb") as file:
                data = file.read(_CODE_LIMIT + 1)
            return {"code": str(_unpacked(data, digest))}
        except FileNotFoundError:
            why = f"the code {tar} is not there; is the shared disk mounted?"
        except OSError as error:
            why = f"the code {tar} cannot be read: {error.strerror}"
    raise Problem(why)


def reach(code: str, words: list[str], env: dict[str, str]) -> dict[str, Any]:
    """What that copy of the code says of a bucket, with this machine's own variables."""
    command = [sys.executable, "-m", "fleet.remote.reaching", *words]
    given = {**os.environ, **env, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=code, env=given, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    try:
        answer = dict(json.loads(done.stdout.strip().splitlines()[-1]))
    except (ValueError, IndexError):
        raise Problem(f"the bucket cannot be tried: {(done.stderr.strip().splitlines() or ['?'])[-1]}") from None
    if "problem" in answer:
        raise Problem(answer["problem"])
    return answer


def tidy(keep: list[str]) -> dict[str, Any]:
    """Forget copies of other code that no run of this user works with."""
    used = [*keep, *(each["code"] for each in _marked(""))]
    old = [each for each in _cache("code").iterdir() if each.name not in used]
    for each in old:
        shutil.rmtree(each, ignore_errors=True)
    return {"removed": len(old)}


def _unpacked(data: bytes, digest: str) -> Path:
    if len(data) > _CODE_LIMIT or hashlib.sha256(data).hexdigest() != digest:
        raise Problem("the code on the disk is not the code that was sent: somebody or something has changed it")
    ready, files = _cache("code") / digest, _plain_files(data)
    if ready.is_dir() and all(_bytes(ready / name) == each for name, each in files.items()):
        return ready
    shutil.rmtree(ready, ignore_errors=True)  # the power went, or somebody tidied up
    draft = ready.with_name(f"{digest}.{uuid.uuid4().hex}")
    try:
        draft.mkdir(mode=0o700)
        for name, each in files.items():
            (draft / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            (draft / name).write_bytes(each)
        os.sync()
        os.rename(draft, ready)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        if not ready.is_dir():  # another one was faster
            raise Problem(f"no copy of the code can be made in {ready.parent}: {error.strerror}") from None
    return ready


def _plain_files(data: bytes) -> dict[str, bytes]:
    """Plain files below the folder, nothing else; no filter of tarfile's is there in older Pythons."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        entries = [(entry, tar.extractfile(entry) if entry.isreg() else None) for entry in tar]
        for entry, file in entries:
            if not file or entry.name.startswith("/") or {"", ".", ".."} & set(entry.name.split("/")):
                raise Problem(f"the code holds something that is not a plain file: {entry.name!r}")
        return {entry.name: file.read() for entry, file in entries if file}


def _cache(inner: str) -> Path:
    """A folder of this user's own on this machine's own disk."""
    tries = []
    own = Path(os.environ.get("XDG_CACHE_HOME") or Path(os.path.expanduser("~"), ".cache"), "fleet")
    for place in (own, Path(os.environ.get("TMPDIR") or "/tmp", f"fleet-{os.getuid()}")):
        folder = place / inner
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = place.lstat()
            if status.st_uid != os.getuid() or status.st_mode & 0o022:
                raise PermissionError(1, "others may write there")
            folder.mkdir(mode=0o700, exist_ok=True)
            probe = folder / f".{uuid.uuid4().hex}"
            probe.write_text("x" * 4096)
            probe.unlink()
            return folder
        except OSError as error:
            tries.append(f"{folder}: {error.strerror}")
    raise Problem("no folder for a copy of the code can be made: " + "; ".join(tries))


# -- processes ---------------------------------------------------------------------------------------------------------


def start(code: str, order: dict[str, Any], env: dict[str, str]) -> dict[str, Any]:
    """Start a supervisor from the copy of the code, which lives on without us; wait until its workers have begun."""
    if running := [each for each in _marked(order["run_id"]) if each["what"] != "child"]:
        return {"already": running}
    supervisor = subprocess.Popen(
        _SUPERVISOR, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        cwd=code, env=_environment(order, env), start_new_session=True,
    )  # fmt: skip
    assert supervisor.stdin and supervisor.stdout
    supervisor.stdin.write(_order(order, code))
    supervisor.stdin.close()
    said = ["it said nothing"]
    for line in supervisor.stdout:  # the system's own warnings may come first
        text = line.decode(errors="replace").strip()
        if text.startswith("{"):
            return dict(json.loads(text))
        said += [text] if text else []
    raise Problem(f"no worker could be started: {said[-1]}")


def hold(place: str, tar: str, digest: str, order: dict[str, Any], env: dict[str, str]) -> None:
    """Be a supervisor in this process's place: for engines that start processes themselves, several on a machine."""
    os.umask(0o077)
    order["machine"] = re.sub(r"[^A-Za-z0-9_-]", "-", f"{socket.gethostname()}-{place}")[:40]
    order["lock"] += f"-{order['launch']}-{place}"
    order["first"] = int(os.environ.get("SLURM_LOCALID", 0))  # of this machine's tasks, who may see all of its GPUs
    if "leash" in sys.argv:  # when the parent is gone, the supervisor is asked to end
        parent = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
        if parent == 1:
            raise SystemExit("the one who started this is gone already")
    code = fetch(tar, digest)["code"]
    reader, writer = os.pipe()
    os.write(writer, _order(order, code))
    os.close(writer)
    os.dup2(reader, 0)
    os.chdir(code)
    os.execve(_SUPERVISOR[0], _SUPERVISOR, _environment(order, env))


def _environment(order: dict[str, Any], env: dict[str, str]) -> dict[str, str]:
    given = {**os.environ, **env, MARK: order["run_id"], "PYTHONDONTWRITEBYTECODE": "1"}
    given.pop("PYTHONSAFEPATH", None)  # the copy of the code is where they start
    return given


def _order(order: dict[str, Any], code: str) -> bytes:
    return json.dumps({**order, "python": sys.executable, "code": code, "locks": str(_cache("locks"))}).encode()


def running(run_id: str) -> dict[str, Any]:
    return {"processes": _marked(run_id)}


def ask_to_end(run_id: str) -> dict[str, Any]:
    """The supervisor passes it on to its workers; each ends at its next step."""
    return _signalled(run_id, "supervisor", signal.SIGTERM) or _signalled(run_id, "worker", signal.SIGTERM)


def kill(run_id: str, seconds: float) -> dict[str, Any]:
    """End all processes of the run at once, by their supervisors, which write it down, or in spite of them."""
    began = time.monotonic()
    _signalled(run_id, "supervisor", signal.SIGQUIT)
    while time.monotonic() - began < seconds / 2 and [each for each in _marked(run_id) if each["what"] == "supervisor"]:
        time.sleep(0.05)
    while found := _marked(run_id):
        for each in sorted(found, key=lambda each: each["what"] != "supervisor"):
            _end(each["pid"], signal.SIGKILL, group=each["what"] != "child")
        if time.monotonic() - began > seconds:
            break
        time.sleep(0.05)
    return {"left": found}


def _signalled(run_id: str, what: str, number: int) -> dict[str, Any]:
    found = [each for each in _marked(run_id) if each["what"] == what]
    for each in found:
        _end(each["pid"], number)
    return {"asked": len(found)} if found else {}


def _end(pid: int, number: int, group: bool = False) -> None:
    with contextlib.suppress(OSError):
        leads = group and os.getpgid(pid) == pid  # supervisors and workers lead groups of their own
        os.kill(-pid if leads else pid, number)


def _marked(run_id: str) -> list[dict[str, Any]]:
    """All processes of the run on this machine, also those that have left their group: the mark stays with them."""
    found, mark = [], f"{MARK}={run_id}".encode()
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        there = Path("/proc", entry)
        inner, words = ((_bytes(there / file) or b"").split(b"\0") for file in ("environ", "cmdline"))
        stat = _text(there / "stat").rpartition(")")[2].split()  # nothing if it has ended
        mine = mark in inner if run_id else any(each.startswith(mark) for each in inner)
        if mine and stat and stat[0] not in "ZX":
            what = (
                "supervisor" if b"fleet.remote.supervisor" in words else "worker" if b"--worker" in words else "child"
            )
            found.append({"pid": int(entry), "what": what, "code": _code_of(entry)})
    return found


def _code_of(pid: str) -> str:
    """The hash of the code that it runs, by the folder that it runs in."""
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/cwd").removesuffix(" (deleted)"))
    except OSError:
        return ""


# -- talking -----------------------------------------------------------------------------------------------------------


def become(code: str, module: str, words: list[str], env: dict[str, str] | None = None) -> None:
    """Go on as a module of the project, from the copy of its code, on the same streams."""
    os.chdir(code)
    os.umask(_umask)  # it keeps private what it writes, and knows how open a model may be that it exports
    os.environ.update(env or {})
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.execv(sys.executable, [sys.executable, "-u", "-m", module, *words])


_SUPERVISOR = [sys.executable, "-S", "-m", "fleet.remote.supervisor"]
VERBS = {
    each.__name__: each
    for each in (facts, show, seen, unshow, receive, reach, fetch, tidy, start, running, ask_to_end, kill, become)
}  # fmt: skip


_umask = 0o077  # that this process began with


def main(prefix: str) -> None:
    global _umask
    _umask = os.umask(0o077)

    def say(answer: dict[str, Any]) -> None:
        print(f"\n{prefix}{json.dumps(answer)}", flush=True)  # whatever stands on the line already

    say({"ready": os.getpid(), "clock": time.time()})
    for line in sys.stdin.buffer:
        ask = json.loads(line)
        try:
            answer = VERBS[ask["verb"]](**ask["with"]) or {}
        except Problem as problem:
            answer = {"problem": str(problem)}
        except OSError as error:
            answer = {"problem": f"{error.strerror}: {error.filename}"}
        say(answer)
