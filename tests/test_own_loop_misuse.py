"""What people do wrong with a loop of their own is said in a line; what breaks off goes on."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diloco import join
from edt import EDT
from edt import join as join_edt
from fleet.digest import digest
from fleet.fork import go_on
from fleet.history import opened
from fleet.remote.launcher import place
from fleet.run_config import UserError
from launch_to_machines import METHOD_SCRIPTS
from tests.helpers import LONG, ROOT, SOON, kill, until
from tests.own_loops import KEYS, loader, net, noised, started, steps, train
from train.own_loop_config import OwnLoopConfig


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def the_digest(folder: Path) -> str:
    history = opened(folder)
    assert history.over
    return digest(history)


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr)


# -- before anything is trained ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("learning, why", [
    ([], "no optimizer was given: join(settings, model, optimizer)"),
    (["adam"], "str has no state_dict and load_state_dict: what it remembers cannot go along"),
    ([sgd(net())], "SGD has no parameter of this model: was it made for another one?"),
])  # fmt: skip
def test_what_learns_is_to_be_an_optimizer_of_the_model(tmp_path, learning, why):
    with pytest.raises(UserError, match=re.escape(why)):
        join(tmp_path / "run", net(), *learning)
    assert not (tmp_path / "run").exists()


def test_an_optimizer_of_two_modes_is_to_train(tmp_path):
    free = pytest.importorskip("schedulefree", reason="schedulefree is missing (requirements-dev.txt)")
    model = net()
    with pytest.raises(UserError, match=r"AdamWScheduleFree is not in train mode: call its train\(\) before join"):
        join(tmp_path / "run", model, free.AdamWScheduleFree(model.parameters()))


def test_a_parameter_that_no_optimizer_has_is_named(tmp_path):
    model = net()
    with pytest.raises(UserError, match=r"parameter 2\.weight is in no optimizer \(2 of 4\)"):
        join(tmp_path / "run", model, torch.optim.SGD(model[0].parameters(), 0.1))
    with pytest.raises(UserError, match="nothing that learns"):
        join(tmp_path / "run", model.requires_grad_(False), torch.optim.SGD(model.parameters(), 0.1))


@pytest.mark.parametrize("keys, why", [
    ({"datasets": ["stdlib"], "lr": 1}, "join: DATASETS, LR: your own script says that; leave it out"),
    ({"num_machines": 2}, "join: NUM_MACHINES: each process that joins is a worker: start some"),
    ({"inner_step": 2}, 'unknown key "INNER_STEP"; the nearest known key is INNER_STEPS'),
    ({"lr_spread": 4}, "LR_SPREAD spreads the gene lr: give GENES one"),
    ({"mutation_probability": 0.5}, "MUTATION_PROBABILITY mutates GENES: name some, or leave it at 0"),
    ({"genes": {"lr": -1}}, "GENES"),
    ({"population_size": 3, "group_size": 2}, "POPULATION_SIZE is 3, not a multiple of GROUP_SIZE 2"),
])  # fmt: skip
def test_settings_that_cannot_work(tmp_path, keys, why):
    model = net()
    with pytest.raises(UserError, match=re.escape(why)):
        join_edt(tmp_path / "run", model, sgd(model), **keys)


def test_a_configuration_file_and_the_folder_beside_it(tmp_path):
    file, model = tmp_path / "mine.json", net()
    file.write_text(json.dumps({"ALGORITHM": "edt", "BASE_DIR": "below", "INNER_STEPS": 7}))
    with pytest.raises(UserError, match="ALGORITHM is 'edt', and the script joins diloco-loop"):
        join(file, model, sgd(model))
    run = join_edt(file, model, sgd(model), inner_steps=3)
    assert (run.config.inner_steps, run.total_steps) == (3, 36) and (tmp_path / "below/edt-loop/run.json").is_file()


# -- processes that differ ---------------------------------------------------------------------------------------------


def joined(folder: Path, model: nn.Module, optimizer: Any = None, **keys: Any) -> None:
    optimizer = optimizer or sgd(model)
    with join(folder, model, optimizer, **{**KEYS, **keys}) as run:
        steps(
            run, (model, [optimizer], noised), (batch for _, batch in zip(range(7), run.batches(loader), strict=False))
        )


def other(**changes: nn.Module) -> nn.Sequential:
    model = net()
    for number, module in changes.items():
        model[int(number)] = module
    return model


def test_a_model_that_is_another_than_the_runs(tmp_path, capsys):
    torch.manual_seed(1)
    first = net()
    first[2].bias.requires_grad_(False)
    joined(tmp_path / "run", first)
    capsys.readouterr()
    double, norm = nn.Linear(12, 8).double(), nn.BatchNorm1d(8, affine=False)
    wrong = [
        (other(**{"0": double}), "parameter 0.weight is float64 [8, 12] here, and float32 [8, 12] there"),
        (other(**{"1": nn.PReLU()}), "parameter 1.weight is float32 [1] here, and missing there"),
        (other(**{"1": norm}), "buffer 1.running_mean is float32 [8] here, and missing there"),
    ]
    for model, why in wrong:
        model[2].bias.requires_grad_(False)
        with pytest.raises(UserError, match=re.escape(why)):
            joined(tmp_path / "run", model)
    frozen = net()
    frozen[2].bias.requires_grad_(False)
    with pytest.raises(UserError, match=r"what is frozen in 2\.bias is \w+ here, and \w+ there"):
        joined(tmp_path / "run", frozen)
    assert "Note" not in capsys.readouterr().out
    frozen.load_state_dict({**frozen.state_dict(), "2.bias": first.state_dict()["2.bias"]})
    with pytest.raises(UserError, match=r"SGD.*lr is 0.1, not 0.05 there|0.lr is 0.1, not 0.05 there"):
        joined(tmp_path / "run", frozen, sgd(frozen, 0.1))
    joined(tmp_path / "run", frozen)
    assert (
        "Note: 0.weight begins with other numbers here than in the run, whose numbers count" in capsys.readouterr().out
    )


def test_a_script_that_has_changed_does_not_go_on_with_the_run(tmp_path):
    train("plain", tmp_path / "run", only=3, script_digest="before")
    with pytest.raises(UserError, match='SCRIPT_DIGEST: the run has "before", now it says "after"'):
        train("plain", tmp_path / "run", only=3, script_digest="after")


# -- loops -------------------------------------------------------------------------------------------------------------


def test_a_loop_that_never_calls_step(tmp_path):
    model = net()
    with pytest.raises(UserError, match=r"run\.step\(\) was never called"), join(tmp_path / "run", model, sgd(model)):
        pass
    with join(tmp_path / "run", model, sgd(model)) as run:
        with pytest.raises(
            UserError, match=r"a whole loader \(4 batches\) was used up and run\.step\(\) was never called"
        ):
            for _ in run.batches(loader):
                pass
        with pytest.raises(UserError, match=r"make_loader\(\d, 1\) gave no batch"):
            next(run.batches(lambda slot, round: []))
        run.step()
    with pytest.raises(UserError, match="nobody's turn"):
        run.step()


def test_a_loop_that_asks_for_the_end_and_takes_no_steps(tmp_path, capsys):
    """It would never end, nor hear that it is to."""
    model = net()
    with (
        pytest.raises(UserError, match=r"run\.over was asked 1,000 times and run\.step\(\) was not called"),
        join(tmp_path / "run", model, sgd(model)) as run,
    ):
        while not run.over:
            pass
    with pytest.raises(SystemExit, match="130"), join(tmp_path / "run", model, sgd(model)) as run:
        while not run.over:
            os.kill(os.getpid(), signal.SIGTERM)
    assert "Stopped; what was done is kept" in capsys.readouterr().out


def in_a_population(folder: Path, report: dict[str, float]) -> Any:
    """Whose second slot says other things than the rest."""
    torch.manual_seed(1)
    optimizer = sgd(model := net())
    keys = {**KEYS, "population_size": 3, "group_size": 1, "selection": "rank"}
    with join_edt(folder, model, optimizer, **keys) as run:
        for batch in run.batches(loader):
            noised(model, batch).backward()
            if report:
                run.report(**report | ({"fitness": float("nan")} if run.slot == 1 else {}))
            run.step()
    return opened(folder)


def test_fitness_alone_decides_where_there_is_no_loss_and_nobody_who_has_none_is_before_who_has(tmp_path):
    """A fitness that is no number is a verdict on that member, as a loss is; its children are others'."""
    history = in_a_population(tmp_path / "run", {"fitness": -5.0})
    assert history.over and history["1/m1"].metrics == {"diverged": True, "diverged_in_a_row": 1}
    assert [each.id for each in EDT(own_config(tmp_path)).pool(2, history)] == ["1/m0", "1/m2", "1/m1"]


