"""What lies on the disk may be damaged, hostile or absurd: made again, refused by name, passed over; never followed."""

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fleet.store import _sealed
from tests.helpers import LONG, Toys, listing, one_of, until

pytestmark = pytest.mark.timeout(120)  # nothing here may make anybody wait
TEN_HOURS = 36_000


# -- clocks ------------------------------------------------------------------------------------------------------------


def in_ten_hours() -> tuple[str, ...]:
    """A command's beginning: all that follows lives on clocks of its own, as another machine does."""
    words = ("unshare", "--time", "--monotonic", str(TEN_HOURS), "--boottime", str(TEN_HOURS))
    tried = subprocess.run([*words, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no time namespaces here (root is needed): {tried.stderr.strip()}")
    return words


@pytest.mark.slow
def test_a_monotonic_clock_ten_hours_ahead(toys):
    run: Toys = toys(population_size=3, max_generations=2, sleep=1.2).prepare()  # the third member is waited for
    for worker in (run.worker("now"), run.worker("later", before=in_ten_hours())):
        worker.ends(0)
    assert {e["worker"] for e in run.events("made")} == {"now", "later"}, "both have worked"
    assert not run.registers(r".*\.claim\.1"), "none took the other for dead"
    run.same()


def test_a_wall_clock_ten_hours_off(toys, monkeypatch):
    """Of a worker, and of the disk's server, whose time the files bear."""
    run: Toys = toys(population_size=4, max_generations=5).prepare()
    right = time.time
    for part, hours in enumerate((10, -10, 0, 24 * 365 * 20)):
        monkeypatch.setattr(time, "time", lambda hours=hours: right() + 3600 * hours)
        run.work(recipes=3, name=f"w{part}")
        for path in run.folder.rglob("*"):
            os.utime(path, (right() - 3600 * hours,) * 2)
    monkeypatch.undo()
    run.work()
    run.same()


# -- damage ------------------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    """One bit, in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def half_way(toys: Callable[..., Toys]) -> Toys:
    """A run in whose first round three of four members are made."""
    run = toys().prepare()
    run.work(recipes=4)
    assert len(run.registers(r"00001/m.\.0\.done")) == 3
    return run


def some_member(run: Toys) -> str:
    return run.registers(r"00001/m.\.0\.done")[1]


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("harm", one_of([flip, torn, longer, empty, Path.unlink], quick=[flip]))
def test_a_damaged_payload_is_made_again(toys, harm):
    run = half_way(toys)
    done = some_member(run)
    harm(run.folder / "files" / run.register(done)["attempt"] / "weights")
    if harm is flip:
        run.start(2).ends(0)
    else:
        run.work(visible_seconds=0.5)  # what is too short or not there may still be on its way
    assert run.registers(done.replace("done", "void")), "the damage is on record"
    assert run.registers(done.replace("0.done", "1.done")), "and made good"
    assert run.check_files() >= 20
    run.same()


@pytest.mark.parametrize("harm", one_of([flip, torn, empty], quick=[flip]))
@pytest.mark.parametrize("which", one_of(["a member", "a plan", "run.json"], quick=["a plan"]))
def test_a_damaged_register_stops_the_run_and_is_named(toys, harm, which):
    run = half_way(toys)
    path = {"a member": f"rounds/{some_member(run)}", "a plan": "rounds/00001/plan", "run.json": "run.json"}[which]
    harm(run.folder / path)
    run.refuses(path)
    if harm is flip:
        started = run.start(2)
        assert started.end() in (1, 2)
        assert path in started.said and "restore it from a backup" in started.said, started.said
        assert "Traceback" not in started.said


# -- hostility ---------------------------------------------------------------------------------------------------------


def other_kinds(outside: Path) -> dict[str, Callable[[Path], object]]:
    """What may stand where a plain file is expected."""

    def sock(path: Path) -> None:
        here = os.getcwd()
        os.chdir(path.parent)
        try:
            socket.socket(socket.AF_UNIX).bind(path.name)
        finally:
            os.chdir(here)

    return {
        "a pipe": os.mkfifo,
        "a folder": Path.mkdir,
        "a link out": lambda path: path.symlink_to(outside / "secret"),
        "a link to nothing": lambda path: path.symlink_to(outside / "nothing"),
        "a link to itself": lambda path: path.symlink_to(path.name),
        "a socket": sock,
    }


KINDS = list(other_kinds(Path()))


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """What no run may touch; the caller compares it before and after."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret").write_bytes(_sealed({"absent": "", "metrics": {}, "files": {}, "recipes": [], "id": "x"}))
    return folder


def test_hostile_names_are_passed_over(toys, outside):
    run = half_way(toys)
    rounds, files = run.folder / "rounds", run.folder / "files"
    names = [
        "README", "FOO.0.done", "..0.done", "-x.0.done", "m0.00.done", "m1.0.done.bak", "m0.\u0660.done", "m0.-1.done",
        "m0.0.claim.x", "m0.0.left.99999999999", "m0.0.frob.1", "\n.0.done", "x\x1b[31m.0.claim.0", "nobody.0.done",
        "nobody.7.void", ".nfs00000001", "m0.0.from.1", " .0.claim.1", "a" * 200 + ".0.done", "*.0.done",
    ]  # fmt: skip
    for name in names:
        for round in ("00001", "00002"):
            (rounds / round / name).write_text("{")
    for name in ("README", "1", "00001x", "\u0660\u0660\u0660\u0660\u0661", "99", "-0001", "x\n"):
        (rounds / name).mkdir()
        (rounds / name / "plan").write_text("{")
    for name in ("README", "00001.FOO.0.abc", "00001..0.x", "99999.m0.0.x", "00001.m0.0.x.y", "\u0661.m0.0.x", "a.b.c"):
        (files / name).mkdir()
    for name in ("README", "99999.end", "abc.stop", "00001.stop.bak", "\u0660\u0660\u0660\u0660\u0661.stop"):
        (run.folder / "launches" / name).write_text("{")
    for name in ("x.events", "\x1b[2J.events", "y.pulse", "..pulse"):
        (run.folder / "workers" / name).write_text('{"at": 1e999, "what": [1]}\n{"at": 1, "what": "[/red]"}\n\xff')
    before = listing(outside)
    run.start(2).ends(0)
    run.same()
    shown = run.run([*run.script[:1], "-m", "fleet.status", str(run.folder)])
    shown.ends(0)
    assert "\x1b" not in shown.said and "Traceback" not in shown.said
    assert listing(outside) == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", one_of(["00001/m3.0.done", "00002/plan", "00002"], quick=["00002"]))
def test_another_kind_of_file_where_a_register_belongs_is_refused(toys, outside, kind, place):
    run = half_way(toys)
    place = place.replace("m3", missing_member(run))
    target = run.folder / "rounds" / place
    if target.is_dir():
        target.rename(run.folder / "was")
        if kind == "a folder":
            return  # that is what belongs there
    elif target.exists():
        target.unlink()
    if kind == "a link out" and place == "00002":
        target.symlink_to(outside, target_is_directory=True)
    else:
        other_kinds(outside)[kind](target)
    before = listing(outside)
    run.refuses(f"rounds/{place}")
    assert listing(outside) == before


def missing_member(run: Toys) -> str:
    made = {path[6:8] for path in run.registers(r"00001/m.\.0\.done")}
    return next(slot for slot in ("m0", "m1", "m2", "m3") if slot not in made)


def test_a_link_where_a_later_round_belongs_is_not_written_through(toys, outside):
    run: Toys = toys().prepare()
    (run.folder / "rounds" / "00003").symlink_to(outside)
    before = listing(outside)
    run.refuses("rounds/00003")
    assert listing(outside) == before


@pytest.mark.parametrize("kind", one_of(KINDS, quick=["a pipe", "a link out"]))
def test_another_kind_of_file_in_place_of_a_payload_is_made_again(toys, outside, kind):
    run = half_way(toys)
    done = some_member(run)
    target = run.folder / "files" / run.register(done)["attempt"] / "weights"
    target.rename(outside / "secret")  # the very bytes that belong there: only following the link would find them
    other_kinds(outside)[kind](target)
    before = listing(outside)
    assert run.work(visible_seconds=0.5) == "over"
    assert run.registers(done.replace("done", "void"))
    assert listing(outside) == before
    run.same()


def test_a_link_in_place_of_an_attempt_is_not_followed(toys, outside):
    run = half_way(toys)
    done = some_member(run)
    attempt = run.folder / "files" / run.register(done)["attempt"]
    attempt.rename(outside / "attempt")
    attempt.symlink_to(outside / "attempt")
    before = listing(outside)
    assert run.work(visible_seconds=0.5) == "over"
    assert listing(outside) == before, "neither changed nor pruned"
    run.same()


def rewrite(run: Toys, path: str, change: Callable[[dict], object]) -> None:
    """A register with other contents and a checksum that is right: somebody means it."""
    value = run.register(path)
    change(value)
    (run.folder / "rounds" / path).write_bytes(_sealed(value))


HOSTILE_DONE: dict[str, Callable[[dict], object]] = {
    "a path out": lambda v: v["files"].update({"../../../outside/secret": [1, "0" * 64]}),
    "an absolute path": lambda v: v["files"].update({"/etc/passwd": [1, "0" * 64]}),
    "dots": lambda v: v["files"].update({"..": [1, "0" * 64]}),
    "another's folder": lambda v: v.update(attempt="../../../outside"),
    "no size": lambda v: v["files"].update(weights=["many", "0" * 64]),
    "a negative size": lambda v: v["files"].update(weights=[-1, "0" * 64]),
    "no checksum": lambda v: v["files"].update(weights=[1, ""]),
    "a list": lambda v: v.update(files=[]),
    "no metrics": lambda v: v.update(metrics=None),
    "nothing": lambda v: v.clear(),
    "seconds": lambda v: v.update(seconds=[1]),
}


@pytest.mark.parametrize("change", HOSTILE_DONE.values(), ids=HOSTILE_DONE)
def test_a_hostile_manifest_is_refused(toys, outside, change):
    run = half_way(toys)
    path = some_member(run)
    rewrite(run, path, change)
    before = listing(outside)
    run.refuses(path)
    assert listing(outside) == before


HOSTILE_PLAN: dict[str, Callable[[dict], object]] = {
    "a slot that leads out": lambda v: v["recipes"][0].update(slot="../../x"),
    "a parent that leads out": lambda v: v["recipes"][0].update(parents=["0/../../x"]),
    "a parent far away": lambda v: v["recipes"][0].update(parents=["99/m0"]),
    "a recipe that is none": lambda v: v["recipes"].append("rm -rf"),
    "recipes that are none": lambda v: v.update(recipes={"a": 1}),
    "a slot twice": lambda v: v["recipes"].append(v["recipes"][0]),
    "unknown keys": lambda v: v["recipes"][0].update(command="rm"),
}


@pytest.mark.parametrize("change", HOSTILE_PLAN.values(), ids=HOSTILE_PLAN)
def test_a_hostile_plan_is_refused(toys, outside, change):
    run = toys().prepare()
    run.work(recipes=1)
    rewrite(run, "00001/plan", change)
    before = listing(outside)
    run.refuses("00001/plan")
    assert listing(outside) == before


# -- absurdity ---------------------------------------------------------------------------------------------------------


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(100 << 20)


def deep(path: Path) -> None:
    text = b"[" * 100_000 + b"]" * 100_000
    path.write_bytes(b'{"a":' + text + b"}\n")


def sealed_deep(path: Path) -> None:
    value: object = 1
    for _ in range(30):
        value = [value]
    path.write_bytes(_sealed({"a": value}))


@pytest.mark.parametrize("which", one_of(["00001/m3.0.done", "00001/plan", "../run.json"], quick=["00001/plan"]))
@pytest.mark.parametrize("write", one_of([sparse, deep, sealed_deep], quick=[sparse]))
def test_an_absurd_register_is_refused(toys, write, which):
    run = half_way(toys)
    which = which.replace("m3", missing_member(run))
    write(run.folder / "rounds" / which)
    run.refuses(which.removeprefix("../"))


@pytest.mark.parametrize("write", one_of([sparse, deep, sealed_deep, Path.mkdir], quick=[sparse]))
def test_what_only_hurries_or_informs_may_be_absurd(toys, write):
    """The bell, pulses and event files decide nothing."""
    run = half_way(toys)
    for name in ("workers/x.pulse", "workers/x.events", *([] if write is Path.mkdir else ["bell"])):
        (run.folder / name).unlink(missing_ok=True)
        write(run.folder / name)
    run.start(2).ends(0)
    run.same()
    shown = run.run([*run.script[:1], "-m", "fleet.status", str(run.folder)])
    shown.ends(0)
    assert "Traceback" not in shown.said


def test_a_worker_does_not_hang_at_a_pipe_that_somebody_holds_open(toys):
    run = half_way(toys)
    (run.folder / "bell").unlink(missing_ok=True)
    os.mkfifo(run.folder / "bell")
    holder = os.open(run.folder / "bell", os.O_RDWR)
    try:
        started = run.start(1)
        until(lambda: started.process.poll() is not None, "it ends or goes on", LONG)
    finally:
        os.close(holder)
    if started.process.returncode == 0:
        run.same()
    else:
        assert "bell" in started.said


def test_the_json_of_events_is_read_with_care(toys):
    """One line of each kind, between two good ones."""
    run = half_way(toys)
    good = json.dumps({"at": time.time(), "what": "made", "id": "0/x", "written": 10})
    bad = [
        "",
        "{",
        "[]",
        "null",
        "7",
        '{"at": "x"}',
        '{"at": true, "what": {}}',
        "[" * 10_000,
        '{"at": 1e400}',
        '{"at": 12' + "0" * 5000 + "}",
    ]
    (run.folder / "workers" / "odd.events").write_text("\n".join([good, *bad, good]) + "\n")
    shown = run.run([*run.script[:1], "-m", "fleet.status", str(run.folder)])
    shown.ends(0)
    assert "odd" in shown.said and "Traceback" not in shown.said
    assert [e["what"] for e in run.events(of="odd")].count("made") == 2


def test_what_a_stranger_leaves_in_the_run_stops_nobody(toys):
    """A NAS makes folders of its own; a pulse, a claim and a launch may be anything."""
    run = half_way(toys)
    (run.folder / "tmp" / "@eaDir").mkdir()
    (run.folder / "workers" / "zz.pulse").write_text('{"seconds": {"m": 1%s}}' % ("0" * 400))
    (run.folder / "rounds" / f"00001/{missing_member(run)}.0.claim.0").unlink(missing_ok=True)
    (run.folder / "rounds" / f"00001/{missing_member(run)}.0.claim.0").symlink_to("nowhere")
    run.start(2, dead_seconds=1.0).ends(0)
    run.same()
    (run.folder / "launches" / "00099.start").touch()
    shown = run.run([*run.script[:1], "-m", "fleet.status", str(run.folder)])
    assert "Traceback" not in shown.said


def test_a_starter_notices_the_end_of_a_run_of_many_quick_rounds(toys):
    run: Toys = toys(population_size=2, max_generations=150, inner_steps=1)
    ended = run.start(1)
    ended.ends(0, LONG)
    assert "round 149" in ended.said
