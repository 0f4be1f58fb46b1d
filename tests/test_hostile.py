"""Whoever may write to the disk writes to nobody's terminal and into nobody's browser."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fleet.faults import Fault
from fleet.host import Host
from fleet.plain import lines, plain, say, some
from fleet.report.page import page
from fleet.report.run_reader import RunReader
from fleet.run_config import UserError
from fleet.status import show as status
from fleet.store import _opened, _sealed
from tests.helpers import ROOT, Toys, kill, one_of, until
from tests.hostile import TERMINAL, WEB, changed, controls, planted, registers_of, texts


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Toys:
    keys = {"algorithm": "rank", "population_size": 3, "max_generations": 2, "size": 24}
    run = Toys(tmp_path_factory.mktemp("ended"), keys).prepare()
    assert run.work() == "over"
    return run


def copied(run: Toys, place: Path) -> Toys:
    shutil.copytree(run.place, place, dirs_exist_ok=True)
    return Toys(place, dict(run.keys))


@pytest.mark.parametrize("text, shown", [
    ("a b", "a b"), ("\x1b[2Ja", " [2Ja"), ("a\nb\tc\x9b", "a b c "), ("\u202ea\u2066\ufeff\ud800", " a   "),
    ("Ёж 机器 🧪", "Ёж 机器 🧪"), ("x" * 300, "x" * 200 + "... and 100 characters more"),
])  # fmt: skip
def test_a_line_is_plain(text, shown):
    assert plain(text) == shown


def test_one_more_is_said_itself():
    assert [some("abcde"[:n], 3) for n in (0, 1, 3, 4, 5)] == ["", "a", "a, b, c", "a, b, c, d", "a, b, c and 2 more"]


def test_several_lines_stay_so(capsys):
    assert lines("a\r\nb\rc\n\x85d") == "a\nb c\n d"
    assert lines("a\n" * 10, 4) == "a\na\n\n... and 16 characters more"
    say("a\x1b", Path("b\x07"), end="\x1b"[:0])
    assert capsys.readouterr().out == "a  b "


# -- terminals ---------------------------------------------------------------------------------------------------------


COMMANDS = {  # what a person types, and whether it shows the words of the run
    "fleet.status RUN": True, "fleet.report RUN": False, "fleet.ancestry RUN": False,
    "tests.toy.launch status FILES": True, "tests.toy.launch logs FILES": True,
    "tests.toy --config=OTHER": False, "tests.toy --worker anna RUN": False,
}  # fmt: skip


@pytest.mark.parametrize("command", one_of(COMMANDS, ["fleet.status RUN", "tests.toy.launch logs FILES"]))
def test_no_command_says_what_a_terminal_would_obey(ended, tmp_path, command):
    run = copied(ended, tmp_path)
    assert planted(run.folder, TERMINAL) > 100
    (tmp_path / "machines.json").write_text('[{"host": "localhost"}]')
    config = {"project_name": "toy", "base_dir": "runs", **run.keys}
    (tmp_path / "evolution.json").write_text(json.dumps(config))
    (tmp_path / "other.json").write_text(json.dumps({**config, "size": 25}))
    files = f"--config={tmp_path / 'evolution.json'} --machines={tmp_path / 'machines.json'}"
    words = command.replace("FILES", files).replace("OTHER", str(tmp_path / "other.json")).split()
    words = [str(run.folder) if word == "RUN" else word for word in words]
    assert not controls(said := spoken([sys.executable, "-m", *words])), said
    assert not COMMANDS[command] or "[red]x[/red]" in said, said


def test_the_starter_says_nothing_that_a_terminal_would_obey(ended, tmp_path):
    run = copied(ended, tmp_path)
    planted(run.folder, TERMINAL)
    (tmp_path / "evolution.json").write_text(json.dumps({"project_name": "toy", "base_dir": "runs", **run.keys}))
    (run.folder / "run.json").write_bytes((ended.folder / "run.json").read_bytes())
    said = spoken([sys.executable, "-m", "tests.toy", f"--config={tmp_path / 'evolution.json'}"])
    assert not controls(said) and "[red]x[/red]" in said and "Its last round:" in said


@pytest.mark.slow
def test_a_starter_tells_plainly_why_a_run_stopped(toys):
    run = toys(sleep=60.0, restarts=0)
    first = run.start(workers=1)
    (worker,) = until(run.alive, "a worker")
    until(lambda: run.makers("00000/.*"), "it is at work")
    with next(run.folder.glob("workers/local-*.log")).open("a", errors="replace") as log:
        log.write(f"{TERMINAL}\n")
    kill(run.alive()[worker])
    first.ends(1)
    assert not controls(first.said) and "[link=http://evil.example]y" in first.said
    second = run.start(workers=1)
    until(run.alive, "a worker")
    (run.folder / "launches/00002.stop").write_bytes(_sealed({"by": "x", "why": TERMINAL}))
    second.ends(1)
    assert not controls(second.said) and "The run stopped: " in second.said and "[red]x[/red]" in second.said
    (run.folder / "launches/end").write_bytes(_sealed({"by": "x", "why": TERMINAL}))
    third = run.start(workers=1)
    third.ends(0)
    assert not controls(third.said) and "The run was ended by " in third.said and "[red]x[/red]" in third.said


def spoken(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert b"Traceback" not in done.stderr, done.stderr
    return (done.stdout + done.stderr).decode(errors="surrogateescape")


def test_a_damaged_word_of_a_register_is_told_plainly(ended, tmp_path, capsys, monkeypatch):
    """Each in turn, also those that hold the run together."""
    monkeypatch.setattr(Host, "sleep", lambda host, seconds: None)  # what is read again is damaged again
    run = copied(ended, tmp_path)
    kinds: dict[tuple[str, ...], int] = {}
    for file in registers_of(run.folder):
        whole = file.read_bytes()
        value = _opened(whole, file.name)
        file.chmod(0o600)
        for at in texts(value):
            kind = (file.name.split(".")[2:] or [file.name])[0], *(str(key) for key in at if not isinstance(key, int))
            if kinds.setdefault(kind, 0) < 2:
                kinds[kind] += 1
                file.write_bytes(_sealed(changed(value, at, TERMINAL)))
                for show in (status, lambda folder: page(RunReader(folder).look())):
                    try:
                        show(run.folder)
                    except (UserError, Fault) as error:
                        say(error)
                said = capsys.readouterr()
                assert not controls(said.out + said.err), f"{file.name} {at}"
        file.write_bytes(whole)
    assert len(kinds) > 15


# -- browsers ----------------------------------------------------------------------------------------------------------


TAGS = "[...new Set([...document.querySelectorAll('*')].map((each) => each.tagName))].sort()"
ODD = """[...document.querySelectorAll('*')].flatMap((each) => [...each.attributes].filter((a) =>
  /^on|^srcdoc$/.test(a.name)
  || (/^(href|src|action|xlink:href|formaction)$/.test(a.name) && !/^#/.test(a.value))
  || (a.name === 'style' && /url|evil/.test(a.value))).map((a) => `${each.tagName} ${a.name}=${a.value}`))"""


def test_no_text_of_a_run_becomes_a_part_of_its_page(ended, browser, tmp_path):
    clean = tmp_path / "clean.html"
    plant(ended, tmp_path / "harmless", "harmless", clean)
    browser.open(f"file://{clean}")
    tags, odd = browser.say(TAGS), browser.say(ODD)
    for n, text in enumerate(WEB):
        file = tmp_path / f"{n}.html"
        plant(ended, tmp_path / str(n), text, file)
        browser.open(f"file://{file}")
        assert browser.complaints == [], text
        assert browser.say("typeof window.ran") == "undefined" and browser.say("document.scripts.length") == 1
        assert browser.say(TAGS) == tags, text
        assert browser.say(ODD) == odd, text
        assert browser.say(f"document.body.textContent.includes({json.dumps(text[:20])})"), "it is shown as text"


def plant(run: Toys, place: Path, text: str, file: Path) -> None:
    copy = copied(run, place)
    planted(copy.folder, text)
    named = copy.folder.rename(copy.folder.with_name(text.replace("/", "|")))
    file.write_text(page(RunReader(named).look(), live=False))
