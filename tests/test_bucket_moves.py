"""Runs that move to a bucket and back, and machines that have nothing else in common."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from edt import EDT
from fleet import faults, fork, launches
from fleet.digest import digest
from fleet.disk import FileWriter
from fleet.disk_store import DiskStore
from fleet.fork import ForkOrder
from fleet.history import opened
from fleet.host import Host
from fleet.method import Method
from fleet.places import address
from fleet.processes import options
from fleet.remote.code import pack
from fleet.remote.run_proxy import RunProxy
from fleet.run import NoRun, at, create_run, open_run
from fleet.run_config import UserError
from fleet.worker import Worker
from tests.bucket_runs import BUCKET, BucketToys
from tests.bucket_server import Seaweed
from tests.commands import answer
from tests.helpers import LONG, ROOT, Toys, until
from tests.small import config, strategy, worker
from train.forking import forked
from train.member.pretraining_tasks import maker
from train.training_config import TrainConfig

pytestmark = pytest.mark.usefixtures("surroundings")


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
    assert [*disk.folder.glob("rounds/*/planning")] and not [*back.glob("toy/rounds/*/planning")], "news of nobody"
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


def fork_of(run: Path, name: str, config: Path) -> None:
    """By the command, and what the process that it becomes would do."""
    with mock.patch("os.execv") as becomes:
        fork.go_on(Path(address(run)), name=name, set=("MAX_GENERATIONS=4",), config=config)
    order = ForkOrder.model_validate_json(becomes.call_args[0][1][-1])
    assert fork.fork(Method("edt", "", TrainConfig, EDT, maker, forked=forked), order) == 0


@pytest.mark.slow
def test_a_fork_in_a_bucket_goes_on_as_one_on_a_disk(tmp_path: Path) -> None:
    digests = []
    for base in (tmp_path / "disk", Path(f"{BUCKET}/{tmp_path.name}")):
        assert worker(base, config(max_generations=2)).run() == "over"
        before, file = digest(opened(base / "run")), tmp_path / f"{len(digests)}.json"
        fork_of(base / "run", "longer", file)
        assert json.loads(file.read_text())["BASE_DIR"] == address(base)
        store, about = open_run(base / "longer", Host(), "w")
        longer = TrainConfig(**about["config"])
        launch = launches.begin(store, longer.operational())
        assert Worker(store, strategy(longer), maker(longer), options(longer, launch)).run() == "over"
        assert digest(opened(base / "run")) == before, "the old one stays as it is"
        digests.append(digest(opened(base / "longer")))
        with pytest.raises(UserError, match=f"{address(base / 'longer')}: is there already; choose another --name"):
            fork_of(base / "run", "longer", tmp_path / "free.json")
    assert digests[0] == digests[1]
    store, _ = open_run(base / "run", Host(), "test")
    store.replace(f"files/{opened(base / 'run').outcome('2/m0').attempt}/weights-0.safetensors", b"damaged")
    with pytest.raises(UserError, match="2/m0 is damaged where it comes from"):
        fork_of(base / "run", "other", tmp_path / "free.json")
    assert not at(base / "other", Host(), "test").everything(), "nothing of it is left"


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