def own_config(folder: Path) -> OwnLoopConfig:
    return OwnLoopConfig(project_name="run", base_dir=str(folder), population_size=3)


def test_who_is_fit_is_to_be_said_where_it_decides(tmp_path):
    with pytest.raises(UserError, match=r"nothing says who is fit, which SELECTION rank goes by: hand over evaluate="):
        in_a_population(tmp_path / "run", {})


def test_a_loop_that_ends_early_says_so_and_can_be_gone_on_with(tmp_path, capsys):
    train("norm", tmp_path / "calm")
    train("norm", tmp_path / "run", only=7)
    told = r"The loop ended after step 2 of 5 of round 1, slot [01]: the run is not over\."
    assert re.search(told, capsys.readouterr().out)
    train("norm", tmp_path / "run")
    train("norm", tmp_path / "run")  # which is over: the loop is not entered
    assert the_digest(tmp_path / "run") == the_digest(tmp_path / "calm")


def test_an_error_of_the_loop_is_the_users_and_the_run_goes_on(tmp_path):
    def failing(slot: int, round: int) -> Iterator[Any]:
        for number, batch in enumerate(loader(slot, round)):
            if number == 2:
                raise KeyError("mine")
            yield batch

    train("plain", tmp_path / "calm")
    torch.manual_seed(1)
    optimizer = sgd(model := net())
    with pytest.raises(KeyError, match="mine"), join(tmp_path / "run", model, optimizer, **KEYS) as run:
        steps(run, (model, [optimizer], noised), run.batches(failing))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    train("plain", tmp_path / "run")


