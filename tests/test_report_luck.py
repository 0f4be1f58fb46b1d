"""The report of a run where files, clocks and clients are not as they should be."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.report.run_reader import RunReader
from tests.helpers import ROOT, Toys, until


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Iterator[Path]:
    keys = {"algorithm": "rank", "population_size": 4, "max_generations": 4, "size": 24, "poll_seconds": 0.02}
    run = Toys(tmp_path_factory.mktemp("made"), keys)
    try:
        run.start(1).ends(0)
        yield run.folder
    finally:
        run.kill_all()


def report(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "fleet.report", *words], cwd=ROOT, capture_output=True, text=True)


def test_without_arguments_it_says_how_it_is_used():
    done = report()
    assert "Traceback" not in done.stderr and "run_dir" in done.stderr.lower().replace("-", "_")


@pytest.fixture
def spoilt(finished, tmp_path) -> Path:
    shutil.copytree(finished, tmp_path / "runs" / "spoilt")
    return tmp_path / "runs" / "spoilt"


def test_a_damaged_register_costs_its_own_place_on_the_page(spoilt):
    done = next(spoilt.glob("rounds/00002/m*.done"))
    done.write_bytes(done.read_bytes()[:20])
    assert not RunReader(spoilt).look().failures, "the round's summary has a copy"
    (spoilt / "rounds/00002/summary").unlink()
    (spoilt / "rounds/00003/m0 (copy).0.done").write_text("{}")
    launch = next(spoilt.glob("launches/*.start"))
    launch.write_bytes(launch.read_bytes()[:20])
    facts = RunReader(spoilt).look()
    assert facts.over and len(facts.rounds) > 3
    assert [each.why for each in facts.failures if "not readable: " in each.why and done.name in each.why]
    plan = spoilt / "rounds/00003/plan"
    plan.write_bytes(plan.read_bytes()[:20])
    facts = RunReader(spoilt).look()
    assert [each for each in facts.failures if "what comes after it cannot be shown" in each.why]
    assert report(str(spoilt)).returncode == 0


def test_a_clock_that_is_wrong_moves_nobody_elses(spoilt):
    before = RunReader(spoilt).look()
    for name, at in (("ahead", 9e14), ("behind", 12.0)):
        line = json.dumps({"at": at, "what": "started", "machine": name})
        (spoilt / "workers" / f"{name}-0-00000001.events").write_text(line + "\n")
    after = RunReader(spoilt).look()
    assert abs(after.now - before.now) < 60 and after.began > before.began - 86_401
    assert max(session.end for row in after.rows for session in row.sessions) <= after.now


def test_links_in_a_runs_folder_lead_nowhere(spoilt, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (spoilt / "report.html").symlink_to(precious)
    assert report(str(spoilt)).returncode == 0
    assert precious.read_text() == "mine" and not (spoilt / "report.html").is_symlink()
    assert (spoilt / "report.html").stat().st_mode & 0o777 == (spoilt / "run.json").stat().st_mode & 0o666


def test_out_follows_a_link_and_spares_what_is_no_file(spoilt, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "page.html")
    assert report(str(spoilt), "--out", str(tmp_path / "link")).returncode == 0
    assert (tmp_path / "link").is_symlink() and (tmp_path / "page.html").stat().st_size > 1000
    os.mkfifo(tmp_path / "pipe")
    for out in (tmp_path / "pipe", tmp_path, "/dev/null", ""):
        done = report(str(spoilt), "--out", str(out))
        assert done.returncode == 2 and "the name of a file is expected" in done.stderr, done.stderr


def test_those_who_leave_early_are_nobodys_trouble(finished, tmp_path):
    said = tmp_path / "said"
    with said.open("w") as log:
        words = [sys.executable, "-u", "-m", "fleet.report", str(finished), "--serve", "0"]
        server = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log)
    try:
        port = int(until(lambda: re.search(r":(\d+)/", said.read_text()), "it listens")[1])
        for last in (False, False, False, True):
            with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
                client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                if last:
                    assert client.recv(100).startswith(b"HTTP/1.0 200")
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        for _ in range(3):  # Ctrl-C that comes while Python clears something away is lost, and people press it again
            server.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(10)
                break
        assert server.poll() == 0 and "Traceback" not in said.read_text()
    finally:
        server.kill()
        server.wait()
