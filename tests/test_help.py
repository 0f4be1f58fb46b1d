"""What `--help` shows in a narrow terminal: commands to be copied are whole, and what people need first comes first."""

import re

import pytest

from fleet.help_pages import laid_out
from fleet.our_packages import PACKAGES
from tests.commands import answer
from tests.helpers import ROOT

PAGES = {
    "edt_sim.py": ["python edt_sim.py --config evolution.json --workers 4", "python -m fleet.status RUN_DIR --watch"],
    "edt.py": ["python edt.py --config evolution.json --workers 4"],
    "edt_es.py": ["python edt_es.py --config evolution.json --workers 4"],
    "edt_evomerge.py": ["python edt_evomerge.py --config evolution.json --workers 4"],
    "diloco.py": ["python diloco.py --config evolution.json --workers 4"],
    "diloco_sim.py": ["python diloco_sim.py --config evolution.json --workers 4"],
    "launch_to_machines.py": ["python launch_to_machines.py launch --dry-run"],
    "-m fleet.ancestry": ["python -m fleet.ancestry runs/edt --out family"],
    "-m fleet.copy": ["python -m fleet.copy runs/edt s3://bucket/runs/edt"],
    "-m fleet.digest": ["python -m fleet.digest runs/edt runs/edt-again"],
    "-m fleet.presets": ["python -m fleet.presets 150m > evolution.json"],
    "-m fleet.status": ["python -m fleet.status runs/edt --watch"],
    "-m fleet.report": ["ssh -L 8400:127.0.0.1:8400 MACHINE python -m fleet.report runs/edt --serve 8400"],
    "-m fleet.fork": [
        "python -m fleet.fork runs/edt --round 60 --set LR=0.005 --set ALGORITHM=diloco --name from-60",
        "python -m fleet.fork runs/edt --set MAX_GENERATIONS=240 --set POPULATION_SIZE=8 \\",
    ],
    "-m train.advise": ["python -m train.advise configs/150m.json --workers 8 --disk 110 --step 0.9"],
    "-m train.compare": ["python -m train.compare evolution.json --workers 3 --out /mnt/shared/compared"],
    "-m train.export": ["python -m train.export runs/edt --what best --out my-model"],
    "-m train.finetune": [
        "python -m train.finetune ./model.gguf chats.jsonl --out my-model --full",
        '{"prompt": "...", "chosen": "...", "rejected": "..."}    (preferences)',
    ],
    "-m train.memory": ["python -m train.memory configs/150m.json"],
    "-m train.train_fsdp": ["torchrun --standalone --nproc-per-node 8 train/train_fsdp.py --path-model 150m \\"],
    "-m merge": ["python -m merge recipe.yml merged-model", "merge_method: slerp"],
    "-m merge.evolve": [
        "python -m merge.evolve genome.yml --storage-path searches/mine --task-search-path my-tasks",
        "genome:",
    ],
    "-m merge.gguf": ["python -m merge.gguf my-model.gguf my-model --dtype bfloat16"],
    "-m merge.lora": [
        "python -m merge.lora extract org/tuned org/base my-adapter --energy 0.95",
        "python -m merge.lora merge recipe.yml my-adapter --rank 16",
        "python -m merge MODEL+ADAPTER OUT",
        "merge_method: ties",
    ],
    "-m evomerge.benchmarks": [
        "python -m evomerge.benchmarks --model1 ./a --model2 ./b --model3 ./c --json figures.json",
    ],
    "-m evomerge.cli": ['python -m evomerge.cli --generate runs/evomerge/winner --prompt "The import statement"'],
    "-m evomerge.integration_tests": ["python -m evomerge.integration_tests --model1 ./a --model2 ./b --model3 ./c"],
}
BY_OTHERS = {  # who starts these is no person
    *("own_loop_join.py", "-m train.cluster.process_group"),
    *("-m train.rl.verifier_process", "-m fleet.remote.reaching", "-m fleet.remote.run_proxy"),
    *("-m fleet.remote.shipping", "-m fleet.remote.supervisor"),
}


def test_no_command_is_left_out():
    files = [*ROOT.glob("*.py"), *(file for room in PACKAGES for file in (ROOT / room).rglob("*.py"))]
    starting = [file.relative_to(ROOT) for file in files if '\nif __name__ == "__main__":' in file.read_text()]
    names = [str(file.with_suffix("")).replace("/", ".").removesuffix(".__main__") for file in starting]
    assert {f"-m {name}" if "." in name or name == "merge" else f"{name}.py" for name in names} == {*PAGES, *BY_OTHERS}


@pytest.mark.parametrize("command", PAGES)
def test_commands_to_be_copied_are_whole(command):
    code, said, _ = answer(*command.split(), "--help", env={"COLUMNS": "80"})
    assert code == 0
    for line in PAGES[command]:
        assert f"\n    {line}\n" in said, line


def test_the_first_screen_says_what_it_does_how_it_is_called_and_its_options():
    _, said, _ = answer("edt_sim.py", "--help", env={"COLUMNS": "80"})
    first = said.splitlines()[:24]
    wanted = ("a population of models", "edt_sim.py --config", "--config PATH", "--workers INT", "--help")
    places = [next(n for n, line in enumerate(first) if word in line) for word in wanted]
    assert places == sorted(places)
    assert all(len(line) <= 80 for line in first) and "ALGORITHM edt-evomerge" in said


def test_prose_is_wrapped_and_what_is_indented_is_not():
    text = "Some words that\nare wrapped:\n\n    a command that is longer than the terminal is wide\n\nOthers."
    assert laid_out(text, 12) == (
        "Some words\nthat are\nwrapped:\n\n    a command that is longer than the terminal is wide\n\nOthers."
    )


@pytest.mark.parametrize("words", [["--worker", "4"], ["--worker=4"], ["--worker", "4", "--config", "x.json"]])
def test_worker_means_workers(words):
    code, _, errors = answer("edt_sim.py", *words)
    assert code == 2 and "how many local workers there are, --workers says" in errors


def test_an_option_that_does_not_exist_is_answered_by_the_nearest():
    code, _, errors = answer("edt_sim.py", "--configs", "x.json")
    assert code != 0 and re.search(r"Unknown option: --configs. Did you mean --config\?", errors)
