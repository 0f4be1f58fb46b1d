"""Workers of one machine are forked from a process that has loaded their libraries: they are what they would be if each
had been started by itself, whoever of them, or the server, is killed when."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fleet.forkserver import ForkedWorker, ForkServer
from fleet.processes import thread_counts
from tests.helpers import LONG, ROOT, freeze, kill, parent_of, pids, until

SCRIPT = """
import json, os, sys, threading
from fleet.forkserver import serve

def load():
    what = sys.argv[2]
    if what == "fails":
        raise ValueError("cannot be loaded")
    if what == "slow":
        os.read(0, 0) or threading.Event().wait()
    if what == "threads":
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    if what == "device":
        os.open("/dev/nvidia-of-the-test", os.O_RDONLY)

loaded = sys.argv[1] == "--forkserver"
words = serve([sys.executable, os.path.abspath(__file__)], load) if loaded else sys.argv[1:]
about = {"words": words, "argv": sys.argv[1:], "forked": loaded, "session": os.getsid(0) == os.getpid()}
print(json.dumps({**about, "pid": os.getpid(), "env": os.environ["OF_THE_TEST"]}), flush=True)
if words[0] == "waits":
    os.read(0, 1)
    sys.exit(130)
sys.exit(int(words[0]))
"""


class Place:
    """A server, and what those that it forked have said."""

    def __init__(self, folder: Path, what: str = "") -> None:
        self.script, self.out = folder / "script.py", folder / "out"
        self.script.write_text(SCRIPT)
        self.log = self.out.open("a+b", 0)
        env = {"PYTHONPATH": str(ROOT), "OF_THE_TEST": "here"}
        self.server = ForkServer([sys.executable, str(self.script)], what, folder, env, self.log)

    def fork(self, *words: str) -> ForkedWorker:
        return self.server.fork(words, self.log, self.log)

    def said(self) -> list[dict]:
        return [json.loads(line) for line in self.out.read_text().splitlines() if line.startswith("{")]

    def of(self, word: str) -> dict:
        return until(lambda: next((each for each in self.said() if word in each["words"]), None), "it has begun")


@pytest.fixture
def place(tmp_path):
    made = []

    def make(what: str = "") -> Place:
        made.append(Place(tmp_path, what))
        return made[-1]

    yield make
    for each in made:
        each.server.close()
        for one in each.said():
            kill(one["pid"])


def ended(process: ForkedWorker) -> int:
    until(lambda: process.poll() is not None, "it has ended")
    return process.poll()


def test_each_goes_on_with_its_own_words(place):
    here = place()
    processes = [here.fork(code, "of mine") for code in ("0", "3", "75")]
    assert [ended(each) for each in processes] == [0, 3, 75]
    found = here.said()
    assert sorted(each["words"][0] for each in found) == ["0", "3", "75"]
    assert all(each["argv"] == each["words"] and each["forked"] and each["session"] for each in found)
    assert {each["env"] for each in found} == {"here"} and len({each["pid"] for each in found}) == 3


def test_whoever_lists_processes_sees_the_words_of_each(place):
    here, long = place(), "x" * 1000
    (first, second) = (here.fork("waits", "this one"), here.fork("waits", long))
    one, other = here.of("this one")["pid"], here.of(long)["pid"]
    assert pids(str(here.script), "waits", "this one") == [one] and len(pids("--forkserver", str(here.script))) == 1
    shown = Path(f"/proc/{other}/cmdline").read_bytes()
    assert b"\0waits\0xxxx" in shown and b"." * 9 not in shown, "cut off where there is no more room"
    first.terminate()
    assert ended(first) == 130 and second.poll() is None, "only its own leash is let go"
    second.kill()
    assert ended(second) == -signal.SIGKILL


def test_who_gives_orders_is_gone(place, tmp_path):
    """The server ends, and each worker at its next step, by its leash."""
    program = f"""
