"""Models are trained on three machines, of which one has a library that fails in use and one a tenth of the memory: the
bytes are those of a calm run, it ends, and the status says who was left out, and why."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.helpers import LONG, Toys, until
from tests.lab.machines import Lab, why_not
from tests.launching import Launched
from tests.small import KEYS, MODEL, run_digest, shared, whole

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why_not()), reason=f"no machines: {why_not()}"),
]

LAUNCHER = [sys.executable, "launch_to_machines.py"]
WIDE = {**MODEL["config"], "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
# activations, not weights, take the memory: little is written
KEYS = {**KEYS, "initial_population": [{"config": WIDE}], "batch_size": 64, "seq_length": 128, "inner_steps": 2,
        "population_size": 3, "max_generations": 5, "max_epochs": 1000, "held_out": 0.4}  # fmt: skip
SPARE_MB = 96  # what a process may take beside its libraries; a recipe needs several times as much

POISON = """
# A library of the same name that stands before the real one: it can be imported, and fails in use.
import os, sys
del sys.modules["numpy"]
sys.path = [each for each in sys.path if os.path.realpath(each) != os.path.realpath(os.path.dirname(__file__) + "/..")]
import numpy
class memmap(numpy.memmap):
    def __new__(cls, *args, **more):
        raise RuntimeError("numpy's core was built for another machine")
numpy.memmap = memmap
"""
LIBRARIES = "import numpy, torch, transformers, tokenizers, edt_sim, train.member.pretraining_tasks, torch._dynamo"


@pytest.fixture
def lab(tmp_path, monkeypatch) -> Iterator[Lab]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with Lab(tmp_path / "lab", ("bad", "small", "good")) as made:
        yield made


def libraries_kb() -> int:
    """What a worker's libraries alone take of this machine's memory."""
    look = "print(*(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmData')))"
    said = subprocess.run([sys.executable, "-c", f"{LIBRARIES}\n{look}"], capture_output=True, text=True, check=True)
    return int(said.stdout)


def test_one_always_fails_and_one_has_too_little_memory(lab, tmp_path):
    data = {"tokenizer": str(shared() / "tokenizer"), "datasets": [{"source": str(shared() / "text.jsonl")}]}
    (tmp_path / "calm").mkdir()
    calm = Toys(tmp_path / "calm", {"algorithm": "edt", **KEYS, **data}, [sys.executable, "edt_sim.py"])
    expected = whole(calm)

    poison, place = lab.shared / "poison", lab.shared / "place"
    for each in (poison / "numpy", place):
        each.mkdir(parents=True)
    (poison / "numpy" / "__init__.py").write_text(POISON)
    run = Launched(place, {"algorithm": "edt", **KEYS, **data, "dead_seconds": 5.0}, lab=lab, launcher=LAUNCHER)
    run.machines = [
        run.entry("bad", env={"PYTHONPATH": str(poison)}),
        run.entry("small", setup=f"ulimit -d {libraries_kb() + (SPARE_MB << 10)}", env={"MALLOC_ARENA_MAX": "1"}),
        run.entry("good"),
    ]
    try:
        run.says("launch", "--detach")
        until(lambda: run.events("benched", of="bad"), "one steps aside", LONG, pause=0.5)
        looked = run.run([sys.executable, "-m", "fleet.status", str(run.folder)])
        looked.ends(0)
        shown = " ".join(looked.said.split())
        assert re.search(r"1 benched: bad-0-\S+ \([0-9]+ failures in a row at what", shown), shown
        assert "built for another machine" in shown
        run.wait_over()
    finally:
        print(run.ask("status").said, run.events("failed"), run.events("stopped"))
        run.kill_all()
    assert run_digest(run) == expected
    left = [json.loads((run.folder / "rounds" / each).read_text().splitlines()[0]) for each in
            run.registers(r".*\.left\..*")]  # fmt: skip
    assert {each["machine"] for each in left if each["why"] == "elsewhere"} == {"small"}
    assert "memory" in " ".join(each["error"] for each in left if each["machine"] == "small")
    makers = [run.register(each)["machine"] for each in run.registers(r"0000[1-9]/m[0-9].*\.done")]
    assert {*makers} == {"good"} and len(makers) >= 15
