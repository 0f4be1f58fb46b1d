"""The report of a run, in a real browser: nothing broken, nothing over anything else, and every number true."""

import base64
import contextlib
import hashlib
import http.client
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fleet import launches, plain
from fleet.ancestry.tree import Node
from fleet.report import curves, family, formatting
from fleet.report.facts import covered
from fleet.report.page import page
from fleet.report.run_reader import RunReader
from fleet.report.serving import LivePage, known, server
from fleet.report.svg import Scale
from fleet.run_config import UserError
from fleet.store import _opened, _sealed
from tests.browser import FAULTS, Browser, looks_right
from tests.helpers import MISHAPS, ROOT, Started, Toys, kill, listing, until
from tests.reporting import BEGAN, NAMES, NASTY, long_run

REPORT = [sys.executable, "-m", "fleet.report"]


def reported(run: Path, *more: str, code: int = 0) -> str:
    done = subprocess.run(
        [*REPORT, str(run), *more], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout if code == 0 else done.stderr


def written(run: Path, place: Path, still: bool = True) -> Path:
    """The page; nothing of the run is changed, which can be seen if nobody works on it."""
    before = listing(run)
    file = place / "page.html"
    assert reported(run, "--out", str(file)).strip() == str(file)
    assert not still or listing(run) == before, "the report only reads"
    return file


def text_of(browser: Browser, where: str) -> str:
    return str(browser.say(f"document.querySelector({json.dumps(where)}).textContent"))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Toys:
    keys = {"algorithm": "rank", "population_size": 5, "max_generations": 5, "size": 24, "sleep": 0.05}
    run = Toys(tmp_path_factory.mktemp("made"), {**keys, "poll_seconds": 0.02, "dead_seconds": 5.0})
    try:
        run.start(workers=2).ends()
    finally:
        run.kill_all()
    return run


@pytest.fixture
def finished(made, tmp_path) -> Toys:
    """A copy of it for each test."""
    shutil.copytree(made.place, tmp_path / "here")
    return Toys(tmp_path / "here", made.keys)


# -- what it shows -----------------------------------------------------------------------------------------------------


def test_a_finished_run(finished, browser, tmp_path):
    file = written(finished.folder, tmp_path)
    looks_right(browser, f"file://{file}", "fitness", "workers", "family", "genome")
    losses = {path: finished.register(path)["metrics"].get("loss") for path in finished.registers(r".*\.done")}
    best, where = min((loss, path) for path, loss in losses.items() if loss is not None)
    cards = text_of(browser, ".cards")
    assert f"{best:.4f}{int(where[:5])}/{where[6:].split('.')[0]}" in cards
    assert "Last finished round5" in cards and text_of(browser, "#state") == "finished"
    made = sum(finished.register(path)["seconds"] for path in finished.registers(r".*\.done"))
    facts = RunReader(finished.folder).look()
    there = sum(event["at"] * {"started": -1, "ended": 1}[event["what"]]
                for what in ("started", "ended") for event in finished.events(what))  # fmt: skip
    assert facts.goodput == pytest.approx(made / there, rel=0.02)
    assert facts.written == sum(event["written"] for event in finished.events("made"))
    assert f"{100 * facts.goodput:.0f} %" in cards
    assert "python -m tests.toy --config" in text_of(browser, "#configuration pre")
    shown = json.loads(text_of(browser, "#file pre"))
    assert shown["POPULATION_SIZE"] == 5 and shown["SLEEP"] == 0.05


def test_behind_every_picture_is_a_table_and_a_description(finished, browser, tmp_path):
    browser.open(f"file://{written(finished.folder, tmp_path)}")
    assert browser.say("document.querySelectorAll('main, header, nav').length") == 3
    assert browser.say("[...document.querySelectorAll('section')].every((s) => s.querySelector('h2').id)")
    pictures = "[...document.querySelectorAll('.plot > svg')]"
    for what in ("title", "desc"):
        assert browser.say(f"{pictures}.every((s) => s.querySelector(':scope > {what}').textContent.length > 1)")
    assert browser.say(f"{pictures}.every((s) => s.closest('section').querySelector('details table'))")
    ids = browser.say("[...document.querySelectorAll('[id]')].map((each) => each.id)")
    assert len(ids) == len({*ids})
    first = "[...document.querySelectorAll('#loss-table tbody tr')].map((r) => r.cells[2].textContent)"
    best = [min(finished.register(p)["metrics"]["loss"] for p in finished.registers(f"{r:05d}/.*done")) for r in (1,)]
    assert browser.say(first)[0] == f"{best[0]:.4f}"


def test_zooming_by_the_keyboard_and_without_a_script(finished, browser, tmp_path):
    file = written(finished.folder, tmp_path)
    browser.open(f"file://{file}")
    wide = "document.querySelector('#timeline-s .plot').offsetWidth"
    before = browser.say(wide)
    browser.say("document.querySelector('.zoom button').focus()")
    for kind in ("keyDown", "keyUp"):
        browser("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", text="\r" * (kind == "keyDown"))
    assert browser.say(wide) == pytest.approx(2 * before, abs=2)
    assert browser.say(FAULTS) == [] and browser.complaints == []
    browser("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(f"file://{file}")
        assert browser.say("document.querySelector('.zoom').hidden") and browser.complaints == []
        assert browser.say("document.querySelectorAll('.plot > svg').length") > 4
    finally:
        browser("Emulation.setScriptExecutionDisabled", value=False)


def test_a_run_that_has_just_been_made(toys, browser, tmp_path):
    run = toys().prepare()
    looks_right(browser, f"file://{written(run.folder, tmp_path)}")
    assert text_of(browser, "#state") == "not begun yet"
    assert "Nothing is planned yet" in text_of(browser, "#summary")


def test_a_dead_machine_is_seen_at_once(toys, browser, tmp_path):
    run = toys(sleep=60.0, population_size=2).prepare()
    run.work(recipes=1)
    for name in ("caesar", "brutus"):
        run.worker(name)
    until(lambda: len(run.makers(r"00001/m.")) == 2, "both make a member")
    kill(run.alive()["caesar"])
    until(lambda: "caesar" not in run.alive(), "one is dead")
    browser.open(f"file://{written(run.folder, tmp_path, still=False)}")
    assert "running, 1 worker" in text_of(browser, "#state")
    row = "[...document.querySelectorAll('#workers-table tr')].map((r) => r.textContent).find((t) => t.includes('%s'))"
    assert browser.say(row % "caesar").endswith("lost") and browser.say(row % "brutus").endswith("works")
    assert "✕" in text_of(browser, "#timeline-s")
    assert browser.say("document.querySelectorAll('#timeline-s .bar.lost').length") == 1
    assert browser.say("document.querySelectorAll('#timeline-s .bar.now').length") == 1
    looks_right(browser, f"file://{tmp_path / 'page.html'}", "workers")


def test_failures_stand_there_with_the_end_of_their_log(toys, browser, tmp_path):
    run = toys(script=MISHAPS, mishap="raise")
    run.start(workers=1).end()
    browser.open(f"file://{written(run.folder, tmp_path)}")
    assert "the card is on fire" in text_of(browser, ".failures")
    assert "the card is on fire" in text_of(browser, ".failures details pre")
    assert text_of(browser, "#state").startswith("stopped: ")
    looks_right(browser, f"file://{tmp_path / 'page.html'}")


def test_a_search_has_its_failures_and_its_last_round(toys, browser, tmp_path):
    run = toys(algorithm="search", population_size=6, max_generations=4, cliff=2.0)
    run.start(workers=2).ends()
    looks_right(browser, f"file://{written(run.folder, tmp_path)}", "fitness", "workers")
    failed = [path for path in run.registers(r".*\.done") if run.register(path)["absent"] == "failed"]
    assert failed and text_of(browser, "#failures").count("beyond the cliff") == len(failed)


def test_any_names_are_text(browser, tmp_path):
    """What machines are called, what went wrong: on the disk may stand anything."""
    run = long_run(tmp_path, slots=8, rounds=6, workers=8, machines=NAMES)
    (run / "workers/local-3-00000003.events").open("a").write(
        json.dumps({"at": BEGAN + 99, "what": "failed", "id": NASTY, "why": NASTY * 30}) + "\n"
        + json.dumps({"at": BEGAN + 99, "what": "waits", "why": "W" * 5000}) + "\n"
    )  # fmt: skip
    looks_right(browser, f"file://{written(run, tmp_path)}", "workers", "fitness")
    said = text_of(browser, "#workers-table")
    assert "<script>alert(1)</script>" in said and "机器学习工作站" in said and "محطة" in said
    assert not re.search("[\x00-\x08\x1b\u202e]", text_of(browser, "html"))
    assert browser.say("document.scripts.length") == 1


# -- long runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [150, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_long_run(rounds, browser, tmp_path, capsys):
    run = long_run(tmp_path, rounds=rounds)
    began = time.monotonic()
    reported(run)
    seconds, file = time.monotonic() - began, run / "report.html"
    ready = browser.open(f"file://{file}")
    with capsys.disabled():
        print(f"\n64 slots, {rounds} rounds: written in {seconds:.1f} s, {file.stat().st_size / 1e6:.2f} MB, "
              f"page ready in {ready:.2f} s")  # fmt: skip
    assert file.stat().st_size < 5e6 and seconds < 60 and ready < 10
    looks_right(browser, f"file://{file}", "fitness", "workers", "family", "genome")
    assert f"Last finished round{rounds:,}" in text_of(browser, ".cards")
    assert RunReader(run).look().tokens == 4096 * 64 * rounds


# -- live --------------------------------------------------------------------------------------------------------------


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
    before = reader.store.disk.bytes_read
    assert all(live.now() == first for _ in range(5))
    assert reader.store.disk.bytes_read == before and live.looks == 1
    (finished.folder / "workers/new.events").write_text(
        json.dumps({"at": time.time(), "what": "started", "machine": "new"}) + "\n"
    )
    until(lambda: live.now() != first, "the page is made afresh")
    assert live.looks == 2
    assert reader.store.disk.bytes_read - before < 20_000, "finished rounds are not read again"


def test_a_second_look_finds_what_a_fresh_one_finds(toys):
    run = toys(algorithm="rank", population_size=3, max_generations=5).prepare()
    reader = RunReader(run.folder)
    while run.work(recipes=4) != "over":
        launches.begin(reader.store, run.config.operational())
        again, fresh = reader.look(), RunReader(run.folder).look()
        assert (again.rounds, again.failures, again.written) == (fresh.rounds, fresh.failures, fresh.written)
        assert again.tree == fresh.tree
    assert reader.look().over and len(reader.look().rounds) == 6


# -- several runs ------------------------------------------------------------------------------------------------------


def test_runs_side_by_side(toys, browser, tmp_path):
    both = [toys("one", algorithm="matching"), toys("two", algorithm="diloco", inner_steps=7)]
    for run in both:
        run.start(workers=1).ends()
    file = tmp_path / "compared.html"
    reported(Path("compare"), *(str(run.folder) for run in both), "--out", str(file))
    looks_right(browser, f"file://{file}", "loss-0")
    said = text_of(browser, "#differences")
    assert "INNER_STEPS57" in said and "ALGORITHMmatchingdiloco" in said and "POPULATION_SIZE" not in said
    assert browser.say("document.querySelectorAll('#loss-0 .plot > svg').length") == 2, (
        "over time and bytes; no tokens here"
    )
    assert "one/runs/toy" in text_of(browser, "h1") and "two/runs/toy" in text_of(browser, "h1")


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_errors_are_told_in_a_line(finished, tmp_path):
    for there in (tmp_path, tmp_path / "nothing", tmp_path / "here" / "evolution.json"):
        said = reported(there, code=2)
        assert said.startswith(f"{there}: not the folder of a run") and len(said.splitlines()) == 1
    said = reported(finished.folder, "--out", str(tmp_path / "no" / "file.html"), code=2)
    assert "cannot be written" in said and len(said.splitlines()) == 1
    said = reported(finished.folder, "--out", str(tmp_path / ("x" * 300)), code=2)
    assert "File name too long" in said and len(said.splitlines()) == 1
    said = reported(Path("compare"), str(finished.folder), code=2)
    assert "1 folders of runs are given; from 2 to 8 are expected" in said
    assert "give one of them" in reported(finished.folder, "--serve", "--out", "x", code=2)


def test_a_page_that_cannot_be_read_any_more_says_so(finished, monkeypatch):
    live = LivePage(RunReader(finished.folder))

    def gone() -> None:
        raise UserError("the disk has gone away")

    monkeypatch.setattr(live.reader, "stamp", gone)
    assert b"the disk has gone away" in live.now()[0]


@pytest.mark.parametrize(
    "said, shown",
    [
        (formatting.count(0), "0"), (formatting.count(9_999), "9,999"), (formatting.count(75_900), "75.9 k"),
        (formatting.count(759_296), "759 k"), (formatting.count(999_999), "1,000 k"),
        (formatting.count(3.2e9), "3.2 G"),
        (plain.bytes_of(12), "12 B"), (plain.bytes_of(123_456), "123 kB"), (plain.bytes_of(1.89e9), "1.89 GB"),
        (formatting.lasting(5.16), "5.16 s"), (formatting.lasting(119), "119 s"), (formatting.lasting(129), "2.15 min"),
        (formatting.lasting(7_200), "2 h"), (formatting.lasting(3 * 86_400), "3 d"),
        (formatting.lasting(200 * 86_400), "200 d"),
    ],
)  # fmt: skip
def test_numbers_as_people_read_them(said, shown):
    assert said == shown


def test_time_that_workers_of_one_machine_share_counts_once():
    assert covered([(0, 10), (5, 15), (20, 30), (21, 22)]) == 25
    assert covered([]) == 0


def test_nothing_of_a_page_is_fetched(finished):
    said = page(RunReader(finished.folder).look())
    assert not re.search(r"(src|href)=[\"'](?!#)", said) and "@import" not in said and "url(" not in said


# -- renewed while somebody looks --------------------------------------------------------------------------------------

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


# -- every sign is explained, and nothing is drawn that cannot be compared ---------------------------------------------


def test_the_family_trees_signs_are_explained(toys, browser, tmp_path):
    run = toys(algorithm="rank", population_size=5, max_generations=4)
    run.prepare().work()
    browser.open(f"file://{written(run.folder, tmp_path)}", dark=True)
    said = text_of(browser, "#family .key")
    assert "poor" in said and "carried on unchanged" in said and "average" not in said, "only signs that are there"
    color = "getComputedStyle(document.querySelector('#family %s')).%s"
    poor, fit = (browser.say(color % (f".swatch.q{n}", "backgroundColor")) for n in (0, 6))
    assert poor == browser.say(color % ("circle.q0", "fill")) != fit == browser.say(color % ("circle.q6", "fill"))
    assert "darker" not in text_of(browser, "#family")


def test_the_key_of_the_timeline_adds_up(browser, tmp_path):
    run = long_run(tmp_path, slots=8, rounds=6, workers=8)
    browser.open(f"file://{written(run, tmp_path)}")
    said = text_of(browser, "#workers .key")
    assert "nothing was noted" in said
    assert sum(int(part) for part in re.findall(r"(\d+) %", said)) == pytest.approx(100, abs=2)


def test_numbers_stand_below_each_other(browser, tmp_path):
    run = long_run(tmp_path, slots=8, rounds=6, workers=8)
    browser.open(f"file://{written(run, tmp_path)}")
    mixed = """[...document.querySelectorAll('table')].flatMap((t) => [...t.rows[0].cells].map((_, n) =>
        new Set([...t.rows].map((r) => getComputedStyle(r.cells[n]).textAlign == "right")).size)
        ).filter((n) => n > 1)"""
    assert browser.say(mixed) == []
    look = "[...document.querySelectorAll('#loss-table th')].map((c) => getComputedStyle(c).textAlign)"
    assert {*browser.say(look)} == {"right"}
    look = look.replace("loss-table", "workers-table")
    assert browser.say(look)[:3] == ["left", "left", "right"]


def test_one_round_is_told_in_a_sentence(toys, browser, tmp_path):
    run = toys(algorithm="rank", population_size=3, max_generations=1)
    run.prepare().work()
    browser.open(f"file://{written(run.folder, tmp_path)}")
    losses = [run.register(path)["metrics"]["loss"] for path in run.registers(r"00001/m.*done")]
    assert f"best {min(losses):.4f}, mean" in text_of(browser, "#fitness")
    assert browser.say("document.querySelectorAll('#fitness .plot, #genome .plot').length") == 0
    told = text_of(browser, "#genome")
    assert "Only round 1 has genomes so far." in told and "The same for all members: lr 1.0000." in told


def test_a_round_that_sums_up_is_not_more_than_was_asked_for(toys, browser, tmp_path):
    run = toys(algorithm="tournament", population_size=4, max_generations=3)
    run.prepare().work()
    browser.open(f"file://{written(run.folder, tmp_path)}")
    assert "Last finished round43 were asked for, and the last one sums up" in text_of(browser, ".cards")


def test_only_what_was_asked_the_same_is_in_one_picture(toys, browser, tmp_path):
    both = [toys("one", algorithm="matching", max_generations=2), toys("two", algorithm="diloco", max_generations=1)]
    for run in both:
        run.prepare().work()
    new = toys("three", algorithm="matching").prepare()
    other = long_run(tmp_path / "long", slots=4, rounds=3, workers=2)
    for plan in other.glob("rounds/*/plan"):
        recipes = _opened(plan.read_bytes(), plan.name)["recipes"]
        for recipe in recipes:
            if "on" in recipe.get("args", {}):
                recipe["args"]["on"] = "other <b>tasks</b>"
        plan.write_bytes(_sealed({"recipes": recipes}))
    file = tmp_path / "compared.html"
    folders = [str(run.folder) for run in (*both, new)]
    reported(Path("compare"), *folders, str(other), "--out", str(file))
    looks_right(browser, f"file://{file}", "loss-0", "loss-1")
    assert text_of(browser, "#loss-0 h2") == "Loss on held-out text"
    assert text_of(browser, "#loss-1 h2") == "Loss on held-out text, questions: other <b>tasks</b>"
    assert "long" not in text_of(browser, "#loss-0") and "matching" not in text_of(browser, "#loss-1")
    assert browser.say("document.querySelectorAll('#loss-0-time-s circle').length") == 2, "a single point, too"
    assert "Not drawn" in text_of(browser, "#runs") and "three" in text_of(browser, "#runs > p")
    assert "SLEEP" not in text_of(browser, "#differences > .scroll")


def test_a_round_is_drawn_when_it_is_complete(toys):
    run: Toys = toys(population_size=4, max_generations=3).prepare()
    run.work(recipes=13)
    facts = RunReader(run.folder).look()
    done = [each.number for each in facts.rounds if each.complete]
    part = next(each for each in facts.rounds if not each.complete and each.members)
    assert curves.curve_of(facts, "loss", curves.by_round).places[-1] == done[-1] < part.number
    told = f"Not drawn before it is complete: round {part.number}: {part.finished} of {part.slots} finished"
    assert told in page(facts)
    run.work()
    facts = RunReader(run.folder).look()
    assert curves.curve_of(facts, "loss", curves.by_round).places[-1] >= part.number
    assert "Not drawn before" not in page(facts)


def test_one_bad_mutant_does_not_set_the_scale():
    usual = [0.01 + 0.0001 * n for n in range(40)]
    assert Scale.fair([*usual, 1e6], [*usual, 1e6]).high < 0.02
    assert Scale.fair([*usual, 1e6], [*usual, 1e6], [1e6]).high > 1e6, "but what is to be seen is"
    assert Scale.fair([1.0, 2.0, 1e6], [1.0, 2.0, 1e6]).high > 1e6, "of a few nobody is usual"


def test_genes_that_never_change_are_told_in_words():
    genomes = [{"rate": 1.0 + n, "depth": 6, "way": "slerp"} for n in range(3)]
    nodes = [Node(f"1/m{n}", f"m{n}", genome=genome) for n, genome in enumerate(genomes)]
    shown = family.genome_part(nodes)
    assert "The same for all members: <bdi>depth 6.0000; way slerp</bdi>." in shown
    assert "Only round 1 has genomes so far." in shown and shown.count('class="small"') == 1
    assert "Only round" not in family.genome_part([*nodes, Node("2/m0", "m0", genome=genomes[0])])
