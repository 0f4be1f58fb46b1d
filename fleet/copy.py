"""A run moves house: `python -m fleet.copy RUN_A RUN_B`, from a disk to a bucket, back, or between two of a kind.

All that the run's past tells and its going on needs is copied, payloads against the checksums of their registers, and
run.json last: until it is there, nobody takes what is there for a run. The same command goes on where it was cut off.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from posixpath import dirname

from fleet import faults, payload
from fleet.checksum import checksum
from fleet.claims import pulse_at, pulsing
from fleet.host import Host
from fleet.places import address, here
from fleet.plain import readable_bytes, say
from fleet.planning import BEGUN
from fleet.round_state import SlotState, parse
from fleet.run import PART, NoRun, begin_copy, end_copy, open_run
from fleet.run_config import UserError
from fleet.single_command import command
from fleet.store import Store, Unreadable, compare

_LEFT = ("tmp", "bell", "run.json", PART)  # what means nothing elsewhere, or comes last
_NEWS = (".pulse", f"/{BEGUN}")  # who is at work
_GROWING = (".events", ".log")
_ALIVE = 25.0  # seconds after which a pulse that stands still is nobody's
_TOLD = 5.0  # seconds between two words about how far it is
_WHOLE = 1 << 30


def copy(run_a: Path, run_b: Path, /) -> None:
    """Copy a run, whole and checked; nobody may work on it meanwhile. The same command goes on where it was cut off.

    For example:

        python -m fleet.copy runs/edt s3://bucket/runs/edt
    """
    host = Host()
    source, _ = open_run(here(run_a), host, "copy")
    _nobody_works(source)
    target = _opened(here(run_b), host, source.run_id)
    there, (sums, useless) = dict(target.everything()), _attempts(source)
    total = 0
    for name in _told(host, source.everything()):
        folder, attempt, *_ = [*name.split("/"), ""]
        if folder in _LEFT or name.endswith(_NEWS) or folder == "files" and attempt in useless:
            continue
        if outer := dirname(name):
            target.folder(outer)
        if folder == "files":
            total += _payload(source, target, name, sums.get(name), there.get(name))
        elif folder in ("rounds", "launches"):
            _register(source, target, name, name in there)
        elif name.endswith(_GROWING):
            _grown(source, target, name)
        else:
            target.replace(name, source.load(name, _WHOLE))
    end_copy(target, source.read("run.json"))
    checked, left = f"{readable_bytes(total)} of files checked", address(source.root)
    say(f"{address(target.root)}: the whole run, {checked}. {left} is left as")
    say("it was: go on with one of the two, as BASE_DIR says which.")


def _nobody_works(source: Store) -> None:
    """Or the copy would lack what is made meanwhile, and both would go on."""
    host, names = source.host, pulsing(source)
    before, end = {name: source.stamp(pulse_at(name)) for name in names}, host.now() + _ALIVE
    while before and host.now() < end:
        host.sleep(1.0)
        moved = [name for name, stamp in before.items() if (now := source.stamp(pulse_at(name))) and now != stamp]
        if moved:
            raise UserError(f"{address(source.root)}: {moved[0]} is at work on it: stop the run first (Ctrl-C, stop)")
        before = {name: stamp for name, stamp in before.items() if source.stamp(pulse_at(name))}


def _opened(place: Path, host: Host, run_id: str) -> Store:
    """Where the copy goes: nothing is there, or a part of it, or an older one."""
    try:
        target, _ = open_run(place, host, "copy")
        if target.run_id != run_id:
            raise UserError(f"{address(place)}: another run is there; choose another place")
        return target
    except NoRun:
        return begin_copy(place, host, "copy", run_id)


def _attempts(source: Store) -> tuple[Mapping[str, tuple[int, str]], set[str]]:
    """What registers say of files; and the attempts of void versions, which nobody reads any more."""
    sums, useless = dict[str, tuple[int, str]](), set[str]()
    for round in source.names("rounds"):
        slots = dict[str, SlotState]()
        registers = [*filter(None, map(parse, source.names(f"rounds/{round}")))]
        for each in registers:
            slots.setdefault(each.slot, SlotState()).take(each)
        for each in registers:
            if each.kind == "done":
                record = source.read(f"rounds/{round}/{each.slot}.{each.version}.done")
                if each.version != slots[each.slot].version:
                    useless.add(str(record["attempt"]))
                for name, wanted in payload.files_of(record["files"]).items():
                    sums[f"files/{record['attempt']}/{name}"] = wanted
    return sums, useless - {""}


def _payload(source: Store, target: Store, name: str, wanted: tuple[int, str] | None, there: int | None) -> int:
    """One that is there is read again; what no register names, a snapshot's file, has its checksum beside it."""
    if there is not None:
        with contextlib.suppress(faults.Damaged, faults.Missing):
            like = wanted[1] if wanted else ""
            compare(name, target.hash_of(name, like), wanted or source.hash_of(name))
            return there
        target.remove(name)
    try:
        return bring(source, target, name, wanted)
    except (faults.Damaged, faults.Missing):
        raise UserError(
            f"{address(source.root)}/{name}: is damaged: let the run go on there, which makes it again"
        ) from None


def bring(source: Store, target: Store, name: str, wanted: tuple[int, str] | None = None) -> int:
    """A file of an attempt, compared with what a register says of it, if one does, before it counts as there."""
    seen, size = checksum(wanted[1] if wanted else ""), 0
    with contextlib.closing(target.create(name)) as file:
        for block in source.blocks(name):
            seen.update(block)
            size += len(block)
            file.write(block)
        if wanted:
            compare(name, (size, seen.hexdigest()), wanted)
        file.sync()
    return size


def _register(source: Store, target: Store, name: str, there: bool) -> None:
    """People leave other files there, too."""
    try:
        value = source.read(name)
        stands = target.read(name) if there else target.settle(name, value)
    except (faults.Damaged, Unreadable):
        if parse(name.rpartition("/")[2]):
            raise
        return target.replace(name, source.load(name, _WHOLE))
    if stands != value:
        raise UserError(f"{address(target.root)}/{name}: differs: both runs have gone on since they were one")


def _grown(source: Store, target: Store, name: str) -> None:
    """What is new at its end; a part that was cut off begins a new line."""
    there = 0
    with contextlib.suppress(faults.Missing):
        there = target.tail(name).size
    if new := source.tail(name, there).data:
        with contextlib.closing(target.append(name)) as file:
            file.write(new)


def _told(host: Host, files: list[tuple[str, int]]) -> Iterator[str]:
    """One after the other; on long work, how far it is."""
    said, done, all = host.now(), 0, sum(size for _, size in files)
    for name, size in files:
        yield name
        done += size
        if host.now() - said > _TOLD:
            said = host.now()
            say(f"{readable_bytes(done)} of {readable_bytes(all)}")


if __name__ == "__main__":
    command("fleet.copy", copy)
