"""A run in a bucket on machines with networks of their own, which share nothing else: launched over SSH by a machine
that does not reach the bucket, or joined one after the other without SSH; with kills, a cut cable, a dying store."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bucket_server import Seaweed
from tests.helpers import LONG, ROOT, TOY, undisturbed, until
from tests.lab.machines import Lab, why_not
from tests.launching import Launched

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why_not()), reason=f"no machines: {why_not()}"),
]
RUN = "s3://runs/hosts/toy"
KEYS = {"algorithm": "matching", "population_size": 4, "max_generations": 6, "size": 24, "dead_seconds": 10.0}
_DIGEST = "import sys; from pathlib import Path; from fleet.history import opened; from fleet.digest import digest; "
_DIGEST += "h = opened(Path(sys.argv[1])); print(digest(h) if h.over else 'not over')"

_MADE = "import sys; from pathlib import Path; from fleet.host import Host; from fleet.run import at; "
_MADE += "names = at(Path(sys.argv[1]), Host(), 'test').everything(); "
_MADE += "print(sum(name.endswith('.done') for name, _ in names))"


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with Lab(tmp_path / "lab", ("h1", "h2", "h3", "store")) as made:
        yield made


@pytest.fixture
def store(lab: Lab) -> Iterator[Seaweed]:
    machine = lab["store"]
    server = Seaweed(lab.shared / "seaweed", machine.address, machine.inside())
    server.start()
    yield server
    server.kill()


def variables(store: Seaweed) -> dict[str, str]:
    return {**store.env(), "AWS_ALLOW_HTTP": "true"}


def test_launched_over_ssh_with_credentials_from_machines_json(lab: Lab, store: Seaweed) -> None:
    place = lab.shared / "place"
    place.mkdir()
    run = Launched(place, dict(KEYS), lab=lab)
    run.machines = [run.entry(name, env=variables(store)) for name in ("h1", "h2", "h3")]
    base = "s3://runs/hosts"
    checked = run.says("check", base_dir=base)
    assert checked.count("credentials: the environment") == 3 and "a request takes" in checked
    started = run.ask("launch", base_dir=base, sleep=5.0)
    until(lambda: "Launch 1" in started.said, "workers are started", LONG)
    until(lambda: made(lab, store) >= 2, "something is made", LONG, pause=0.5)
    lab["h2"].cut()
    then = made(lab, store)
    until(lambda: made(lab, store) >= then + 4, "the others go on", LONG, pause=0.5)
    lab["h2"].heal()
    victim = lab["h1"].pids("--worker")
    lab["h1"].run("kill", "-9", *map(str, victim))
    until(lambda: [pid for pid in lab["h1"].pids("--worker") if pid not in victim], "another takes its place", LONG)
    store.kill()
    time.sleep(5)  # an outage has no end to wait for
    store.start()
    assert made(lab, store) < 24, "all of that was in the midst of it"
    started.ends(0)
    assert digest_by(lab, store) == undisturbed(json.dumps({**KEYS, "sleep": 5.0}, sort_keys=True))
    logs = run.says("logs", base_dir=base)
    assert "another takes its place" in logs
    key, secret = store.keys["owner"]
    said = started.said + logs + checked + run.says("status", base_dir=base)
    assert secret not in said and key not in said
    assert not [name for name in lab if secret in " ".join(lab[name.name].do("cat /proc/[0-9]*/cmdline || :").split())]


def test_three_join_one_after_the_other_and_one_leaves(lab: Lab, store: Seaweed, tmp_path: Path) -> None:
    from tests.helpers import Toys

    toys = Toys(tmp_path, {**KEYS, "sleep": 0.5})
    file = lab.shared / "evolution.json"
    file.write_text(json.dumps({"project_name": "toy", "base_dir": "s3://runs/hosts", **toys.keys}))
    words = [f"{name}={value}" for name, value in variables(store).items()] + ["OPENBLAS_NUM_THREADS=1"]
    begins = [*lab["h1"].inside(ROOT), *words, *TOY, "--config", str(file), "--workers", "1"]
    first = toys.run(begins)
    until(lambda: "1 worker" in first.said, "the run is begun", LONG)
    joined = []
    for name in ("h2", "h3"):
        joined.append(toys.run([*lab[name].inside(ROOT), *words, *TOY, "--join", RUN, "--workers", "1"]))
        until(lambda: "Joining the run" in joined[-1].said, "it has joined", LONG)
    os.kill(joined[0].process.pid, signal.SIGINT)
    for pid in lab["h2"].pids("--join"):
        lab["h2"].run("kill", "-INT", str(pid))
    first.ends(0)
    joined[1].ends(0)
    joined[0].end()
    assert digest_by(lab, store) == undisturbed(json.dumps(toys.keys, sort_keys=True))


def digest_by(lab: Lab, store: Seaweed) -> str:
    return asked(lab, store, _DIGEST)


def made(lab: Lab, store: Seaweed) -> int:
    """How many members are there."""
    return int(asked(lab, store, _MADE))


def asked(lab: Lab, store: Seaweed, program: str) -> str:
    """As a machine sees it that reaches the bucket."""
    words = [f"{name}={value}" for name, value in variables(store).items()]
    done = lab["h3"].run("env", "-C", str(ROOT), *words, sys.executable, "-c", program, RUN, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
