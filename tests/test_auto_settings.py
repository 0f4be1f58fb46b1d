"""PRECISION and COMPILE auto: found out by whoever begins a run, kept in its folder, and in force for all others."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from fleet.gpus import Accelerators
from fleet.host import Host
from fleet.machines import Machine
from fleet.remote import agent
from fleet.remote.preflight import accelerators
from fleet.run import create_run, open_run
from tests.helpers import ROOT
from tests.lab.loopback import loopback
from tests.posttraining import config as posttrain_config
from tests.small import config
from train.auto_settings import here, resolve_auto
from train.training_commands import prepare

ASKED = "--query-gpu=name,memory.total,compute_cap --format=csv,noheader"


@pytest.fixture
def cards(tmp_path, monkeypatch):
    """A machine with GPUs of these generations, as its driver's tool tells them."""

    def there(*capabilities: str) -> None:
        tool = tmp_path / "bin" / "nvidia-smi"
        tool.parent.mkdir(exist_ok=True)
        lines = "".join(f"echo NVIDIA H100 80GB HBM3, 81559 MiB, {each}\n" for each in capabilities)
        tool.write_text(f'#!/bin/sh\n[ "$*" = "{ASKED}" ] || exit 1\n{lines}')
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tool.parent))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(capabilities)))))

    return there


@pytest.mark.parametrize(
    ("capabilities", "precision"),
    [((), "32-true"), (("9.0", "8.0"), "bf16-mixed"), (("9.0", "7.5"), "32-true"), (("12.0",), "bf16-mixed")],
)
def test_all_cards_of_the_machine_decide(cards, tmp_path, capsys, capabilities, precision):
    cards(*capabilities)
    for each in (config(base_dir=str(tmp_path)), posttrain_config(tmp_path, 1)):
        assert each.precision == "auto" and resolve_auto(each, tmp_path).precision == precision
    assert (f'PRECISION "{precision}"' in capsys.readouterr().out) == bool(capabilities)


def test_hidden_cards_and_a_machine_without_the_tool_do_not_count(cards, tmp_path, monkeypatch):
    cards("9.0")
    assert here().compute == ("9.0",)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not here().compute
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not here().compute


def test_a_run_keeps_what_it_began_with_and_what_is_said_counts(cards, tmp_path):
    """The second starter has no GPU, and goes on in what the first one decided."""
    cards("9.0")
    given = config(algorithm="edt", project_name="run", base_dir=str(tmp_path))
    first = prepare(given, tmp_path)
    create_run(tmp_path, "run", first.bound(), Host(), type(first))
    begun = open_run(tmp_path / "run", Host(), "w")[1]["config"]
    assert (begun["precision"], begun["compile"]) == ("bf16-mixed", False)
    cards()
    second = prepare(given, tmp_path)
    assert second.bound() == first.bound()
    create_run(tmp_path, "run", second.bound(), Host(), type(second))
    assert resolve_auto(config(precision="fp16-mixed"), tmp_path).precision == "fp16-mixed"
    assert prepare(given.model_copy(update={"project_name": "other"}), tmp_path).precision == "32-true"


@pytest.mark.parametrize(
    ("capabilities", "steps", "tool", "compiles"),
    [(("9.0",), 500, "cc", True), (("9.0",), 499, "cc", False), (("9.0",), 500, "", False), ((), 500, "cc", False)],
)
def test_long_runs_compile_on_gpus_where_that_can_be(cards, tmp_path, monkeypatch, capabilities, steps, tool, compiles):
    cards(*capabilities)
    if tool:
        (tmp_path / "bin" / tool).symlink_to(tmp_path / "bin" / "nvidia-smi")
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").touch()
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / name))
    given = config(max_generations=1, inner_steps=steps, first_inner_steps=steps, base_dir=str(tmp_path))
    assert given.compile == "auto" and resolve_auto(given, tmp_path).compile is compiles
    for said in (True, False):
        assert resolve_auto(given.model_copy(update={"compile": said}), tmp_path).compile is said


def told(**capabilities: str) -> list[Accelerators]:
    return [Accelerators(name, tuple(each.split()), compiles=True) for name, each in capabilities.items()]


