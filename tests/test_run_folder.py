"""Where a run may lie: what is refused, by name and with nothing written, and what happens when the disk goes away."""

import gc
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fleet import run as place_of_runs
from fleet.credentials import settings_for
from fleet.disk_store import DiskStore
from fleet.errors import absolute
from fleet.host import Host
from fleet.local_copies import LocalCopies
from fleet.run import Mount, create_run, mount_of, open_run
from fleet.run_config import UserError, read_json
from merge.donors import located
from merge.gguf.header import read_gguf
from tests.commands import answer
from tests.helpers import Toys, listing, mounted, one_of, until
from train.cluster.finetune_options import model_named
from train.model import can_be_built
from train.source_names import check as check_sources

ROOT = Path(__file__).parent.parent
# root may write everywhere; without its capabilities it may not
PLAIN_USER = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.getuid() == 0 else ()


# -- the configuration -------------------------------------------------------------------------------------------------


def test_another_configuration_is_refused_with_its_differences(toys):
    run: Toys = toys().prepare()
    run.work(recipes=3)
    before = listing(run.place / "runs")
    starter = run.start(2, seed=2, outer_lr=0.5, population_size=6, log_level="DEBUG")
    starter.ends(2)
    assert listing(run.place / "runs") == before
    assert "another configuration" in starter.said and "PROJECT_NAME" in starter.said
    for line in ("SEED: the run has 1, now it says 2", "OUTER_LR: the run has 0.7, now it says 0.5",
                 "POPULATION_SIZE: the run has 4, now it says 6"):  # fmt: skip
        assert line in starter.said
    assert "LOG_LEVEL" not in starter.said, "that changes no result"
    run.start(2, seed=1, outer_lr=0.7, population_size=4).ends(0)
    run.same()


@pytest.mark.slow
def test_settings_that_change_no_result_may_change(toys):
    run: Toys = toys().prepare()
    run.work(recipes=3)
    run.start(3, log_level="DEBUG", poll_seconds=0.05, dead_seconds=7.0, num_machines=3, snapshot_minutes=1.0).ends(0)
    run.same()


