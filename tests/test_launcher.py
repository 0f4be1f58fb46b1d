"""The launcher on real machines: each with an sshd, a host key, a disk and processes of its own."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import LONG, until
from tests.lab.machines import Lab, why_not
from tests.launching import Launched, old_pythons
from tests.typing_in import answered

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=f"no machines: {why_not()}")]

SMALL = {"algorithm": "diloco", "population_size": 3, "max_generations": 6, "size": 24, "dead_seconds": 5.0}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("lab"), behind={"h3": "h1"}) as made:
        yield made


@pytest.fixture
def fleet(
    lab: Lab, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Launched]]:
    """Makes runs on the lab's machines; afterwards none of their processes is left."""
    monkeypatch.setenv("XDG_STATE_HOME", str(lab.folder / "state"))
    made: list[Launched] = []

    def make(lab: Lab = lab, machines: Any = None, **keys: Any) -> Launched:
        name = re.sub(r"\W", "-", request.node.name)[:40]
        place = lab.shared / f"{name}-{len(made)}"
        place.mkdir()
        made.append(Launched(place, {**SMALL, **keys}, lab=lab, machines=machines))
        return made[-1]

    yield make
    for each in made:
        each.kill_all()


def test_a_run_on_three_machines_has_the_same_bytes(fleet):
    run = fleet()
    said = run.says("launch", sleep=0.05)
    assert (
        "New run" in said
        and "Launch 1" in said
        and said.count("started") == 3
        and f"Everything is in {run.folder}" in said
    )
    assert "\nround 1: " in said and "The run is over after 6 rounds" in said
    run.same()
    assert {event["worker"][:2] for event in run.events("published")} == {"h1", "h2", "h3"}
    for file in run.folder.rglob("*"):  # for its user alone
        assert not file.stat().st_mode & 0o077, file
    assert "The run is over. To start another one" in run.says("launch")
    said = run.says("stop")
    assert "The run is over." in said and "Asked" not in said and said.count("no worker is left") == 3


def test_it_stops_goes_on_and_is_watched(fleet, lab):
    run = fleet(sleep=0.25, max_generations=30)  # far from over while it is asked
    assert "Launch 1" in run.says("launch", "--detach")
    until(lambda: run.events("published", of="h2"), "h2 works")
    assert "h2-0-" in run.says("status")
    listening = lab["h2"].do("ss -Hltun").splitlines()
    assert len(listening) == 1 and f"{lab['h2'].address}:22 " in listening[0]  # its sshd, and nothing of ours
    assert set(re.findall(r"^h\d-0 ", run.says("logs"), re.M)) == {"h1-0 ", "h2-0 ", "h3-0 "}
    assert set(re.findall(r"^h\d-0 ", run.says("logs", "h2"), re.M)) == {"h2-0 "}
    assert run.says("launch", "--detach").count("running already") == 3  # joins
    assert len(run.alive()) == 3
    said = run.says("stop")
    assert said.count("no worker is left") == 3 and not run.alive() and not run.is_over()
    assert run.says("status").count("it was told to stop") == 3
    watching = run.ask("launch")
    until(lambda: len(run.alive()) == 3, "they work again")
    until(lambda: "\nround " in watching.said, "its progress is told")
    watching.send(signal.SIGINT)
    watching.ends(0)
    assert "The workers go on" in watching.said and len(run.alive()) == 3
    options = f"--config {run.place}/evolution.json --machines {run.place}/machines.json"
    assert f"\n  python launch_to_machines.py stop {options} --ssh-config " in watching.said
    before = run.alive()
    assert "started" in run.says("restart", "h2")
    after = run.alive()
    assert {name for name in before if name[:2] != "h2"} < {*after} and not {n for n in before if n[:2] == "h2"} & {
        *after
    }
    run.says("launch", sleep=0.0)
    run.same()


def test_whatever_dies_is_started_again_or_told(fleet):
    run = fleet(sleep=0.3, max_generations=8)
    run.says("launch", "--detach")
    victim = until(lambda: next((name for name in run.alive() if name[:2] == "h1"), ""), "h1 works")
    os.kill(run.alive()[victim], signal.SIGKILL)
    until(lambda: [name for name in run.alive() if name[:2] == "h1" and name != victim], "another takes its place")
    assert "was killed by SIGKILL" in run.says("status")
    assert f"{victim} was killed by SIGKILL; another takes its place" in run.says("logs", "h1")
    run.wait_over()
    run.same()


def test_stop_now_kills_what_has_left_its_group(fleet, lab):
    run = fleet(sleep=0.5, max_generations=50)
    run.says("launch", "--detach")
    until(lambda: len(run.alive()) == 3, "they work")
    worker = run.alive()[next(name for name in run.alive() if name[:2] == "h2")]
    mark = next(line for line in Path(f"/proc/{worker}/environ").read_bytes().split(b"\0") if line[:9] == b"FLEET_RUN")
    lab["h2"].do(f"env {mark.decode()} setsid sleep 1000 >/dev/null 2>&1 </dev/null &")
    until(lambda: lab["h2"].pids("sleep 1000"), "a child that has left")
    assert run.says("stop", "--now").count("none") == 3
    assert not run.alive() and not lab["h2"].pids("sleep 1000") and not lab["h2"].pids("fleet.remote.supervisor")
    run.says("launch", sleep=0.0)
    run.same()


