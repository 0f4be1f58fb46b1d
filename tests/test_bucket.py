"""Runs in a real bucket: SeaweedFS on this machine, and before it a proxy that does what networks do."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fleet import faults, launches
from fleet.bucket import Bucket
from fleet.credentials import source_of
from fleet.digest import digest
from fleet.disk import FileWriter
from fleet.disk_store import DiskStore
from fleet.history import opened
from fleet.host import Host
from fleet.local_copies import LocalCopies
from fleet.payload import Payload, PayloadWriter
from fleet.places import address, beside, here, in_bucket
from fleet.remote.code import pack
from fleet.remote.run_proxy import RunProxy
from fleet.run import NoRun, at, create_run, open_run
from fleet.run_config import UserError
from fleet.store import Store
from tests.bucket_proxy import BucketProxy, proxied
from tests.bucket_server import Seaweed, seaweed
from tests.commands import answer
from tests.helpers import LONG, ROOT, TOY, Toys, undisturbed, until

BUCKET = "s3://runs"


@pytest.fixture(scope="module")
def server() -> Iterator[Seaweed]:
    with seaweed() as started:
        yield started


@pytest.fixture
def proxy(server: Seaweed) -> Iterator[BucketProxy]:
    with proxied(server.ports["s3"]) as started:
        yield started


@pytest.fixture(autouse=True)
def surroundings(server: Seaweed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The owner's keys, and no others; copies of files lie in the test's own folder."""
    for name in [each for each in os.environ if each.startswith("AWS_")]:
        monkeypatch.delenv(name)
    missing = {each: str(tmp_path / "none") for each in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE")}
    # where nobody listens, as on a machine of no cloud
    for name, value in {**missing, **server.env(), "AWS_METADATA_ENDPOINT": "http://127.0.0.1:1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FLEET_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return at(here(Path(f"{BUCKET}/{tmp_path.name}")), Host(), "w")


class BucketToys(Toys):
    """A run of toys whose folder is a place in the bucket."""

    @property
    def folder(self) -> Path:
        return Path(f"{BUCKET}/{self.place.parent.name}/{self.place.name}/toy")

    def start(self, workers: int = 2, before: tuple[str, ...] = (), **changed: Any) -> Any:
        return super().start(workers, before, base_dir=address(self.folder.parent), **changed)

    def same(self) -> None:
        keys = {key: value for key, value in self.keys.items() if key != "base_dir"}
        assert self.digest() == undisturbed(json.dumps(keys, sort_keys=True))


@pytest.fixture
def in_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., BucketToys]]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made: list[BucketToys] = []

    def make(name: str = "here", **keys: Any) -> BucketToys:
        (tmp_path / name).mkdir()
        small = {"algorithm": "matching", "population_size": 4, "max_generations": 3, "size": 24, "dead_seconds": 5.0}
        made.append(BucketToys(tmp_path / name, {**small, **keys}))
        return made[-1]

    yield make
    for each in made:
        each.kill_all()


# -- whole runs --------------------------------------------------------------------------------------------------------


def test_a_run_in_a_bucket_has_the_bytes_of_one_on_a_disk(in_a_bucket: Callable[..., BucketToys]) -> None:
    run = in_a_bucket()
    started = run.start(2)
    started.ends(0)
    run.same()
    where = address(run.folder)
    assert f"New run {where}" in started.said and f"Everything is in {where}" in started.said
    assert not [each for each in ROOT.iterdir() if each.name.startswith("s3")], "no folder is made of an address"
    store, _ = open_run(run.folder, Host(), "test")
    assert "1,m0,1.0551" in store.load("metrics.csv", 1 << 20).decode()
    for command in ("fleet.status", "fleet.digest", "fleet.ancestry"):
        code, said, errors = answer("-m", command, address(run.folder))
        assert (code, errors) == (0, "") and address(run.folder) in said
    code, said, _ = answer("-m", "fleet.report", address(run.folder), "--out", str(run.place / "report.html"))
    assert code == 0 and address(run.folder) in (run.place / "report.html").read_text()
    again = run.start(1)
    again.ends(0)
    assert "over already" in again.said