class Asks(torch.utils.data.Dataset[Any]):
    """Its items are made in processes that are forked from the one that joined."""

    run: Any = None

    def __len__(self) -> int:
        return 16

    def __getitem__(self, item: int) -> torch.Tensor:
        return torch.rand(12, generator=torch.Generator().manual_seed(item + (self.run.slot if self.run else 0)))


def forked(asks: bool, workers: int = 2) -> Any:
    def make(slot: int, round: int) -> Any:
        data = Asks()
        data.run = run if asks else None
        return torch.utils.data.DataLoader(data, 4, shuffle=True, num_workers=workers)

    run: Any = None

    def over(folder: Path) -> None:
        nonlocal run
        torch.manual_seed(1)
        optimizer = sgd(model := net())
        with join(folder, model, optimizer, **KEYS) as run:
            steps(run, (model, [optimizer], noised), run.batches(make))

    return over


def test_data_loaders_that_fork(tmp_path):
    forked(asks=False)(tmp_path / "two")
    forked(asks=False, workers=0)(tmp_path / "none")
    assert the_digest(tmp_path / "two") == the_digest(tmp_path / "none")
    with pytest.raises(UserError, match="a data loader's worker knows nothing of the run"):
        forked(asks=True)(tmp_path / "asks")


def test_a_process_that_the_loop_forks_leaves_the_run_alone(tmp_path):
    optimizer = sgd(model := net())
    with join(tmp_path / "run", model, optimizer, **KEYS) as run:
        if not (child := os.fork()):
            signal.alarm(int(SOON))
            with contextlib.suppress(UserError):
                run.step()
            run.__exit__(None, None, None)  # the end of its block
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        with pytest.raises(UserError, match="a data loader's worker knows nothing of it"):
            ForkingPickler.dumps(run)  # as for a data loader that spawns
        steps(run, (model, [optimizer], noised), run.batches(loader))
    assert run.over


