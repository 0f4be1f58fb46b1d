"""The run's folder: made once by a starter, bound to one configuration, and recognised by everybody else."""

import contextlib
import json
import os
import pwd
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet import faults, results_version, version
from fleet.bucket import Bucket
from fleet.disk import Disk
from fleet.disk_store import DiskStore
from fleet.host import Host
from fleet.objects import Objects
from fleet.places import address, in_bucket
from fleet.run_config import Section, UserError
from fleet.store import FOLDERS, Store, Value

PART = "copying"  # a register: whose run this will be, as long as it has no run.json
FORMAT = 2  # 1: recipes had merge, train, evaluate and publish


@dataclass(frozen=True)
class Mount:
    """What is mounted where a path lies."""

    point: str
    kind: str
    source: str

    def __str__(self) -> str:
        return f"{self.source} ({self.kind}) on {self.point}"


class NoRun(UserError):
    """A folder that is not a run's, or not there at all."""


def at(place: Path, host: Host, name: str) -> Store:
    """What is kept at a place, whatever that is."""
    if in_bucket(place):
        return Bucket(Objects(address(place)), place, host, name)
    return DiskStore(Disk(place.absolute()), host, name)


def open_run(folder: Path, host: Host, name: str) -> tuple[Store, Mapping[str, Any]]:
    """A run that exists, for a worker or a reader; never makes anything."""
    where = address(folder)
    try:
        store = at(folder, host, name)
        run = store.read("run.json")
    except (faults.Missing, faults.Refused):
        raise NoRun(f"{where}: not the folder of a run; {_instead(folder)}") from None
    except (faults.Denied, faults.Unfit) as error:
        raise UserError(f"{where}: cannot be read: {error}") from None
    if run.get("format") != FORMAT:
        its = f"format {run.get('format')}, not {FORMAT}; begun by {run.get('code') or 'an earlier one'}"
        raise UserError(f"{where}: made by another version of this project ({its}): use that one")
    if not (isinstance(run.get("id"), str) and isinstance(run.get("config"), dict)):
        raise UserError(f"{where}/run.json: has another shape than this project writes")
    for inner in FOLDERS:
        try:  # a link would lead the run's files to somewhere else
            store.expect(inner)
        except (faults.Missing, faults.Refused) as error:
            raise UserError(f"{where}/{inner}: a folder of the run is expected here: {error}") from None
    store.run_id = run["id"]
    return store, run


def _instead(folder: Path) -> str:
    """What whoever named it may have meant."""
    if in_bucket(folder):
        return "nothing of that name is in the bucket"
    with contextlib.suppress(OSError):
        if there := sorted(file.parent.name for file in folder.glob("*/run.json"))[:8]:
            return f"runs that lie in it: {', '.join(there)}"
    return "is the shared disk mounted?"


def begun(folder: Path) -> bool:
    """Whether there is a run already, or something that says it is one."""
    if in_bucket(folder):
        return bool(at(folder, Host(), "reader").stamp("run.json"))
    return (folder / "run.json").is_file()


def taken(place: Path) -> bool:
    """Whether anything is there."""
    if in_bucket(place):  # some list folders that nothing is in any more
        return bool(at(place, Host(), "reader").everything())
    return os.path.lexists(place)


def create_run(
    base: Path, project: str, bound: Mapping[str, Any], host: Host, section: type[Section] | None = None
) -> tuple[Store, bool]:
    """Make the run's folder, or join the one that is there; says whether it is new. `section` knows what keys stand for
    that an older run lacks."""
    folder = base / project
    if not in_bucket(base):
        make_base(base, host)
    name, new = f"starter-{host.token()}", False
    try:
        store, run = open_run(folder, host, name)
    except NoRun:
        _make_folder(base, project, bound, host)
        (store, run), new = open_run(folder, host, name), True
    if not in_bucket(base):
        _check_writable(folder, str(folder))
    _check_binding(folder, run, bound, section)
    return store, new


def _make_folder(base: Path, project: str, bound: Mapping[str, Any], host: Host) -> None:
    """run.json comes last: without it nothing is a run yet, and making it again does no harm. Another starter may be at
    it, too: whose run.json stands, and whether it is ours, the caller sees."""
    if not begun(base / project):
        store = ready(base / project, host, f"starter-{host.token()}")
        with _refusing(base):
            store.settle("run.json", about(bound, host))


def ready(place: Path, host: Host, name: str, may_hold: str = "") -> Store:
    """A place for a run, where nothing else is: this process may write there, and all works there that runs need."""
    with _refusing(place.parent):
        if in_bucket(place):
            store = _names_below(place, host, name)
        else:
            _make_folders(place)
            store = at(place, host, name)
        if strangers := {*store.listing("")} - {*FOLDERS, may_hold, "run.json"}:
            some = ", ".join(sorted(strangers)[:3])
            raise UserError(
                f"{address(place)}: holds files but is not a run ({some}); name another PROJECT_NAME (--out, "
                "--storage-path)"
            )
        store.prove()
    return store


def begin_copy(place: Path, host: Host, name: str, id: str) -> Store:
    """A run that is made of more than its configuration: nobody takes it for one before `end_copy`."""
    store = ready(place, host, name, may_hold=PART)
    if store.settle(PART, {"id": id}) != {"id": id}:
        raise UserError(f"{address(place)}: a part of another run's copy is there; choose another place")
    return store


def end_copy(store: Store, run: Mapping[str, Any]) -> None:
    """All of it is there."""
    store.settle("run.json", dict(run))
    with contextlib.suppress(faults.Missing):
        store.remove(PART)


def _names_below(place: Path, host: Host, name: str) -> Store:
    """In a bucket no run lies within another one, whose names its own would be among."""
    for outer in [*place.parents][: len(place.parts) - 2]:
        if begun(outer):
            raise UserError(f"{address(place)}: lies within the run {address(outer)}; choose another BASE_DIR")
    return at(place, host, name)


