"""The page of a run that goes on: served on this machine, renewed while somebody looks."""

import base64
import contextlib
import hashlib
import http.client
import json
import os
import re
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fleet import launches
from fleet.report.run_reader import RunReader
from fleet.report.serving import LivePage, known, server
from fleet.run_config import UserError
from tests.browser import FAULTS, looks_right
from tests.helpers import Started, Toys, until
from tests.reporting import REPORT, reported, text_of


@contextmanager
def served(run: Toys, *more: str) -> Iterator[tuple[Started, int]]:
    started = run.run([*REPORT, str(run.folder), "--serve", "0", *more])
    port = until(lambda: re.search(r":(\d+)/", started.said), "it listens")
    yield started, int(port[1])
    started.send(signal.SIGINT)
    started.ends(0)
    assert "Traceback" not in started.said


def asked(port: int, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, {key.lower(): value for key, value in answer.getheaders()}, answer.read()


def test_a_running_one_is_shown_live(toys, browser):
    """It goes on by itself, and whoever reads is not disturbed."""
    run = toys(sleep=0.4, max_generations=6)
    going = run.start(workers=2)
    until(lambda: run.registers("00001/m0.*done"), "something is made")
    with served(run) as (_, port):
        looks_right(browser, f"http://127.0.0.1:{port}/")
        browser.open(f"http://127.0.0.1:{port}/", 400, 700)
        assert "running, 2 workers" in text_of(browser, "#state")
        browser.say("document.getElementById('config-table').open = true")
        browser.say("document.querySelector('.zoom button').click()")
        browser.say("document.getElementById('timeline-s').scrollLeft = 50")
        browser.say("window.scrollTo({top: 500, behavior: 'instant'})")
        going.ends()
        until(lambda: text_of(browser, "#state") == "finished", "the page is told of the end", pause=0.2)
        assert browser.say("document.getElementById('config-table').open") is True
        assert browser.say("Math.round(scrollY)") == 500
        assert browser.say("document.getElementById('timeline-s').scrollLeft") == 50
        assert browser.complaints == [] and browser.say(FAULTS) == []
        assert "Last finished round6" in text_of(browser, ".cards")


def test_it_answers_what_it_should_and_nothing_else(finished):
    with served(finished) as (_, port):
        code, head, said = asked(port)
        assert code == 200 and b"</html>" in said
        style, script = (re.search(rf"<{tag}>(.*?)</{tag}>".encode(), said, re.S)[1] for tag in ("style", "script"))
        for part in (style, script):
            digest = hashlib.sha256(part).digest()
            assert f"'sha256-{base64.b64encode(digest).decode()}'" in head["content-security-policy"]
        assert "default-src 'none'" in head["content-security-policy"] and "unsafe" not in str(head)
        assert asked(port, **{"If-None-Match": head["etag"]})[::2] == (304, b"")
        assert asked(port, method="HEAD")[2] == b""
        assert asked(port, Host="evil.example")[0] == 421
        assert asked(port, Host=f"evil.example:{port}")[0] == 421
        assert asked(port, Host=f"localhost:{port}")[0] == 200
        assert asked(port, "/../run.json")[0] == asked(port, "/run.json")[0] == 404
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert asked(port, method=method)[0] == 501
        busy = reported(finished.folder, "--serve", str(port), code=2)
        assert len(busy.splitlines()) == 1 and "in use" in busy and str(port) in busy


def test_those_who_dawdle_hold_nobody_up(finished):
    """Many who say nothing, say it slowly, say too much, or take nothing of what they asked for."""
    with served(finished) as (started, port), contextlib.ExitStack() as slow:
        asked(port)
        before = resident(started.process.pid)
        said = (b"", b"GET / HT", b"GET / HTTP/1.0\r\n" + b"a: b\r\n" * 10_000, b"GET /\r\n\r\n")
        for n in range(300):
            client = slow.enter_context(socket.create_connection(("127.0.0.1", port)))
            with contextlib.suppress(ConnectionError):
                client.sendall(said[n % 4])
        for _ in range(5):
            assert asked(port)[0] == 200
        assert len(os.listdir(f"/proc/{started.process.pid}/task")) < 80
        assert resident(started.process.pid) - before < 64 << 20


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_without_a_free_file_descriptor_it_waits_and_goes_on(finished):
    with served(finished) as (started, port), contextlib.ExitStack() as slow:
        pid = started.process.pid
        asked(port)
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        highest = max(map(int, os.listdir(f"/proc/{pid}/fd")))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (highest, limits[1]))
        slow.enter_context(socket.create_connection(("127.0.0.1", port)))
        before = spent(pid)
        time.sleep(1.0)
        assert spent(pid) - before < 0.3, "it asks again and again"
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        assert asked(port)[0] == 200


def spent(pid: int) -> float:
    """Seconds of a processor."""
    words = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("host, ours", [
    ("127.0.0.1:80", True), ("localhost", True), ("LOCALHOST:8400", True), ("[::1]:80", True), ("[::1]", True),
    ("10.1.2.3:99", True), ("box", True), ("box:80", True), ("evil.example", False), ("", False),
    ("127.0.0.1.evil.example:80", False), ("localhost.evil.example", False), ("box.evil.example", False), ("]", False),
])  # fmt: skip
def test_only_names_that_we_have_ourselves(host, ours):
    assert known(host, {"localhost", "box"}) is ours