@pytest.mark.parametrize("moment", ["before it looks", "after it has looked", "while it makes the folders"])
def test_of_two_starters_the_second_joins_or_is_refused(tmp_path, monkeypatch, moment):
    """Whoever comes second, even between the other's look and its own run.json."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "runs" / "x"
    create_run(tmp_path / "runs", "x", {"seed": 1}, Host())
    (folder / "tmp" / "somebody.draft").write_text("")

    def second(seed: int) -> tuple[DiskStore, bool]:
        """A starter that finds run.json from that moment on."""
        (folder / "run.json").rename(tmp_path / "hidden")
        called = []

        def then(call: Callable[..., Any]) -> Callable[..., Any]:
            def after_the_other_starter(*args: Any) -> Any:
                if not called:
                    called.append(shutil.copy(tmp_path / "hidden", folder / "run.json"))
                return call(*args)

            return after_the_other_starter

        place, name = {
            "before it looks": (place_of_runs, "open_run"),
            "after it has looked": (place_of_runs, "_make_folder"),
            "while it makes the folders": (DiskStore, "settle"),
        }[moment]
        with monkeypatch.context() as patched:
            patched.setattr(place, name, then(getattr(place, name)))
            made = create_run(tmp_path / "runs", "x", {"seed": seed}, Host())
        assert called
        return made

    first = (folder / "run.json").read_bytes()
    assert second(1)[0].run_id.encode() in first
    with pytest.raises(UserError, match="SEED: the run has 1, now it says 2"):
        second(2)
    assert (folder / "run.json").read_bytes() == first


# -- no place for a run ------------------------------------------------------------------------------------------------


def test_base_dir_is_made_below_what_exists_and_not_else(toys):
    run: Toys = toys()
    file = run.place / "evolution.json"
    file.write_text(json.dumps({"BASE_DIR": "no/such/runs"}))
    before = listing(run.place)
    refused = run.run([*run.script, "--config", str(file)])
    refused.ends(2)
    assert f"BASE_DIR {run.place}/no/such/runs: neither it nor its parent exists" in refused.said
    assert "mounted" in refused.said and not (run.place / "no").exists()
    assert before.keys() == listing(run.place).keys() - {refused.out.name}


@pytest.mark.parametrize("how", ["folder", "parent", "run"])
def test_a_folder_that_is_not_writable_is_refused(toys, how):
    run: Toys = toys()
    place = run.place / "runs"
    if how == "run":
        run.prepare()
    elif how == "folder":
        place.mkdir()
    closed = {"folder": place, "parent": run.place / "above", "run": run.folder / "launches"}[how]
    closed.mkdir(exist_ok=True)
    if how == "parent":
        run.keys["base_dir"] = "above/runs"
    closed.chmod(0o555)
    before = listing(closed)
    refused = run.start(1, before=PLAIN_USER)
    refused.ends(2)
    assert listing(closed) == before
    assert str(closed if how != "run" else "launches/") in refused.said and "Traceback" not in refused.said
    assert "denied" in refused.said.lower() or "not writable" in refused.said


def test_a_read_only_disk_is_refused(toys):
    run: Toys = toys()
    with mounted(run.place / "runs"):
        subprocess.run(["mount", "-o", "remount,ro", str(run.place / "runs")], check=True)
        refused = run.start(1)
        refused.ends(2)
        assert "not writable" in refused.said and not os.listdir(run.place / "runs")


def test_a_disk_without_hard_links_is_refused(toys):
    run: Toys = toys()
    with exfat(run):
        refused = run.start(2)
        refused.ends(2)
        assert "hard links" in refused.said and "Traceback" not in refused.said
        assert not run.folder.joinpath("run.json").exists() and not run.alive()


def exfat(run: Toys):
    if not shutil.which("mkfs.exfat") or not shutil.which("mount.exfat-fuse"):
        pytest.skip("no file system without hard links here: install exfatprogs and exfat-fuse")
    image = run.place / "image"
    with image.open("wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.exfat", str(image)], check=True, capture_output=True)
    return mounted(run.place / "runs", "exfat-fuse", "loop", str(image))


def test_a_folder_of_something_else_is_refused(toys):
    run: Toys = toys()
    run.folder.mkdir(parents=True)
    (run.folder / "thesis.tex").write_text("mine")
    before = listing(run.folder)
    refused = run.start(1)
    refused.ends(2)
    assert "thesis.tex" in refused.said and "PROJECT_NAME" in refused.said and listing(run.folder) == before


@pytest.mark.slow
def test_a_starter_that_died_before_run_json_did_no_harm(toys):
    run: Toys = toys()
    for name in ("tmp", "rounds", "files"):
        (run.folder / name).mkdir(parents=True)
    (run.folder / "tmp" / "starter-1.draft").write_text("{")
    run.start(1).ends(0)
    run.same()


ELSE = ["nothing", "an empty folder", "a file", "another version", "a link for files"]


@pytest.mark.parametrize("there", one_of(ELSE, quick=["an empty folder", "a link for files"]))
def test_a_worker_refuses_what_is_not_its_run(toys, there, tmp_path):
    run: Toys = toys().prepare()
    outside = tmp_path / "outside"
    outside.mkdir()
    if there in ("nothing", "an empty folder", "a file"):
        run.folder.rename(tmp_path / "away")
    match there:
        case "an empty folder":
            run.folder.mkdir()
        case "a file":
            run.folder.write_text("")
        case "another version":
            store = open_run(run.folder, Host(), "test")[0]
            value = store.read("run.json")
            (run.folder / "run.json").unlink()
            store.settle("run.json", {**value, "format": 99})
        case "a link for files":
            (run.folder / "files").rmdir()
            (run.folder / "files").symlink_to(outside)
    before = listing(tmp_path)
    refused = run.worker("w")
    refused.ends(2)
    after = listing(tmp_path)
    assert {k: v for k, v in after.items() if k in before and k not in (".", "here")} | {} == {
        k: v for k, v in before.items() if k not in (".", "here")
    }
    assert str(run.folder) in refused.said and "Traceback" not in refused.said
    if there == "another version":
        assert "format 99" in refused.said
    assert not os.listdir(outside)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["../x", "a/b", "", "-x", "x" * 65, "a.b", "a\nb"])
def test_a_worker_has_a_plain_name(toys, name):
    run: Toys = toys().prepare()
    refused = run.run([*run.script, f"--worker={name}", str(run.folder)])
    assert refused.end() != 0 and not list(run.folder.glob("workers/*"))


# -- a disk that goes away ---------------------------------------------------------------------------------------------


def test_the_mount_goes_away_and_nothing_is_written_below_it(toys):
    run: Toys = toys(sleep=0.2, inner_steps=4, max_generations=3)
    point = run.place / "runs"
    with mounted(point):
        starter = run.start(2)
        until(lambda: len(run.registers(r".*\.done")) > 3, "the run has begun")
        last = open_run(run.folder, Host(), "test")[0]  # holds on to the disk, as the workers do
        subprocess.run(["umount", "-l", str(point)], check=True)
        assert not point.joinpath("toy").exists()
        killed = next(iter(run.alive().values()))
        os.kill(killed, 9)  # its successor does not find the run
        starter.end()
    assert "ended with code 2; its place stays empty" in starter.said and "Traceback" not in starter.said
    assert "not mounted there any more" in starter.said
    assert not os.listdir(point), "no file is ever created under the bare mount point"
    assert last.names("rounds"), "everything went to the disk that was mounted before"

    refused = run.start(2)
    refused.ends(2)
    assert f"{point}: the last time this was on none (tmpfs) on {point}, now it is on" in refused.said
    assert "is the shared disk mounted?" in refused.said and not os.listdir(point)
    late = run.worker("late")
    late.ends(2)
    assert "is the shared disk mounted?" in late.said and not os.listdir(point)


@pytest.mark.slow
def test_a_disk_that_really_moved_is_used_again_once_its_line_is_removed(toys, tmp_path):
    run: Toys = toys()
    point = run.place / "runs"
    with mounted(point):
        run.start(1).ends(0)
    memory = tmp_path / "state" / "fleet" / "bases.json"
    refused = run.start(1)
    refused.ends(2)
    assert str(memory) in refused.said and str(point) in json.loads(memory.read_text())
    memory.write_text("{}")
    run.start(1).ends(0)
    run.same()


@pytest.mark.slow
def test_a_disk_that_is_mounted_elsewhere_with_its_runs_is_welcome(toys):
    """The same disk may have another name today."""
    run: Toys = toys()
    point, other = run.place / "runs", run.place / "other"
    with mounted(point):
        run.prepare()
        run.work(recipes=3)
        other.mkdir()
        subprocess.run(["cp", "-a", f"{point}/.", str(other)], check=True)
    subprocess.run(["mount", "--bind", str(other), str(point)], check=True)
    try:
        run.start(1).ends(0)
        run.same()
    finally:
        subprocess.run(["umount", "-l", str(point)], check=True)


def test_a_process_that_looks_at_many_runs_keeps_none_of_their_files_open(toys):
    """A page that is served for weeks, tests that are workers a thousand times."""

    def handles() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    def run(name: str) -> None:
        each = toys(name, max_generations=1).prepare()
        assert each.work() == "over"
        each.digest()

    threads = threading.active_count()
    run("first")
    until(lambda: threading.active_count() <= threads, "the worker's pulse has ended")
    before = handles()
    for number in range(3):
        run(f"another-{number}")
    until(lambda: handles() <= before, "the last worker's pulse has ended, too, and with it what it held")


@pytest.mark.slow
def test_a_memory_that_cannot_be_kept_stops_nobody(toys, monkeypatch):
    run: Toys = toys()
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/no/such")
    run.start(1).ends(0)
    run.same()


def test_whoever_has_no_home_can_make_a_run(tmp_path, monkeypatch):
    """Containers run as users that nobody has entered anywhere."""
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", mock.Mock(side_effect=KeyError("uid not found")))
    _, new = create_run(tmp_path, "run", {"algorithm": "toy"}, Host())
    assert new and (tmp_path / "run" / "run.json").is_file()


def test_the_mount_of_a_path_is_the_longest_that_leads_to_it(tmp_path):
    lines = [
        "20 1 8:1 / / rw - ext4 /dev/sda1 rw",
        "21 20 0:30 / /mnt rw shared:1 - tmpfs none rw",
        "22 21 0:31 / /mnt/données\\040x rw - nfs4 server:/a\\040b rw",
        "23 20 0:32 / /mnt/don rw - ext4 /dev/sdb rw",
        "24 20 0:33 / /mnt/new\u0085line rw - ext4 /dev/sdc rw",
    ]
    table = tmp_path / "mountinfo"
    table.write_bytes("\n".join(lines).encode() + b"\n25 20 0:34 / /mnt/\xff rw - ext4 /dev/sdd rw\n")
    assert mount_of(Path(os.fsdecode(b"/mnt/\xff/runs")), table).source == "/dev/sdd"
    assert mount_of(Path("/mnt/new\u0085line"), table).source == "/dev/sdc"
    assert mount_of(Path("/mnt/données x/runs"), table) == Mount("/mnt/données x", "nfs4", "server:/a\\040b")
    assert mount_of(Path("/mnt/donnée"), table).point == "/mnt"
    assert mount_of(Path("/home"), table) == Mount("/", "ext4", "/dev/sda1")


def test_links_in_a_circle_are_said_in_a_line(toys, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    for place in (tmp_path / "loop", tmp_path / "loop" / "runs", tmp_path / ("x" * 300) / "runs"):
        run: Toys = toys(base_dir=str(place))
        refused = run.start(1)
        refused.ends(2)
        assert str(place)[:200] in refused.said and "Traceback" not in refused.said


def test_a_place_that_cannot_be_is_said_in_a_line_by_whoever_looks_there_first(tmp_path):
    """Pre-training looks at a text, and for a run, before it counts. Each has another reason."""
    ascii = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    rounds = {"population_size": 2, "max_generations": 2, "first_inner_steps": 1, "inner_steps": 1}
    named = {"base_dir": str(tmp_path / "d\xfcrer")}, {"datasets": [str(tmp_path / "gr\xf6\xdfe.txt")]}
    cannot = [(keys, ascii, "set LC_ALL=C.UTF-8") for keys in named]
    for told, more, why in (({"base_dir": str(tmp_path / ("x" * 300))}, {}, "File name too long"), *cannot):
        keys = {"project_name": "there", "base_dir": str(tmp_path), **rounds, **told}
        (tmp_path / "run.json").write_text(json.dumps({key.upper(): value for key, value in keys.items()}))
        words = [sys.executable, str(ROOT / "edt_sim.py"), "--config", str(tmp_path / "run.json")]
        done = subprocess.run(words, env={**os.environ, **more}, capture_output=True, text=True, check=False)
        assert done.returncode == 2 and why in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["a b) S 1", "\udcff\udc85"])
def test_the_name_of_a_process_is_any_bytes(name):
    """Of a C locale, too, which knows no more than ASCII."""
    code = "import os, sys; from pathlib import Path; from fleet.host import Host; from fleet.plain import say;"
    code += "Path('/proc/self/comm').write_bytes(os.fsencode(sys.argv[1])); say('gr\\xf6\\xdfer', Host().identity[3])"
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, name], env=env, capture_output=True, check=True)
    assert re.fullmatch(rb"gr\?\?er [0-9]+\n", done.stdout)


@pytest.mark.parametrize("name", ["x" * 300, "loop/model"])
def test_whatever_a_name_is_for_it_leads_nowhere_in_a_line(tmp_path, monkeypatch, name):
    """A model, a text, a run, a recipe's donor, a file: too long for any disk, or links in a circle."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    path, there = tmp_path / name, str(tmp_path / name)
    for call in (
        lambda: check_sources([there], tmp_path),
        lambda: can_be_built(there, trust=False),
        lambda: model_named(there),
        lambda: located(there),
        lambda: read_gguf(f"{there}.gguf"),
        lambda: open_run(path, Host(), "test"),
        lambda: read_json(path),
    ):
        with pytest.raises(UserError):
            call()
    code, _, said = answer("edt_sim.py", "--config", there)
    assert code == 2 and said.count("\n") == 1 and "cannot be read" in said


def test_a_name_may_hold_whatever_utf_8_has(toys):
    """A line's end of Unicode's, too. What is no UTF-8 libraries that read models cannot open."""
    toys("a\x85 b\u2028", max_generations=1).start(1).ends(0)
    refused = toys("d\udcfcrer").start(1)
    refused.ends(2)
    assert "no such place: its name is no UTF-8" in refused.said and "Traceback" not in refused.said


def test_who_has_no_home_is_told_so():
    with pytest.raises(UserError, match="~nobody-of-this-name/runs: no such place: Could not determine home directory"):
        absolute(Path("~nobody-of-this-name/runs"))


def test_what_lies_at_home_is_missed_in_a_line_where_nobody_has_one(monkeypatch, tmp_path):
    """As in a container whose user has no name."""
    for name in ("HOME", "XDG_CACHE_HOME", "FLEET_CACHE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 5)
    assert settings_for("s3://mine") == {"region": "us-east-1"}
    with pytest.raises(UserError, match="~/.cache: .* home directory"):
        LocalCopies("s3://mine/run")
    monkeypatch.setenv("FLEET_CACHE", str(tmp_path))
    assert LocalCopies("s3://mine/run").base == tmp_path