def _make_folders(place: Path) -> None:
    if place.is_dir() and {*os.listdir(place)} - {*FOLDERS}:
        return  # nothing is made among strangers
    disk = Disk(place.parent)
    for name in (place.name, *(f"{place.name}/{inner}" for inner in FOLDERS)):
        with contextlib.suppress(faults.Exists):
            disk.mkdir(name)
    disk.sync("")
    disk.sync(place.name)


@contextlib.contextmanager
def _refusing(base: Path) -> Iterator[None]:
    at = address(base)
    try:
        yield
    except (faults.Denied, faults.Unfit) as error:
        if in_bucket(base):
            raise UserError(f"{at}: the bucket cannot be used: {error}") from None
        raise UserError(
            f"{at}: the disk refuses what a run needs (new folders, hard links, renames that replace, fsync): {error}"
        ) from None
    except faults.Full as error:
        raise UserError(f"{at}: no room to start a run: {error}") from None


def about(bound: Mapping[str, Any], host: Host) -> Value:
    """What stands in a new run's run.json."""
    kind = results_version.kind(str(bound.get("algorithm")))
    return {
        "format": FORMAT,
        "results": kind,
        "code": version.code(),
        "id": host.token(),
        "config": dict(bound),
    }


def _check_binding(
    folder: Path, run: Mapping[str, Any], wanted: Mapping[str, Any], section: type[Section] | None = None
) -> None:
    results_version.check(folder, run)
    stands = run["config"]
    if stands.get("algorithm") != wanted.get("algorithm"):  # another method's keys mean nothing to this one
        stands, wanted = ({"algorithm": each.get("algorithm")} for each in (stands, wanted))
    elif section:
        try:
            stands = section.joined(stands, {}).bound()
        except UserError as error:
            raise UserError(f"{folder}: of another version of this project, or damaged: {error}") from None
    old, new = _flat(stands), _flat(wanted)
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    if keys:
        values = [(key, *(json.dumps(each.get(key)) for each in (old, new))) for key in sorted(keys)]
        lines = [f"  {key.upper()}: the run has {has}, now it says {says}" for key, has, says in values]
        raise UserError(
            f"{folder}: this run was started with another configuration\n" + "\n".join(lines) + "\n"
            "Restore these settings to go on with it (a default may have changed: write the run's into the file), or "
            "choose another PROJECT_NAME (--out, --storage-path) to start a new run; of edt and diloco, "
            "python -m fleet.fork goes on from one of its rounds with others."
        )


def _flat(values: Mapping[str, Any], outer: str = "") -> dict[str, Any]:
    """Of records within records, each field by itself."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{outer}{key}.") if isinstance(value, dict) and value else {f"{outer}{key}": value}
    return found


# -- the place ---------------------------------------------------------------------------------------------------------


def make_base(base: Path, host: Host) -> None:
    """BASE_DIR, made when its parent exists; refused where another disk was mounted the last time."""
    mark = base / ".base"
    try:
        now, before = mount_of(base), _remembered().get(str(base))
        if before and before != str(now) and not mark.is_file():
            raise UserError(
                f"{base}: the last time this was on {before}, now it is on {now} and empty: is the shared disk "
                f"mounted? If it really moved, remove its line from {_memory()}."
            )
        if not base.is_dir() and not base.parent.is_dir():
            raise UserError(f"BASE_DIR {base}: neither it nor its parent exists; is the shared disk mounted?")
        base.mkdir(mode=0o750, exist_ok=True)  # another starter may have been faster
        _check_writable(base, f"BASE_DIR {base}")
        if not mark.is_file():
            mark.write_text(host.token() + "\n")
    except OSError as error:  # a mount whose server is gone, too, answers so
        raise UserError(f"BASE_DIR {base}: cannot be used: {error.strerror}: {error.filename}") from None
    _remember(str(base), str(now))


def _check_writable(folder: Path, named: str) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        try:
            owner = pwd.getpwuid(folder.stat().st_uid).pw_name
        except (KeyError, OSError):
            owner = "another user"
        raise UserError(
            f"{named}: not writable for this user; it belongs to {owner}. A run is started, and gone on with, by who "
            "owns it; others of its group can look at one with GROUP_READABLE: python -m fleet.status, fleet.report"
        )


def mount_of(path: Path, table: Path = Path("/proc/self/mountinfo")) -> Mount:
    """The mount that a path lies on, by the longest mount point that leads to it. Names are bytes, of any encoding."""
    best = Mount("/", "", "")
    for line in filter(None, table.read_bytes().split(b"\n")):
        left, _, right = line.partition(b" - ")
        name = re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), left.split(b" ")[4])
        if path.is_relative_to(point := os.fsdecode(name)) and len(point) >= len(best.point):
            kind, source, *_ = map(os.fsdecode, right.split(b" "))
            best = Mount(point, kind, source)
    return best


def _memory() -> Path:
    """Which disks this user's runs lay on; kept on this machine, since an absent disk cannot tell."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "fleet" / "bases.json"


def _remembered() -> dict[str, str]:
    try:
        found = json.loads(_memory().read_text())
    except (OSError, ValueError, RuntimeError):  # the last: there is no home at all, as in some containers
        return {}
    return found if isinstance(found, dict) else {}


def _remember(base: str, mount: str) -> None:
    known = _remembered()
    if known.get(base) != mount:
        with contextlib.suppress(
            OSError, RuntimeError
        ):  # without a home it is less well protected against an absent disk
            _memory().parent.mkdir(parents=True, exist_ok=True)
            draft = _memory().with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps({**known, base: mount}, indent=1))
            draft.rename(_memory())
