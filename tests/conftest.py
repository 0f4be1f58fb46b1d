"""What the tests of real runs share."""

import fcntl
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from fleet.busy_notice import loading
from tests.browser import CHROMIUM, Browser
from tests.bucket_runs import in_a_bucket, proxy, server, store, surroundings  # noqa: F401 (fixtures)
from tests.helpers import Toys, until

os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that wait for each other cost minutes on a busy machine


LONGEST = (
    "test_evomerge_whole", "test_group", "test_posttrain_whole", "test_examples", "test_fsdp_whole", "test_peers",
    "test_fsdp_page", "test_pretraining_input", "test_posttrain", "test_sinks", "test_kill", "test_fsdp",
    "test_pretraining", "test_skills", "test_specialists", "test_blame", "test_own_loop_misuse", "test_knobs",
    "test_merge_search", "test_merge_search_far", "test_evomerge", "test_launcher", "test_report_live", "test_bad_luck",
    "test_unlucky_machine", "test_three_hosts", "test_engines", "test_lab", "test_hub", "test_storm", "test_full_disk",
    "test_merge",
)  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Short tests keep their files in memory, where there is enough of it: their runs sync them by the thousand. The
    slow ones have machines, which share a folder of a disk."""
    place = Path("/dev/shm")
    if "not slow" in config.option.markexpr and place.is_dir():
        room = os.statvfs(place)
        if room.f_bavail * room.f_frsize > 4 << 30 and not room.f_flag & os.ST_NOEXEC:
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(place))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """All libraries are imported here, in each process that tests."""
    with loading():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take minutes come first: of two processes that test, none is left alone with one at the end."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Whoever is cut off at some time says when by itself: machines differ by a factor of three."""
    if time.time() > float(os.environ.get("SLOW_TESTS_UNTIL", "inf")) and item.get_closest_marker("slow"):
        pytest.skip("NOT TESTED: the time for slow tests is over on this slow machine; `make test-slow` takes its own")


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> None:
    """A shell's background jobs ignore Ctrl-C, and so would all that the tests start from one."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Whoever computes with more threads in this process leaves them to nobody: of matrices so small, threads that wait
    for each other on a busy machine take hundreds of times as long."""
    yield
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Toys]]:
    """Makes toy runs, each in a folder of its own; nothing that they started outlives the test."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made: list[Toys] = []

    def make(name: str = "here", script: list[str] | None = None, **keys: Any) -> Toys:
        place = tmp_path / name
        place.mkdir(exist_ok=True)
        small = {"algorithm": "matching", "population_size": 4, "max_generations": 4, "size": 24}
        made.append(
            Toys(place, {**small, "poll_seconds": 0.02, "dead_seconds": 5.0, **keys}, *([script] if script else []))
        )
        return made[-1]

    yield make
    for each in made:
        each.kill_all()


@pytest.fixture
def pretraining(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Toys]]:
    """Runs of edt_sim.py or diloco_sim.py as real processes, each in a folder of its own."""
    from tests.small import KEYS, shared

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made: list[Toys] = []

    def make(script: str = "edt_sim.py", **keys: Any) -> Toys:
        place = tmp_path / f"place-{len(made)}"
        place.mkdir()
        data = {"tokenizer": str(shared() / "tokenizer"), "datasets": [{"source": str(shared() / "text.jsonl")}]}
        made.append(Toys(place, {**KEYS, **data, **keys}, [sys.executable, script]))
        return made[-1]

    yield make
    for each in made:
        each.kill_all()


@pytest.fixture(scope="module")
def run_for_pages(tmp_path_factory: pytest.TempPathFactory) -> Toys:
    """A finished run, whose pages are looked at."""
    from tests.reporting import finished_run

    return finished_run(tmp_path_factory.mktemp("made"))


@pytest.fixture
def finished(run_for_pages: Toys, tmp_path: Path) -> Toys:
    """A copy of it for each test."""
    shutil.copytree(run_for_pages.place, tmp_path / "here")
    return Toys(tmp_path / "here", run_for_pages.keys)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer for models that become GGUF files."""
    from tests.gguf_models import byte_tokenizer

    return byte_tokenizer(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and tasks of a merge search."""
    from tests.searching import donors_and_tasks

    return donors_and_tasks(tmp_path_factory.mktemp("facts"))


@pytest.fixture(scope="module")
def tournament(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A whole one: its folder, its configuration, and what it has said."""
    from tests.tournaments import whole_tournament

    return whole_tournament(tmp_path_factory.mktemp("tournament"))


@pytest.fixture
def here(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """evomerge's command line in this process."""
    from tests.tournaments import here_by

    return here_by(capfd, monkeypatch)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not CHROMIUM:
        pytest.skip("NOT TESTED: no chromium here, so nobody has looked at these pages (apt install chromium)")
    with Browser() as started:
        yield started


@pytest.fixture(scope="session")
def everybodys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all processes that test."""
    mine = tmp_path_factory.getbasetemp()
    return mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine


@pytest.fixture(scope="session")
def starters_home(everybodys: Path) -> Path:
    """Where whoever first needs the models of the built-in skills trains them; the others wait for it."""
    folder = everybodys / "starters"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def specialists_home(everybodys: Path) -> Path:
    """Where evomerge's default models are: trained once for all slow tests. Of processes that test, one trains them and
    the others wait for it."""
    from evomerge import specialists

    folder = everybodys / "home"
    folder.mkdir(exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
        specialists.made(folder)
    return folder


@pytest.fixture
def small_memory() -> Iterator[Callable[[int], Path]]:
    """Makes a control group whose processes may have so many MB."""
    made: list[Path] = []

    def make(megabytes: int) -> Path:
        why: OSError | None = None
        for folder, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
            group = Path(folder, f"small-{os.getpid()}")
            try:
                group.mkdir()
                made.append(group)
                (group / limit).write_text(str(megabytes << 20))
                return group
            except OSError as error:
                why = error
        pytest.skip(f"no control group can be made here: {why}")

    yield make
    for group in made:
        until(lambda group=group: not (group / "cgroup.procs").read_text(), "its processes ended")
        group.rmdir()
