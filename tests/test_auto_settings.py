"""PRECISION and COMPILE auto: found out by whoever begins a run, kept in its folder, and in force for all others."""

import pytest

from fleet.host import Host
from fleet.run import create_run, open_run
from tests.posttraining import config as breeding
from tests.small import config
from train.auto_settings import generations, resolve_auto
from train.training_commands import prepare


@pytest.fixture
def cards(tmp_path, monkeypatch):
    """A machine with GPUs of these generations, as its driver's tool tells them."""

    def there(*capabilities: str) -> None:
        tool = tmp_path / "bin" / "nvidia-smi"
        tool.parent.mkdir(exist_ok=True)
        lines = "".join(f"echo {each}\n" for each in capabilities)
        tool.write_text(f'#!/bin/sh\n[ "$*" = "--query-gpu=compute_cap --format=csv,noheader" ] || exit 1\n{lines}')
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
    for each in (config(base_dir=str(tmp_path)), breeding(tmp_path, 1)):
        assert each.precision == "auto" and resolve_auto(each, tmp_path).precision == precision
    assert (f'PRECISION "{precision}"' in capsys.readouterr().out) == bool(capabilities)


def test_hidden_cards_and_a_machine_without_the_tool_do_not_count(cards, tmp_path, monkeypatch):
    cards("9.0")
    assert generations() == [9]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not generations()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not generations()


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