import os, sys
from tests.test_forkserver import Place, Path
here = Place(Path({str(tmp_path)!r}))
here.fork("waits", "left behind"), here.of("left behind")
os.kill(os.getpid(), 9)
"""
    assert os.spawnve(os.P_WAIT, sys.executable, [sys.executable, "-c", program], {"PYTHONPATH": str(ROOT)}) == -9
    until(lambda: not pids(str(tmp_path / "script.py")), "nobody is left")


def test_a_server_that_was_killed(place):
    """Who was forked works on; how one of them ends nobody can say any more."""
    here = place()
    process = here.fork("waits", "an orphan")
    here.of("an orphan")
    here.server.kill()
    until(lambda: not here.server.lives, "it is gone")
    assert process.poll() is None
    with pytest.raises(OSError):
        here.fork("0")
    process.terminate()
    assert ended(process) == -signal.SIGKILL


def test_what_cannot_be_loaded(place):
    here = place("fails")
    assert ended(here.fork("0")) == 1 and "cannot be loaded" in here.out.read_text()


def test_killed_while_it_loads(place):
    here = place("slow")
    process = here.fork("0")
    process.terminate()
    assert process.poll() is None and here.server.lives, "it ends once it is there"
    process.kill()
    assert ended(process) == -signal.SIGKILL and not here.said()


@pytest.mark.parametrize("what", ["threads", "device"])
def test_who_cannot_be_forked_from_starts_them_anew(place, what):
    """A lock that a thread holds is held for ever in who is forked, and no device can be used there."""
    device = Path("/dev/nvidia-of-the-test")
    if what == "device":
        try:
            device.write_text("")
        except OSError:
            pytest.skip("NOT TESTED: nothing can be made in /dev here")
    try:
        here = place(what)
        assert ended(here.fork("7", "anew")) == 7
    finally:
        device.unlink(missing_ok=True)
    (found,) = here.said()
    assert found["words"] == ["7", "anew"] and not found["forked"] and found["session"]


def test_a_run_whose_server_and_workers_are_killed(toys):
    run = toys(max_generations=8)
    starter = run.start(2, sleep=0.05)
    until(lambda: len(run.alive()) == 2, "they work")
    first = run.alive()
    kill(first.popitem()[1])
    until(lambda: len(run.alive()) == 2, "another one is in its place")
    (server,) = pids("--forkserver", str(run.folder))
    kill(server)
    for pid in run.alive().values():
        kill(pid)
    starter.ends()
    run.same()
    assert "another takes its place" in starter.said and not pids(str(run.folder))


@pytest.mark.slow
def test_what_a_method_has_loaded_can_be_forked():
    """With a second thread each worker would load it all again."""
    from edt_evomerge import METHOD as BREEDING
    from evomerge.tournament_method import METHOD as TOURNAMENT
    from merge.evolve.search_method import METHOD as SEARCH

    libraries = {each for method in (BREEDING, TOURNAMENT, SEARCH) for each in method.libraries}
    load = "import importlib, os, sys; [*map(importlib.import_module, sys.argv[1:])]"
    words = [sys.executable, "-c", f"{load}; print(len(os.listdir('/proc/self/task')))"]
    words += ["train.member.pretraining_tasks", *libraries]
    env = {**os.environ, **thread_counts(4)}
    said = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LONG).stdout
    assert said == "1\n"


@pytest.mark.slow
def test_who_shows_the_result_has_loaded_before_and_ends_with_ctrl_c(pretraining):
    run = pretraining(max_generations=1)
    first = run.start(1)
    (shown,) = until(lambda: pids("--show", str(run.folder)), "the result is being shown", LONG)
    freeze(shown)
    server = parent_of(shown)
    assert "--forkserver" in Path(f"/proc/{server}/cmdline").read_text()
    first.send(signal.SIGINT)
    first.ends(130)
    assert "The run is over" in first.said and "Exported" not in first.said
    assert "was not shown, since that process was killed by SIGKILL. The same command shows it." in first.said
    again = run.start(1)
    again.ends()
    assert "The run is over already" in again.said and "Exported (average)" in again.said