@pytest.mark.parametrize(
    ("machines", "precision", "old"),
    [
        (told(a="9.0 9.0", b="8.0"), "bf16-mixed", ""),
        (told(a="9.0", b="7.5", c="8.6"), "32-true", "GPUs of b do not"),
        (told(a="9.0", b=""), "bf16-mixed", ""),  # a machine without any has no say
        (told(a="", b=""), "32-true", ""),
        ([*told(a="9.0"), Accelerators("b", ("",))], "32-true", "GPUs of b do not"),  # an old driver does not tell
        ([*told(a="9.0"), Accelerators("b", ("[N/A]",))], "32-true", "GPUs of b do not"),
    ],
)
def test_the_cards_of_all_machines_decide(cards, tmp_path, capsys, machines, precision, old):
    """And not those of whoever makes the run."""
    cards("7.5" if precision == "bf16-mixed" else "9.0")
    for each in (config(base_dir=str(tmp_path)), posttrain_config(tmp_path, 1)):
        assert resolve_auto(each, tmp_path, machines).precision == precision
    said = capsys.readouterr().out
    assert ("for the GPUs of its machines" in said) == any(each.compute for each in machines) and old in said


def test_a_run_compiles_where_all_of_its_machines_can(tmp_path):
    given = config(max_generations=1, inner_steps=500, first_inner_steps=500, base_dir=str(tmp_path))
    assert resolve_auto(given, tmp_path, told(a="9.0", b="")).compile is True
    assert resolve_auto(given, tmp_path, told(a="", b="")).compile is False
    assert resolve_auto(given, tmp_path, [*told(a="9.0"), Accelerators("b")]).compile is False


def test_a_machine_s_cards_are_those_that_its_workers_may_use(cards):
    cards("9.0", "8.0")
    facts = agent.facts([])
    assert facts["devices"] == ["NVIDIA H100 80GB HBM3, 81559 MiB"] * 2 and facts["compute"] == ["9.0", "8.0"]
    used = accelerators(Machine(host="a", name="a", devices=(0,)), facts)
    assert used == Accelerators("a", ("9.0", "8.0"), facts["compiles"]) and used.generation == 8
    assert accelerators(Machine(host="a", name="a", env={"CUDA_VISIBLE_DEVICES": "-1"}), facts).generation is None


def test_an_old_driver_tells_names_and_a_broken_one_nothing(cards, tmp_path):
    cards("9.0")
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.write_text(tool.read_text().replace(",compute_cap", "").replace(", 9.0", ""))
    assert agent.accelerators() == [("NVIDIA H100 80GB HBM3, 81559 MiB", "")]
    tool.write_text("#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n")
    assert agent.accelerators() == []


@pytest.mark.slow
def test_a_launch_has_what_all_of_its_machines_know(cards, tmp_path, monkeypatch, pretraining):
    """The machine that launches has another card, and no say."""
    usual, machines = os.environ["PATH"], list[dict[str, Any]]()
    with loopback(tmp_path / "ssh", 2) as (ssh_config, ports):
        for port, capability in zip(ports, ("9.0", "8.0"), strict=True):
            cards(capability)
            (tmp_path / "bin").rename(there := tmp_path / str(port))
            about = {"host": "127.0.0.1", "port": port, "name": f"m{port}", "python": sys.executable}
            machines.append({**about, "setup": f"export PATH={there}:{usual}"})
        cards("7.5")
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{usual}")
        run = pretraining(max_generations=1)
        (tmp_path / "machines.json").write_text(json.dumps(machines))
        mine = {"algorithm": "edt", "project_name": "toy", "base_dir": str(run.folder.parent), **run.keys}
        (tmp_path / "evolution.json").write_text(json.dumps(mine))
        words = [sys.executable, ROOT / "launch_to_machines.py", f"--ssh-config={ssh_config}"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert "The run is over" in done.stdout, done.stdout + done.stderr  # by the workers of one: both are this box
    assert 'for the GPUs of its machines, the run has PRECISION "bf16-mixed"' in done.stdout
    assert open_run(run.folder, Host(), "w")[1]["config"]["precision"] == "bf16-mixed"
