"""A bucket for tests: SeaweedFS on this machine, a proxy before it, and runs of toys in it."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fleet.bucket import Bucket
from fleet.host import Host
from fleet.places import address, here
from fleet.run import at
from fleet.store import Store
from tests.bucket_proxy import BucketProxy, proxied
from tests.bucket_server import Seaweed, seaweed
from tests.helpers import Toys, undisturbed

BUCKET = "s3://runs"


@pytest.fixture(scope="module")
def server() -> Iterator[Seaweed]:
    with seaweed() as started:
        yield started


@pytest.fixture
def proxy(server: Seaweed) -> Iterator[BucketProxy]:
    with proxied(server.ports["s3"]) as started:
        yield started


@pytest.fixture
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
