"""Whole runs in a real bucket: SeaweedFS on this machine, and before it a proxy that does what networks do."""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fleet import launches
from fleet.digest import digest
from fleet.history import opened
from fleet.host import Host
from fleet.places import address
from fleet.run import create_run, open_run
from tests.bucket_proxy import BucketProxy
from tests.bucket_runs import BUCKET, BucketToys, done_in, events_of, names_of, sealed
from tests.bucket_server import Seaweed, seaweed
from tests.commands import answer
from tests.helpers import LONG, ROOT, TOY, Toys, until

pytestmark = pytest.mark.usefixtures("surroundings")


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
    until(lambda: [name for name in names_of(run) if name.endswith(".0.done")], "something is made", pause=0.2)
    proxy.decide = lambda request: "403"
    refused = says_that_it_waits("ExpiredToken")
    assert started.process.poll() is None
    proxy.decide = lambda request: ""
    started.ends(0)
    run.same()
    waits = [event for event in events_of(run) if event.get("what") == "waits"]
    assert any(refused.search(f"waits {event['why']}") for event in waits), "what was waited for is said"
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in json.dumps(events_of(run)) + started.said


def says_that_it_waits(why: str) -> re.Pattern[str]:
    """In the log of a worker, which is kept on this machine."""
    logs, said = Path(os.environ["FLEET_CACHE"]), re.compile(f"waits .*{why}")
    until(lambda: any(said.search(each.read_text()) for each in logs.rglob("*.log")), "it says what it waits for")
    return said


@pytest.mark.slow
def test_keys_that_are_renewed_in_a_profile_are_found_by_who_waits(
    in_a_bucket: Callable[..., BucketToys],
    proxy: BucketProxy,
    server: Seaweed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def write(who: str) -> None:
        key, secret = server.keys[who]
        (tmp_path / "keys").write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")

    write("owner")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    run = in_a_bucket(sleep=0.2)
    started = run.start(1)
    until(lambda: [name for name in names_of(run) if name.endswith(".0.done")], "something is made", pause=0.2)
    proxy.decide = lambda request: "403" if request.key == server.keys["owner"][0] else ""
    says_that_it_waits("ExpiredToken")
    write("renewed")
    started.ends(0)
    run.same()


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
    until(lambda: [name for name in names_of(run) if ".claim." in name], "the long one is begun", LONG, pause=0.2)
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
