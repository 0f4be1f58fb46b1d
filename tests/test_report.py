"""The page of a run, as a browser shows it: what it shows of finished, broken, long and several runs."""

import json
import re
import time
from pathlib import Path

import pytest

from fleet.report.run_reader import RunReader
from tests.browser import FAULTS, looks_right
from tests.helpers import MISHAPS, kill, state, until
from tests.reporting import BEGAN, NAMES, NASTY, long_run, reported, text_of, written


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
    first = "[...document.querySelectorAll('#loss-table tbody tr')].map((r) => r.cells[1].textContent)"
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
    kill(one := run.alive()["caesar"])
    until(lambda: state(one) in "ZX", "one is dead")  # it has no words any more before it has ended
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
    run = toys(algorithm="search", population_size=6, max_generations=4, cliff=2.0).prepare()
    assert run.work() == "over"
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
    assert file.stat().st_size < 5e6 and seconds < 60 and ready < 60
    looks_right(browser, f"file://{file}", "fitness", "workers", "family", "genome")
    assert f"Last finished round{rounds:,}" in text_of(browser, ".cards")
    assert RunReader(run).look().tokens == 4096 * 64 * rounds


def test_runs_side_by_side(toys, browser, tmp_path):
    both = [toys("one", algorithm="matching"), toys("two", algorithm="diloco", inner_steps=7)]
    for run in both:
        assert run.prepare().work() == "over"
    file = tmp_path / "compared.html"
    reported(Path("compare"), *(str(run.folder) for run in both), "--out", str(file))
    looks_right(browser, f"file://{file}", "loss-0")
    said = text_of(browser, "#differences")
    assert "INNER_STEPS57" in said and "ALGORITHMmatchingdiloco" in said and "POPULATION_SIZE" not in said
    assert browser.say("document.querySelectorAll('#loss-0 .plot > svg').length") == 2, (
        "over time and bytes; no tokens here"
    )
    assert "one/runs/toy" in text_of(browser, "h1") and "two/runs/toy" in text_of(browser, "h1")