def test_who_joins_needs_an_address_and_the_same_code(in_a_bucket: Callable[..., BucketToys]) -> None:
    run = in_a_bucket(sleep=0.3)
    joining = [*TOY, "--join", address(run.folder), "--workers", "1"]
    first = run.start(1)
    until(lambda: "worker" in first.said, "the run is begun")
    before = set(names_of(run))
    second = run.run(joining)
    until(lambda: "Joining the run" in second.said, "it has joined")
    second.ends(0)
    first.ends(0)
    run.same()
    store, _ = open_run(run.folder, Host(), "test")
    makers = {each["by"].partition("-")[0] for each in done_in(store)}
    assert makers == {"local", "joined"}
    new = set(names_of(run)) - before
    assert not [name for name in new if name.startswith(("launches/", "code/"))], "nobody starts it by joining it"
    started = dict(store.read("launches/00001.start"))
    launches.begin(store, started["operational"], seats=1)
    other = store.read("launches/00002.start") | {"hash": "0" * 64}
    store.replace("launches/00002.start", sealed(other))
    refused = run.run(joining)
    refused.ends(2)
    assert re.search(r"works with code 0{16} .* and here is [0-9a-f]{16} .*: take the same code", refused.said)


def test_who_joins_what_is_not_there_is_told(in_a_bucket: Callable[..., BucketToys]) -> None:
    run = in_a_bucket()
    missing = run.run([*TOY, "--join", f"{BUCKET}/nothing"])
    missing.ends(2)
    assert missing.said.strip() == f"{BUCKET}/nothing: not the folder of a run; nothing of that name is in the bucket"
    create_run(run.folder.parent, "toy", run.config.bound(), Host())
    early = run.run([*TOY, "--join", address(run.folder)])
    early.ends(2)
    assert "nobody has started it yet" in early.said


