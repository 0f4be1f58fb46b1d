"""What a killed process was writing goes: model-sized folders outside of runs, and attempts within."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleet import launches
from fleet.context import WorkerOptions
from fleet.history import History, opened
from fleet.host import Host
from fleet.recipe import Recipe
from fleet.run import create_run, open_run
from fleet.scratch import scratch
from fleet.work import Failed, Maker, Work
from fleet.worker import Worker
from tests.test_unfit import Plans

MAKER = """
import sys, time
from pathlib import Path
from fleet.scratch import scratch
with scratch("model", Path(sys.argv[1])) as place:
    (place / "model.safetensors").write_bytes(bytes(1 << 20))
    print(place, flush=True)
    time.sleep(600)
"""


def maker(base: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen([sys.executable, "-c", MAKER, str(base)], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_process_leaves_is_removed_by_the_next_and_what_a_living_one_has_is_not(tmp_path):
    (killed, left), (living, kept) = maker(tmp_path), maker(tmp_path)
    try:
        living.send_signal(signal.SIGSTOP)  # it says nothing, and is not dead
        killed.kill()
        killed.wait()
        assert left.is_dir()
        with scratch("model", tmp_path) as mine, scratch("model", tmp_path) as other:
            assert not left.exists() and (kept / "model.safetensors").is_file()
            assert mine != other and {*tmp_path.iterdir()} == {mine, other, kept}
        assert [*tmp_path.iterdir()] == [kept]
    finally:
        for process in (killed, living):
            process.kill()
            process.wait()


def test_another_kind_and_what_is_no_folder_stay(tmp_path):
    others = [tmp_path / f"{kind}-{os.uname().nodename}-{os.getuid()}-x" for kind in ("other", "model")]
    others[0].mkdir()
    others[1].symlink_to(others[0])
    with scratch("model", tmp_path):
        assert others[0].is_dir() and others[1].is_symlink()


def hopeless(work: Work) -> Mapping[str, Any]:
    if work.writer.store.name == "second":
        raise Failed("it does not converge")
    return models(work)


def models(work: Work) -> Mapping[str, Any]:
    """A member of several files; the first maker is killed in the midst of them."""
    with work.folder() as place:
        (place / "model-1.safetensors").write_bytes(bytes(1 << 20))
        if work.writer.store.name == "first":
            os.kill(os.getpid(), signal.SIGKILL)
        (place / "model-2.safetensors").write_bytes(bytes(1 << 20))
    return {"loss": 1.0}


def after_a_kill(place: Path, make: Maker) -> History:
    """One worker is killed in the midst of a member, the next one ends the run."""
    run = create_run(place, "run", {}, Host())[0]
    options = WorkerOptions(launch=launches.begin(run, {}), tick_seconds=0.1)
    plans = Plans([[Recipe("a", "x", args={"x": 1}, optional=True)], []])
    if not (child := os.fork()):
        Worker(open_run(place / "run", Host(), "first")[0], plans, make, options).run()
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    (left,) = (place / "run/files").iterdir()
    assert [each.name for each in left.iterdir()] == ["model-1.safetensors"]
    Worker(open_run(place / "run", Host(), "second")[0], plans, make, options).run()
    return opened(place / "run")


def test_of_a_member_whose_maker_is_killed_nothing_stays(tmp_path):
    outcome = after_a_kill(tmp_path, models).outcome("0/a")
    assert [each.name for each in (tmp_path / "run/files").iterdir()] == [outcome.attempt]
    assert [*outcome.files] == ["model-1.safetensors", "model-2.safetensors"]


def test_nor_where_there_is_no_member_in_the_end(tmp_path):
    assert after_a_kill(tmp_path, hopeless)["0/a"].absent == "failed"
    assert not [*(tmp_path / "run/files").iterdir()]