def test_machines_that_cannot_take_part_are_named_and_hold_nobody_up(tmp_path, fleet):
    with Lab(tmp_path / "lab", names=[f"h{n}" for n in range(1, 10)], unshared=["h8"]) as lab:
        lab["h2"].cut()
        lab["h3"].hang()
        lab["h4"].new_host_key()
        lab["h7"].read_only_home()
        lab["h7"].fill()
        entry = fleet(lab).entry
        machines = [
            *(entry(f"h{n}") for n in (1, 2, 3, 4)), entry("h5", python="/opt/no python"),
            entry("h6", setup="echo out; echo oops >&2; false"), entry("h7"), entry("h8"), entry("nowhere.invalid"),
            entry("h9", python="/usr/bin/python3") | {"name": "bare"},
        ]  # fmt: skip
        lines = {line for line in lab.known_hosts.read_text().splitlines() if not line.startswith("h1,")}
        lab.known_hosts.write_text("\n".join(lines) + "\n")
        run = fleet(lab, machines=machines)
        lab["h8"].do(f"mkdir -p {run.place}/runs")
        said = " ".join(run.says("check", "--timeout", "3", code=1).replace("│", " ").split())
        print(said)  # for whoever reads why this failed
        for wanted in (
            "its host key is not known", "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub", "no answer within 3 s",
            "accepts connections, but is silent for 3 s", "its host key has CHANGED", "ssh-keygen -R",
            "its python '/opt/no python' does not run there", "its shell ended with code 1: oops",
            "no folder for a copy of the code can be made", "its BASE_DIR is another disk than others'",
                "this-machine, bare / h8",
            "the name nowhere.invalid does not resolve", "its Python lacks",
        ):  # fmt: skip
            assert wanted in said, wanted


def test_too_few_machines_start_nothing(fleet, lab):
    run = fleet(machines=None)
    lab["h2"].cut()
    try:
        said = run.says("launch", "--timeout=2", "--min-machines=3", code=1)
        assert "2 of 3 machines are ready; nothing was started" in said and not run.alive()
        assert "no answer within" in run.says("launch", "--timeout=2", "--detach", code=1, sleep=0.2)
        assert {name[:2] for name in run.alive()} == {"h1", "h3"}
    finally:
        lab["h2"].heal()
    run.wait_over()
    run.same()


def test_a_cable_pulled_in_the_middle_is_one_machine_s_trouble(fleet, lab):
    run = fleet(sleep=0.1)
    launching = run.ask("launch", "--timeout=3", "--detach")
    until(lambda: [*run.place.glob("runs/.check-*/*")], "they compare their disks", pause=0.001)
    lab["h2"].cut()
    try:
        launching.end(60)
    finally:
        lab["h2"].heal()
    assert "Traceback" not in launching.said
    run.wait_over()
    run.same()


def test_a_launcher_that_does_not_see_the_disk_goes_through_a_machine(tmp_path, fleet):
    away = Path("/mnt/away")
    with Lab(tmp_path / "lab", mounts={"h1": away, "h2": away}) as lab:
        run = fleet(lab, max_generations=30)
        there = {"base_dir": str(away / run.place.name / "runs")}
        run.machines = [run.entry(name, **there) for name in ("h1", "h2")] + [run.entry("h3")]
        for machine in run.machines[2:]:
            machine["base_dir"] = str(run.place / "runs")
        base = "/nowhere/at/all"
        assert run.says("launch", "--detach", base=base, sleep=0.1).count("started") == 3
        until(lambda: run.events("published", of="h1"), "h1 works")
        assert "workers" in run.says("status", base=base) and "h1-0" in run.says("logs", base=base)
        assert run.says("stop", base=base).count("no worker is left") == 3
        assert "Removed" in run.says("clean", base=base)
        run.says("launch", "--through=h2", base=base, sleep=0.0)
        run.same()


def test_an_encrypted_key_is_asked_for_once(tmp_path, fleet):
    with Lab(tmp_path / "lab", names=("h1", "h2")) as lab:
        subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "open sesame", "-f", lab.key], check=True)
        run = fleet(lab)
        assert "is encrypted: give it to the agent with" in " ".join(run.says("check", code=1).split())
        said = answered(run.command("check"), {"Passphrase of": "open sesame\n"})
        assert said.count("Passphrase of") == 1 and said.count("ready") >= 2
        assert "passphrase" in answered(run.command("check"), {"Passphrase of": "wrong\n"})


def test_two_launchers_at_once_start_one_crew_a_machine(fleet):
    run = fleet(sleep=0.2, max_generations=40)
    both = [run.ask("launch", "--detach") for _ in range(2)]
    for each in both:
        each.end(LONG)
        assert "Traceback" not in each.said
    until(lambda: len(run.alive()) == 3, "one worker on each machine")
    assert [len(machine.pids("fleet.remote.supervisor")) for machine in run.lab] == [1, 1, 1]
    run.says("stop", "--now")


