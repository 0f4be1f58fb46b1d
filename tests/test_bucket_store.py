"""The verbs of a store in a real bucket, and buckets that cannot be used."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fleet import faults
from fleet.bucket import Bucket
from fleet.credentials import source_of
from fleet.host import Host
from fleet.local_copies import LocalCopies
from fleet.payload import Payload, PayloadWriter
from fleet.places import address, beside, here, in_bucket
from fleet.run import NoRun, at, create_run, open_run
from fleet.run_config import UserError
from fleet.store import Store
from tests import bucket_server
from tests.bucket_proxy import BucketProxy
from tests.bucket_runs import BUCKET, BucketToys, again, names_of
from tests.bucket_server import Seaweed
from tests.commands import answer
from tests.helpers import ROOT

pytestmark = pytest.mark.usefixtures("surroundings")


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
    copies = [file.name for file in Path(os.environ["FLEET_CACHE"]).rglob("*") if file.is_file()]
    assert sorted(copies) == ["again", "by-a-library", "large"], "nothing lies on this machine's disk twice"
    found.path("large").write_bytes(b"damaged")
    assert Payload(again(store), draft.attempt, files).path("large").read_bytes() == data, "a wrong copy is not used"
    store.objects.put(f"{draft.place}/small", b"smalt")
    with pytest.raises(faults.Damaged):
        found.read("small")
    draft.drop()
    assert not store.names(draft.place)


_LARGE = """
import os, resource, sys
from pathlib import Path
from fleet.host import Host
from fleet.payload import Payload, PayloadWriter
from fleet.run import at

store, megabyte = at(Path(sys.argv[1]), Host(), "w"), os.urandom(1 << 20)
draft = PayloadWriter(store, "00001.m0.0.token")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with draft.create("weights") as file:
    for _ in range(400):
        file.write(megabyte)
with Payload(store, draft.attempt, draft.seal()).open("weights") as file:
    while file.read(1 << 20):
        pass
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_what_goes_there_and_back(tmp_path: Path) -> None:
    words = [sys.executable, "-c", _LARGE, f"{BUCKET}/{tmp_path.name}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 256, "MB"
    assert not [file for file in Path(os.environ["FLEET_CACHE"]).rglob("*") if file.is_file()]


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


def test_a_path_may_be_called_after_what_else_is_missing(
    in_a_bucket: Callable[..., BucketToys], proxy: BucketProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    store = at(in_a_bucket("credentials").folder, Host(), "w")
    proxy.decide = lambda request: "403"
    with pytest.raises(faults.Denied, match="/bell: ExpiredToken: said by the proxy"):
        store.state("bell")


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


def test_a_server_whose_port_was_just_taken_has_others(monkeypatch: pytest.MonkeyPatch) -> None:
    free = bucket_server._free_ports()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first, others = [{**free, "volume.grpc": taken.getsockname()[1]}], bucket_server._free_ports
        monkeypatch.setattr(bucket_server, "_free_ports", lambda: first.pop() if first else others())
        with bucket_server.seaweed() as server:
            assert server.requests()["PUT"] >= 1


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