# -- other doors -------------------------------------------------------------------------------------------------------


def test_a_fork_and_the_launcher_say_what_to_do_instead(tmp_path):
    for algorithm, begin in {"edt-loop": join_edt, "diloco-loop": join}.items():
        model, run = net(), tmp_path / algorithm
        begin(run, model, sgd(model), **KEYS)
        for settings in ((), ("ALGORITHM=edt",)):
            with pytest.raises(UserError, match=f"a run of {algorithm} cannot be forked: .* train.export {run}"):
                go_on(run, name="new", set=settings)
        file = tmp_path / "mine.json"
        file.write_text(json.dumps({"ALGORITHM": algorithm}))
        with pytest.raises(UserError, match="start your script on each machine"):
            place(file, "", METHOD_SCRIPTS)


# -- real processes ----------------------------------------------------------------------------------------------------


LENGTHY = {"inner_steps": 300, "snapshot_minutes": 0.001, "dead_seconds": 2.0}


def half_way(folder: Path) -> bool:
    return any(folder.glob("files/00002.*/snapshot.*.json"))


@pytest.mark.slow
def test_killed_and_interrupted_scripts_that_are_run_again_go_on(tmp_path):
    """One process is killed in the middle of a round, another is asked to end; a third and a fourth go on together."""
    folder = tmp_path / "run"
    one, two = started("norm", folder, **LENGTHY), started("norm", folder, **LENGTHY)
    until(lambda: half_way(folder), "the second round is half done", LONG)
    kill(one.process.pid)
    two.send(signal.SIGTERM)
    two.ends(130)
    assert "Stopped; what was done is kept, and the same command goes on from here." in two.said
    one.end()
    three, four = started("norm", folder, **LENGTHY), started("norm", folder, **LENGTHY)
    three.ends(0)
    four.ends(0)
    train("norm", tmp_path / "alone", script_digest=opened_digest(folder), **LENGTHY)
    assert the_digest(folder) == the_digest(tmp_path / "alone")


def opened_digest(folder: Path) -> str:
    return str(json.loads((folder / "run.json").read_text().splitlines()[0])["config"]["script_digest"])


SCRIPT = """
import sys
import torch
from diloco import join
model = torch.nn.Linear(2, 1)
with join(sys.argv[1], model, torch.optim.SGD(model.parameters(), 0.1), population_size=1, max_generations=1) as run:
    for batch in run.batches(lambda slot, round: torch.ones(4, 2)):
        run.step()
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"transformers", "datasets", "tokenizers", "lm_eval"}))
"""


@pytest.mark.slow
def test_a_data_loader_that_spawns_does_not_join_by_importing_the_script(tmp_path):
    loader = "torch.utils.data.DataLoader(torch.ones(4, 2), num_workers=1, multiprocessing_context='spawn')"
    (tmp_path / "mine.py").write_text(SCRIPT.replace("torch.ones(4, 2)", loader))
    home = {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "mine.py", "run"], cwd=tmp_path, capture_output=True, text=True, env=home)
    assert (done.returncode, done.stdout) == (1, f"New run {tmp_path / 'run'}\n")
    assert "a data loader's process imports this script, which is to join the run only where it is" in done.stderr


def test_a_script_called_train_joins_and_loads_no_library_that_it_has_no_use_for(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "fleet.py").write_text("")
    program = {
        "cwd": tmp_path,
        "capture_output": True,
        "text": True,
        "env": {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
    }
    done = subprocess.run([sys.executable, "train.py", "run"], **program)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [f"New run {tmp_path / 'run'}", ""]
    (tmp_path / "train.py").write_text(SCRIPT.replace("torch.ones(4, 2)", "[]"))
    done = subprocess.run([sys.executable, "train.py", "another"], **program)
    assert (done.returncode, done.stderr) == (1, "make_loader(0, 1) gave no batch\n")
    (tmp_path / "main.py").write_text("import fleet\nfrom diloco import join\n")
    done = subprocess.run([sys.executable, "main.py", "run"], **program)
    assert f"{tmp_path / 'fleet.py'}: `join` needs a package of this name: give your module another one" in done.stderr