@pytest.mark.slow
def test_an_outage_and_credentials_that_run_out_are_waited_for(
    in_a_bucket: Callable[..., BucketToys], proxy: BucketProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    run = in_a_bucket(sleep=0.2)
    started = run.start(1)
    until(lambda: [name for name in names_of(run) if name.endswith(".0.done")], "something is made")
    proxy.decide = lambda request: "403"
    logs = Path(os.environ["FLEET_CACHE"])
    until(
        lambda: "ExpiredToken" in "".join(each.read_text() for each in logs.rglob("*.log")), "it says what it waits for"
    )
    assert started.process.poll() is None
    proxy.decide = lambda request: ""
    started.ends(0)
    run.same()
    waits = [event for event in events_of(run) if event.get("what") == "waits"]
    assert any("ExpiredToken" in event["why"] for event in waits), "what was waited for is said"
    assert server_secret() not in json.dumps(events_of(run)) + started.said


@pytest.mark.slow
def test_requests_that_fail_cost_time_and_nothing_else(
    in_a_bucket: Callable[..., BucketToys], proxy: BucketProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ["429", "500", "503", "cut", "lose", "twice"]
    proxy.decide = lambda request: kinds[request.number // 9 % 6] if request.number % 9 == 0 else ""
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    run = in_a_bucket()
    run.start(2).ends(0)
    proxy.decide = lambda request: ""
    run.same()
    assert all(proxy.faults[kind] for kind in kinds), proxy.faults


# -- the store ---------------------------------------------------------------------------------------------------------


def test_of_eight_who_offer_at_once_one_wins_and_all_know_it(tmp_path: Path) -> None:
    place = here(Path(f"{BUCKET}/{tmp_path.name}"))
    stores = [at(place, Host(), f"w{n}") for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for name in ("rounds/00000/plan", "rounds/00000/a.0.done", "rounds/00000/b.0.done"):
            stand = [*pool.map(lambda store, name=name: store.settle(name, {"by": store.name}), stores)]
            assert all(each == stand[0] for each in stand)


def test_a_reply_that_is_lost_is_looked_up(tmp_path: Path, proxy: BucketProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    store = at(here(Path(f"{BUCKET}/{tmp_path.name}")), Host(), "w")
    for fault in ("lose", "twice", "500", "429", "503"):
        proxy.decide = lambda request, fault=fault: fault if request.method == "PUT" and not proxy.faults[fault] else ""
        assert store.settle(f"launches/{fault}", {"by": "me"}) == {"by": "me"}
        assert proxy.faults[fault] == 1


def test_a_file_is_one_object_however_it_was_made(store: Store) -> None:
    assert isinstance(store, Bucket)
    data = os.urandom(5 << 20)
    draft = PayloadWriter(store, "00001.m0.0.token")
    draft.write("small", b"small")
    with draft.create("large") as file:
        for begin in range(0, len(data), 1 << 20):
            file.write(data[begin : begin + (1 << 20)])
    with draft.folder() as place:
        (place / "by-a-library").write_bytes(data[:1000])
    with draft.create("again", again=True) as file:
        file.write(data[:100])
        assert b"".join(draft.written_so_far("again")) == data[:100]
    files = draft.seal()
    assert set(files) == {"small", "large", "by-a-library", "again"} == set(store.names(draft.place))
    found = Payload(store, draft.attempt, files)
    found.check()
    assert found.read("small") == b"small" and found.path("large").read_bytes() == data
    with found.open("large") as reader:
        assert reader.read(len(data)) == data
    found.path("large").write_bytes(b"damaged")
    assert Payload(again(store), draft.attempt, files).path("large").read_bytes() == data, "a wrong copy is not used"
    store.objects.put(f"{draft.place}/small", b"smalt")
    with pytest.raises(faults.Damaged):
        found.read("small")
    draft.drop()
    assert not store.names(draft.place)


def test_what_nobody_uses_makes_room(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_CACHE_GB", str(2.5e6 / (1 << 30)))
    assert isinstance(store, Bucket)
    drafts = []
    for n in range(3):
        draft = PayloadWriter(store, f"00001.m{n}.0.token")
        draft.write("weights", bytes([n]) * 1_000_000)
        drafts.append((draft, draft.seal()))

    def path(who: Store, n: int) -> Path:
        return Payload(who, drafts[n][0].attempt, drafts[n][1]).path("weights")

    others = again(store)
    first, second = path(others, 0), path(store, 1)
    os.utime(first.parent, (1, 1))  # used long ago, and still held by somebody
    third = path(store, 2)
    assert first.exists() and second.exists() and third.exists(), "what is used stays, over the limit"
    for handle in others.copies._held.values():  # type: ignore[attr-defined]
        os.close(handle)
    LocalCopies(store.objects.address).make_room(500_000)
    assert not first.exists() and second.exists() and third.exists()
    assert path(again(store), 0).read_bytes() == bytes(1_000_000), "it is fetched again"


def test_files_that_grow_are_read_like_any_other(store: Store) -> None:
    with pytest.raises(faults.Missing):
        store.tail("workers/a.events")
    written = b""
    for session in range(2):
        file = store.append("workers/a.events")
        for n in range(5):
            line = f"{session} {n} {'x' * 20_000}\n".encode()
            file.write(line)
            written += line
    found = store.tail("workers/a.events")
    assert found.data == written and found.size == len(written)
    assert store.tail("workers/a.events", 150_000).data == written[150_000:]
    assert store.tail("workers/a.events", most=1000).data == written[-1000:]
    assert store.tail("workers/a.events", len(written) + 1).begin == 0, "another file of that name"
    assert store.names("workers") == ["a.events"] and len(store.names("workers/a.events")) < 6
    store.put_away("workers/a.events", "workers/ended/a.events")
    assert store.tail("workers/ended/a.events").data == written
    with pytest.raises(faults.Missing):
        store.put_away("workers/a.events", "workers/ended/b.events")


def test_an_address_is_a_path_that_knows_it_is_one() -> None:
    place = here(Path("s3://bucket/runs"), Path("/elsewhere"))
    assert in_bucket(place) and address(place / "edt") == "s3://bucket/runs/edt"
    assert beside(place / "edt") == Path.cwd() / "edt" and beside(Path("/runs/edt")) == Path("/runs/edt")
    assert not in_bucket(Path("runs")) and not in_bucket(Path())


# -- bad input ---------------------------------------------------------------------------------------------------------


def refused(run: BucketToys, keys: bool = True, **env: str) -> str:
    """The one line that a start ends with; with the owner's keys, or without."""
    run.keys["base_dir"] = address(run.folder.parent)
    file = run.place / "evolution.json"
    file.write_text(json.dumps({"project_name": "toy", **run.keys}))
    with pytest.MonkeyPatch.context() as patch:
        for name in () if keys else ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.delenv(name)
        code, out, errors = answer("-m", "tests.toy", "--config", str(file), "--workers", "1", env=env)
    assert code == 2 and out == "" and errors.count("\n") == 1, out + errors
    return errors


def test_a_bucket_that_cannot_be_used_is_refused_in_one_line(
    in_a_bucket: Callable[..., BucketToys], server: Seaweed, proxy: BucketProxy, tmp_path: Path
) -> None:
    run, through = in_a_bucket(), {"AWS_ENDPOINT_URL": proxy.endpoint}
    assert "no credentials are found" in refused(run, keys=False)
    assert "SignatureDoesNotMatch" in refused(run, AWS_SECRET_ACCESS_KEY="wrong")
    assert "may not write there" in refused(run, **server.env("reader"))
    proxy.decide = lambda request: "skew"
    assert "Set this machine's clock" in refused(run, **through)
    proxy.decide = lambda request: "404" if request.method != "HEAD" else ""
    assert "NoSuchBucket" in refused(run, **through)
    proxy.decide = lambda request: ""
    proxy.ignores_conditions = True
    assert "knows no conditional puts (If-None-Match)" in refused(run, **through)
    assert names_of(run) == [], "nothing was begun"
    wrong = tmp_path / "keys"
    wrong.write_text(f"[default]\naws_access_key_id = x\naws_secret_access_key = y\n[right]\naws_access_key_id = "
                     f"{server.keys['owner'][0]}\naws_secret_access_key = {server.keys['owner'][1]}\n")  # fmt: skip
    by_file = {"AWS_SHARED_CREDENTIALS_FILE": str(wrong), "AWS_PROFILE": "default"}
    assert "InvalidAccessKeyId" in refused(run, keys=False, **by_file)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.delenv(name)
        for name, value in {**by_file, "AWS_PROFILE": "right"}.items():
            patch.setenv(name, value)
        assert names_of(run) == [] and source_of(BUCKET) == f"profile right of {wrong}"


def test_no_run_lies_within_another(in_a_bucket: Callable[..., BucketToys]) -> None:
    run = in_a_bucket()
    create_run(run.folder.parent, "toy", run.config.bound(), Host())
    with pytest.raises(UserError, match="lies within the run"):
        create_run(run.folder, "inner", run.config.bound(), Host())
    with pytest.raises(UserError, match="holds files but is not a run"):
        create_run(run.folder.parent.parent, run.folder.parent.name, run.config.bound(), Host())
    store, new = create_run(run.folder.parent, "to", run.config.bound(), Host())
    assert new and {*store.names("")} - {"tmp"} == {"run.json"}, "a name that another one begins with is its own"
    with pytest.raises(NoRun):
        open_run(Path(str(run.folder) + "s"), Host(), "test")


# -- moving house ------------------------------------------------------------------------------------------------------


def copied(*words: object) -> tuple[int, str]:
    code, out, errors = answer("-m", "fleet.copy", *map(str, words))
    return code, out + errors


def test_a_run_moves_to_a_bucket_and_back_and_goes_on(
    toys: Callable[..., Toys], in_a_bucket: Callable[..., BucketToys], tmp_path: Path
) -> None:
    disk, there = toys("disk").prepare(), in_a_bucket("there")
    assert disk.work(6) == "interrupted"
    there.keys = {**disk.keys}
    assert copied(disk.folder, address(there.folder))[0] == 0
    there.work(5)
    back, asked = tmp_path / "back", iter(range(100))
    back.mkdir()

    def cut_off(store: DiskStore, name: str, again: bool = False) -> FileWriter:
        if next(asked) == 4:
            raise faults.Passing("the network is gone")
        return store.disk.create(name)

    with mock.patch.object(DiskStore, "create", cut_off):  # on the way back
        assert copied(address(there.folder), back / "toy") == (2, "the network is gone\n")
    with pytest.raises(NoRun):
        open_run(back / "toy", Host(), "test")
    code, said = copied(address(there.folder), back / "toy")
    assert code == 0 and "the whole run" in said
    assert digest(opened(back / "toy")) == digest(opened(there.folder))
    assert there.work() == "over"
    there.same()
    code, said = copied(address(there.folder), back / "toy")
    assert code == 0, said  # what is new is brought there, too
    assert digest(opened(back / "toy")) == there.digest()


def test_what_is_damaged_or_another_run_is_not_copied(
    in_a_bucket: Callable[..., BucketToys], toys: Callable[..., Toys], tmp_path: Path
) -> None:
    one, other = in_a_bucket("one"), toys("other", seed=2).prepare()
    create_run(one.folder.parent, "toy", one.config.bound(), Host())
    launches.begin(open_run(one.folder, Host(), "test")[0], one.config.operational())
    assert one.work(6) == "interrupted"
    code, said = copied(address(one.folder), other.folder)
    assert code == 2 and "another run is there" in said
    store, _ = open_run(one.folder, Host(), "test")
    file = next(name for name, _ in store.everything() if name.startswith("files/"))
    store.replace(file, b"damaged")
    code, said = copied(address(one.folder), tmp_path / "copy")
    assert code == 2 and f"{file}: is damaged" in said
    with pytest.raises(NoRun):
        open_run(tmp_path / "copy", Host(), "test")


# -- longer ones -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_three_workers_killed_and_a_server_killed_and_restarted(in_a_bucket: Callable[..., BucketToys]) -> None:
    with seaweed() as mine, pytest.MonkeyPatch.context() as patch:
        for name, value in mine.env().items():
            patch.setenv(name, value)
        run = in_a_bucket(sleep=0.5, max_generations=8)
        first = run.start(1)
        until(lambda: "worker" in first.said, "the run is begun")
        joined = [run.run([*TOY, "--join", address(run.folder), "--workers", "1"]) for _ in range(2)]
        until(lambda: all("1 worker" in each.said for each in joined), "both have joined")
        for victim in (0, 1):
            time.sleep(3)
            workers = [*run.alive().items()]
            os.kill(workers[victim % len(workers)][1], signal.SIGKILL)
        mine.kill()
        time.sleep(5)
        mine.start()
        joined[0].send(signal.SIGINT)
        assert joined[0].end() == 130
        first.ends(0)
        joined[1].ends(0)
        run.same()


@pytest.mark.slow
def test_who_waits_long_asks_at_most_twenty_times_a_minute(
    in_a_bucket: Callable[..., BucketToys], proxy: BucketProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a recipe that takes minutes; the loggers' requests count, too."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    run = in_a_bucket(algorithm="matching", population_size=1, max_generations=1, dead_seconds=60.0, sleep=240.0)
    run.start(2)
    until(lambda: [name for name in names_of(run) if ".claim." in name], "the long one is begun", LONG)
    time.sleep(60)  # naps grow
    before = sum(proxy.seen.values())
    time.sleep(120)
    assert sum(proxy.seen.values()) - before <= 2 * 2 * 20, proxy.seen


@pytest.mark.slow
def test_pretraining_in_a_bucket_has_the_same_bytes(pretraining: Callable[..., Toys], tmp_path: Path) -> None:
    from tests.small import whole

    for script in ("edt_sim.py", "diloco_sim.py"):
        disk = pretraining(script)
        wanted = whole(disk)
        place = f"{BUCKET}/{tmp_path.name}-{script}"
        there = pretraining(str(ROOT / script), base_dir=place)
        elsewhere = ("env", "-C", str(there.place))  # where the model is exported to
        there.start(2, elsewhere, base_dir=place).ends(0, LONG)
        assert (there.place / "toy/export/config.json").is_file()
        assert digest(opened(Path(place) / "toy")) == wanted


# -- looking -----------------------------------------------------------------------------------------------------------


def names_of(run: Toys) -> list[str]:
    return [name for name, *_ in at(run.folder, Host(), "test").everything()]


def done_in(store: Store) -> list[dict[str, Any]]:
    return [store.read(name) for name, _ in store.everything() if name.endswith(".done")]


def events_of(run: Toys) -> list[dict[str, Any]]:
    store = at(run.folder, Host(), "test")
    files = [f"workers/{name}" for name in store.names("workers") if name.endswith(".events")]
    lines = [line for file in files for line in store.tail(file).data.decode().splitlines()]
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def again(store: Store) -> Bucket:
    """As another process of this machine has it."""
    found = at(store.root, Host(), "another")
    assert isinstance(found, Bucket)
    return found


def sealed(value: dict[str, Any]) -> bytes:
    from fleet.store import _sealed

    return _sealed(value)


def server_secret() -> str:
    return os.environ["AWS_SECRET_ACCESS_KEY"]


def test_make_bucket_says_how_to_reach_it(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.bucket_server"]
    started = subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    try:
        assert started.stdout
        said = [started.stdout.readline() for _ in range(6)]
        assert "export AWS_ENDPOINT_URL=http://127.0.0.1:" in "".join(said)
    finally:
        started.send_signal(signal.SIGINT)
        assert started.wait(30) == 0


# -- machines that share no disk ---------------------------------------------------------------------------------------


class Agent:
    """The program that the launcher sends along, started here as SSH would start it there."""

    def __init__(self, home: Path) -> None:
        source = (ROOT / "fleet/remote/agent.py").read_text()
        env = {"HOME": str(home), "PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(home / "cache")}
        words = [sys.executable, "-u", "-c", f"{source}\nmain('@')"]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, cwd=home)
        self._answer()

    def ask(self, verb: str, **words: Any) -> dict[str, Any]:
        assert self.process.stdin
        self.process.stdin.write(json.dumps({"verb": verb, "with": words}).encode() + b"\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith(b"@"):
                return dict(json.loads(line[1:]))
        raise AssertionError("it has ended")


@pytest.mark.slow
def test_a_machine_gets_code_and_credentials_and_no_disk(
    in_a_bucket: Callable[..., BucketToys], server: Seaweed, tmp_path: Path
) -> None:
    """All but SSH itself: what the launcher asks of each machine, and what its supervisor then does."""
    run = in_a_bucket(sleep=0.2)
    store, _ = create_run(run.folder.parent, "toy", run.config.bound(), Host())
    launches.begin(store, run.config.operational(), seats=2)
    packed, homes = pack(ROOT), [tmp_path / name for name in ("one", "two")]
    for home in homes:
        home.mkdir()
    agents, env, base = [Agent(home) for home in homes], server.env(), address(run.folder.parent)
    try:
        code = [each.ask("receive", digest=packed.digest, data=packed.text)["code"] for each in agents]
        told = [
            each.ask("reach", code=its, words=["reached", base, "round", f"m{n}"], env=env)
            for n, (each, its) in enumerate(zip(agents, code, strict=True))
        ]
        assert {each["stands"] for each in told} == {"m0"} and all(each["up"] > 0 for each in told)
        assert {each["source"] for each in told} == {"the environment (AWS_ACCESS_KEY_ID)"}
        wrong = agents[0].ask("reach", code=code[0], words=["reached", base, "again", "m0"], env=server.env("reader"))
        assert "AccessDenied" in wrong["problem"]
        agents[0].ask("reach", code=code[0], words=["left", base, "round"], env=env)
        assert not at(Path(base), Host(), "test").names(".check")
        order = {
            "run": address(run.folder), "run_id": store.run_id, "launch": 1, "machine": "m0", "restarts": 3,
            "digest": packed.digest, "command": ["-m", "tests.toy"], "seats": [{}, {}], "first": 0,
            "lock": store.run_id, "umask": 0o077,
        }  # fmt: skip
        begun = agents[0].ask("start", code=code[0], order=order, env=env)
        assert [seat["number"] for seat in begun["seats"]] == [0, 1]
        until(run.is_over, "the run is over", LONG, pause=0.5)
        run.same()
        written = {"m0-0.log", "m0-1.log", "m0.supervisor"}
        until(lambda: written <= {*store.names("workers")}, "what they wrote is in the run", LONG, pause=0.5)
        found = RunProxy(ROOT)
        found.open(address(run.folder))
        until(lambda: [each["code"] for each in found.supervisors()[0]["seats"]] == [0, 0], "all have ended")
        secret = server.keys["owner"][1]
        kept = b"".join(store.tail(f"workers/{name}").data for name in store.names("workers") if name.endswith(".log"))
        assert secret.encode() not in kept and secret not in json.dumps(told)
    finally:
        for each in agents:
            each.ask("kill", run_id=store.run_id, seconds=10.0)
            each.process.kill()
            each.process.wait()