def test_what_has_not_changed_is_not_read_again(finished, monkeypatch):
    reader = RunReader(finished.folder)
    live = LivePage(reader)
    first = live.now()
    monkeypatch.setattr("fleet.report.serving._EVERY", 0.0)
    before = reader.store.bytes_read
    assert all(live.now() == first for _ in range(5))
    assert reader.store.bytes_read == before and live.looks == 1
    (finished.folder / "workers/new.events").write_text(
        json.dumps({"at": time.time(), "what": "started", "machine": "new"}) + "\n"
    )
    until(lambda: live.now() != first, "the page is made afresh")
    assert live.looks == 2
    assert reader.store.bytes_read - before < 20_000, "finished rounds are not read again"


def test_a_second_look_finds_what_a_fresh_one_finds(toys):
    run = toys(algorithm="rank", population_size=3, max_generations=5).prepare()
    reader = RunReader(run.folder)
    while run.work(recipes=4) != "over":
        launches.begin(reader.store, run.config.operational())
        again, fresh = reader.look(), RunReader(run.folder).look()
        assert (again.rounds, again.failures, again.written) == (fresh.rounds, fresh.failures, fresh.written)
        assert again.tree == fresh.tree
    assert reader.look().over and len(reader.look().rounds) == 6


def test_a_page_that_cannot_be_read_any_more_says_so(finished, monkeypatch):
    live = LivePage(RunReader(finished.folder))

    def gone() -> None:
        raise UserError("the disk has gone away")

    monkeypatch.setattr(live.reader, "stamp", gone)
    assert b"the disk has gone away" in live.now()[0]


SECTIONS = "[...document.querySelectorAll('section')].map((each) => each.id)"


def test_a_page_opened_before_the_run_began_becomes_the_whole_page(toys, browser):
    """In its order, and though the first renewal fails."""
    run = toys(algorithm="rank", population_size=3, max_generations=2).prepare()
    with served(run) as (_, port):
        url = f"http://127.0.0.1:{port}/"
        browser.open(url)
        assert browser.say(SECTIONS) == ["summary", "configuration"]
        browser.say("document.querySelector('#file summary').click()")
        browser.say("document.querySelector('#file summary').focus()")
        browser.say("""{ const real = DOMParser.prototype.parseFromString; let failed = false;
            DOMParser.prototype.parseFromString = function (...all) {
              if (failed) return real.apply(this, all);
              failed = true;
              throw new Error("this time it does not work");
            }; }""")
        assert run.work() == "over"
        until(lambda: browser.say("document.body.classList.contains('away')"), "one renewal fails", pause=0.05)
        until(lambda: text_of(browser, "#state") == "finished", "the next one does not", pause=0.2)
        assert browser.say("document.body.classList.contains('away')") is False
        renewed = browser.say(SECTIONS)
        assert browser.say("document.getElementById('file').open") is True
        assert browser.say("document.activeElement === document.querySelector('#file summary')")
        links = browser.say("[...document.querySelectorAll('nav a')].map((each) => each.hash.slice(1))")
        assert links == renewed
        browser.open(url)
        assert browser.say(SECTIONS) == renewed and "family" in renewed


def test_trouble_comes_and_goes_while_somebody_looks(finished, browser, monkeypatch):
    """A file cannot be read when the page is opened, is mended, breaks again, and is mended again."""
    workers, aside = finished.folder / "workers", finished.folder / "aside"

    def harm() -> None:
        workers.rename(aside)
        workers.write_text("no folder")

    def mend() -> None:
        workers.unlink()
        aside.rename(workers)

    monkeypatch.setattr("fleet.report.serving._REST", 0.0)
    serving = server(LivePage(RunReader(finished.folder)), "127.0.0.1", 0)
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    try:
        harm()
        browser.open(f"http://127.0.0.1:{serving.server_port}/")
        assert "cannot be read now" in text_of(browser, "h1") and browser.say("document.querySelector('nav')") is None
        reason = text_of(browser, "main")
        mend()
        until(lambda: browser.say(f"{SECTIONS}.includes('family')"), "it is mended", pause=0.2)
        assert browser.say("document.body.children[1].tagName + document.body.children[2].tagName") == "HEADERNAV"
        assert browser.say("document.title").startswith("toy")
        browser.say("document.getElementById('config-table').open = true")
        browser.say("window.scrollTo({top: 400, behavior: 'instant'})")
        harm()
        until(lambda: "cannot be read now" in text_of(browser, "body"), "the trouble is told", pause=0.2)
        assert text_of(browser, "main") == reason and "workers" in reason
        assert browser.say("document.querySelectorAll('section, nav').length") == 0
        mend()
        until(lambda: browser.say(f"{SECTIONS}.includes('family')"), "it is over", pause=0.2)
        assert browser.say("document.getElementById('config-table').open") is True
        assert browser.say("Math.round(scrollY)") == 400
        assert browser.complaints == []
    finally:
        serving.shutdown()
        serving.server_close()