def test_other_code_does_not_join(fleet, tmp_path):
    run = fleet(sleep=0.2, max_generations=40, machines=None)
    run.machines = [run.entry("h1")]
    run.says("launch", "--detach")
    other = tmp_path / "other"
    shutil.copytree(Path(__file__).parents[1] / "fleet", other / "fleet")
    shutil.copytree(Path(__file__).parents[1] / "tests", other / "tests")
    run.machines = [run.entry("h1"), run.entry("h2")]
    said = run.says("launch", "--detach", code=1, local_package=str(other))
    assert "Workers on h1 are at work with other code" in said
    assert "has other code" in run.says("restart", "h1", code=2)
    tar = next((run.folder / "code").glob("*.tar"))
    tar.chmod(0o600)
    tar.write_bytes(tar.read_bytes().replace(b"import", b"imporT", 1))  # nobody runs what the disk says
    for entry in run.lab:
        entry.do("rm -rf ~/.cache/fleet/code")
    del run.keys["local_package"]
    assert "is not the code that was sent" in run.says("launch", "--detach", code=1)
    run.says("stop", "--now")


def test_machines_may_share_a_home_and_their_setup_may_read_and_print(fleet):
    run = fleet(max_generations=4)
    setup = f"export XDG_CACHE_HOME={run.place}/cache; read -r line; echo -n welcome"
    run.machines = [run.entry(machine.name, setup=setup) for machine in run.lab]
    assert run.says("launch", sleep=0.2).count("started") == 3
    run.same()


def test_what_strangers_write_in_the_run_is_shown_or_passed_over(fleet):
    run = fleet(sleep=0.1, max_generations=50)
    run.says("launch", "--detach")
    workers = run.folder / "workers"
    for n, text in enumerate(
        ['{"seats":5}', "{}", '{"seats":[{"code":[]}]}', "[" * 60_000, "\x1b[2J", '{"launch":1e999}']
    ):
        (workers / f"evil{n}.supervisor").write_text(text)
    (workers / "x-0.log").symlink_to("/etc/passwd")
    os.mkfifo(workers / "y-0.log")
    assert "h1-0" in run.says("status") and "root:" not in run.says("logs") and "\x1b[2J" not in run.says("status")
    assert run.says("restart", "h1").count("started") == 1
    os.kill(next(pid for name, pid in run.alive().items() if name[:2] == "h2"), signal.SIGKILL)
    run.says("stop", "--now")
    said = run.says("restart", "h1", code=2)
    assert "no launch is at work" in said


def test_workers_without_a_crew_are_ended_too(fleet, lab):
    run = fleet(sleep=0.1, max_generations=100)
    run.says("launch", "--detach")
    until(lambda: len(run.alive()) == 3, "they work")
    lab["h2"].do(f"kill -9 {' '.join(map(str, lab['h2'].pids('fleet.remote.supervisor')))}")
    until(lambda: not lab["h2"].pids("fleet.remote.supervisor"), "its supervisor is gone")
    before = run.alive()
    assert run.says("restart", "h2").count("started") == 1
    assert len(lab["h2"].pids("fleet.remote.supervisor")) == 1 and len(run.alive()) == 3 and {*run.alive()} != {*before}
    run.says("stop", "--now")


def test_a_machine_that_never_stops_talking_holds_nobody_up_and_an_old_python_is_named(tmp_path, fleet):
    setups = {"h2": "cat /dev/zero", "h3": "yes", "h4": "while echo x; do sleep 0.1; done", "h5": "cat /dev/zero >&2"}
    fake = tmp_path / "python3.6"  # wherever there is no real one
    fake.write_text(f"#!/bin/sh\nshift; exec {sys.executable} \"$1\" \"import sys; sys.version_info = (3, 6, 15); "
                    'sys.version = \'3.6.15 (it says)\'; $2" "$3"\n')  # fmt: skip
    fake.chmod(0o755)
    olds = {**old_pythons(), str(fake): "3.6.15"}
    pythons = {f"h{n}": python for n, python in enumerate(olds, 6)}
    with Lab(tmp_path / "lab", names=("h1", *setups, *pythons)) as lab:
        run = fleet(lab)
        run.machines = [run.entry("h1"), *(run.entry(name, setup=setup) for name, setup in setups.items())]
        run.machines += [run.entry(name, python=python) for name, python in pythons.items()]
        began = time.monotonic()
        said = " ".join(run.says("check", "--timeout", "5", code=1).replace("│", " ").split())
        assert time.monotonic() - began < 40
    for name in setups:
        assert re.search(rf"{name}: NO: (it says more than 64 MB, and no answer among them|no answer within 5 s)", said)
    for name, python in pythons.items():
        old = f"it has Python {olds[python]} as '{python}'; 3.11 or newer is needed"
        assert f"{name}: NO: {old}: name one as `python` in machines.json" in said
