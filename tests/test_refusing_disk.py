"""A disk that refuses for a while: waited for and said so by whoever could write before; others are told at once."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fleet import faults
from fleet.seats import LATER, QUICK, Seat
from tests.helpers import LONG, Toys, one_of, until

# root may write everywhere; without its capabilities it may not
PLAIN_USER = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.getuid() == 0 else ()
READ_ONLY, CLOSED = 0o555, 0o000


@contextmanager
def rights_taken(folder: Path, mode: int) -> Iterator[None]:
    """Nobody gets at what lies in a folder any more, or nobody changes it; but by handles that are open."""
    folders = [folder] if mode == CLOSED else [each for each in (folder, *folder.rglob("*")) if each.is_dir()]
    for each in folders:
        each.chmod(mode)
    try:
        yield
    finally:
        for each in folders:
            if each.exists():
                each.chmod(0o750)


@pytest.mark.parametrize("mode", one_of([READ_ONLY, CLOSED], quick=[READ_ONLY]))
def test_a_disk_that_refuses_for_a_while_is_waited_for(toys, mode):
    run: Toys = toys(max_generations=6, inner_steps=4, sleep=0.2)
    starter = run.start(2, before=PLAIN_USER)
    until(lambda: len(run.registers(r"00001/m.*done")) >= 2, "the run has begun")
    at_work = run.alive()
    with rights_taken(run.folder, mode):
        until(lambda: run.events("waits"), "whoever has something to write says that it waits")
        assert all("the disk refuses" in e["why"] for e in run.events("waits"))
        assert run.alive() == at_work and starter.process.poll() is None, "nobody gives up"
    starter.ends(0, LONG)
    assert "takes its place" not in starter.said and not run.registers(r".*\.void")
    run.same()


def test_a_worker_that_may_not_write_from_the_start_says_so_and_ends(toys):
    run: Toys = toys().prepare()
    with rights_taken(run.folder, READ_ONLY):
        refused = run.worker("w", before=PLAIN_USER)
        refused.ends(2, 30.0)
    assert "Permission denied: this process may not write there" in refused.said and "Traceback" not in refused.said
    run.start(1).ends(0)
    run.same()


def test_a_library_that_is_refused_on_the_run_s_disk_waits_with_all_others(toys, monkeypatch):
    """The same error over a file of this machine's own is a fault of the machine."""
    from tests import helpers

    run: Toys = toys().prepare()
    right, refused = helpers.maker, list[str]()

    def maker(config):
        def make(work):
            path = str(work.path("more")) if len(refused) < 4 else "/etc/shadow"
            if len(refused) < 5:
                refused.append(path)
                raise PermissionError(13, "Permission denied", path)
            return right(config)(work)

        return make

    monkeypatch.setattr(helpers, "maker", maker)
    assert run.work() == "over"
    assert len(run.events("waits")) == 4 and all("the disk refuses" in e["why"] for e in run.events("waits"))
    assert len(run.events("failed")) == 1 and "/etc/shadow" in run.events("failed")[0]["why"]
    run.same()


def test_what_a_system_s_error_means():
    def kind(name: str) -> type[faults.Fault]:
        import errno

        return type(faults.named(OSError(getattr(errno, name), ""), "x"))

    for name in ("EROFS", "EACCES", "EPERM", "EKEYEXPIRED", "EKEYREVOKED", "EKEYREJECTED", "ENOKEY"):
        assert kind(name) is faults.Denied
    for name in ("EIO", "ESTALE", "ESHUTDOWN", "EPROTO", "ENODEV", "ENOMEDIUM"):
        assert kind(name) is faults.Passing
    for name in ("EINVAL", "EOPNOTSUPP", "EMLINK", "ENAMETOOLONG"):
        assert kind(name) is faults.Unfit
    assert issubclass(faults.Denied, faults.Passing)


def test_a_seat_whose_worker_lived_is_not_given_up_when_the_disk_refuses():
    """Who dies meanwhile is followed by one that may not write at first."""
    seat = Seat(0)
    assert not seat.ended(2, 1.0, 5, leaving=False) and seat.code == 2, "it never worked here"
    seat, now = Seat(0), QUICK
    assert seat.ended(-9, now, 5, leaving=False)
    for again in range(4):
        seat.started, now = now, now + 1.0
        assert seat.ended(2, now, 5, leaving=False) and seat.again_at == now + LATER, again
    assert not seat.ended(2, now, 5, leaving=False), "not for ever"
