"""Several recipes in one file: merges of merges, that go on where they were stopped."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from merge import merging, stages
from merge.engine import MergeOptions
from merge.merge_recipe import text_of
from merge.stages import has_stages, merge_stages, stages_of
from merge.tensor_files import UserError
from tests.commands import answer
from tests.merging import llama, run, says, weights


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    return [str(llama(folder / f"m{seed}", seed)) for seed in range(4)]


def linear(*models: str, **more) -> dict:
    return {"merge_method": "linear", "parameters": {"weight": 1.0}, "models": list(models), **more}


def file(folder: Path, *recipes: dict) -> Path:
    path = folder / "recipe.yml"
    path.write_text("---\n".join(map(text_of, recipes)))
    return path


def four(models: list[str]) -> list[dict]:
    """Two pairs, and the two together."""
    ties = {"merge_method": "dare_ties", "parameters": {"weight": 0.5, "density": 0.5}}
    return [
        linear(*models[:2], name="left"),
        {**ties, "models": models[2:], "base_model": "left", "name": "right"},
        {"merge_method": "slerp", "base_model": "left", "models": ["right"], "parameters": {"t": 0.4}},
    ]


def test_stages_are_what_their_recipes_give_one_after_the_other(models, tmp_path, monkeypatch):
    merge_stages(file(tmp_path, *four(models)), tmp_path / "out", how=MergeOptions(seed=3))
    found = weights(tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"recipe.yml", "out"}
    (tmp_path / "by-hand").mkdir()
    monkeypatch.chdir(tmp_path / "by-hand")  # random drops depend on what a recipe calls its models
    for said in four(models):
        run(Path(said.pop("name", "last")), said, MergeOptions(seed=3))
    wanted = weights(Path("last"))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted | found)
    assert torch.isfinite(says(tmp_path / "out")).all()
    card = (tmp_path / "out" / "README.md").read_text()
    assert "A merge of 4 models" in card and all(f"- `{model}`" in card for model in models)
    assert (tmp_path / "out" / "mergekit_config.yml").read_text() == (tmp_path / "recipe.yml").read_text()


def test_the_order_in_the_file_does_not_matter_and_all_may_have_names(models, tmp_path):
    left, right, last = four(models)
    assert [each.name for each in stages_of(file(tmp_path, last, right, left).read_text())] == ["left", "right", ""]
    named = [right, left, {**last, "name": "all"}]
    assert [each.name for each in stages_of(file(tmp_path, *named).read_text())] == ["left", "right", "all"]
    assert has_stages(tmp_path / "recipe.yml") and not has_stages(file(tmp_path, left))
    assert not has_stages(tmp_path / "none.yml")


def test_an_adapter_on_a_stage(models, tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr(stages, "merge", lambda recipe, *a, donors, **more: seen.update(donors.places) or 1 / 0)
    (tmp_path / "lora").mkdir()
    with pytest.raises(ZeroDivisionError):
        merge_stages(file(tmp_path, linear(*models[:2], name="a"), linear(f"a+{tmp_path}/lora")), tmp_path / "out")
    assert not seen
    monkeypatch.setattr(stages, "_missing", lambda found, folders: found[-1:])
    with pytest.raises(ZeroDivisionError):
        merge_stages(tmp_path / "recipe.yml", tmp_path / "out")
    ((called, place),) = seen.items()
    assert called == f"a+{tmp_path}/lora" and place.startswith(f"{tmp_path}/.out.stages/a-")
    assert place.endswith(f"+{tmp_path}/lora")


def counted(monkeypatch, fail: str = "") -> list[str]:
    """Which stages are made; one of them is stopped."""
    made = []

    def merge(recipe, out, **more):
        if Path(out).name.startswith(fail or "-"):
            raise KeyboardInterrupt
        made.append(Path(out).name.split("-")[0])
        return merging.merge(recipe, out, **more)

    monkeypatch.setattr(stages, "merge", merge)
    return made


def test_a_merge_that_was_stopped_goes_on_with_its_stage(models, tmp_path, monkeypatch):
    path = file(tmp_path, *four(models))
    merge_stages(path, tmp_path / "whole")
    made = counted(monkeypatch, "right")
    with pytest.raises(KeyboardInterrupt) as stopped:
        merge_stages(path, tmp_path / "out")
    assert made == ["left"] and "go on" in stopped.value.__notes__[0].replace("goes", "go")
    assert [each.name.split("-")[0] for each in (tmp_path / ".out.stages").iterdir()] == ["left"]
    made = counted(monkeypatch)
    merge_stages(path, tmp_path / "out")
    assert made == ["right", "out"] and not (tmp_path / ".out.stages").exists()
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "out"))
    assert one == other


@pytest.mark.parametrize("change", ["recipe", "seed", "model", "nothing"])
def test_a_stage_is_made_again_when_what_it_follows_from_has_changed(change, models, tmp_path, monkeypatch):
    left, right, last = four(models)
    mine = str(llama(tmp_path / "mine", 7))
    left["models"] = [mine, models[0]]
    counted(monkeypatch, "right")
    with pytest.raises(KeyboardInterrupt):
        merge_stages(file(tmp_path, left, right, last), tmp_path / "out")
    if change == "recipe":
        left["parameters"] = {"weight": 2.0}
    if change == "model":
        llama(tmp_path / "mine", 8)
    made = counted(monkeypatch)
    merge_stages(file(tmp_path, left, right, last), tmp_path / "out", how=MergeOptions(seed=int(change == "seed")))
    assert made == (["right", "out"] if change == "nothing" else ["left", "right", "out"])


BAD = {
    "two of the recipes are called a": [linear("x", name="a"), linear("y", name="a"), linear("a")],
    "two of the recipes have no name": [linear("x"), linear("y")],
    "go round in a circle: b <- a <- b": [linear("b", name="a"), linear("a", name="b"), linear("b")],
    "the stage a goes into nothing; the result is b": [linear("x", name="a"), linear("y", name="b")],
    "letters, digits": [linear("x", name="../a"), linear("../a")],
    "recipe 2: `key: value` lines": [linear("x", name="a"), ["a"]],
    "unknown key 'nam'": [linear("x", nam="a"), linear("a", name="b")],
    "no parameter 'wight'": [linear("x", name="a"), linear("a", parameters={"wight": 1.0})],
}


@pytest.mark.parametrize("why", BAD)
def test_stages_that_cannot_be(why):
    with pytest.raises(UserError, match=why.replace("(", r"\(")):
        stages_of(yaml.safe_dump_all(BAD[why]))


def test_no_stage_is_looked_at_twice_however_many_ways_lead_to_it():
    pairs = [linear(f"s{n - 1}", f"s{n - 2}", name=f"s{n}") for n in range(2, 100)]
    found = stages_of("---\n".join(map(text_of, [linear("a", name="s0"), linear("b", name="s1"), *pairs])))
    assert [stage.name for stage in found[-2:]] == ["s98", "s99"] and len(found) == 100


def test_what_a_stage_is_made_of_is_not_replaced(models, tmp_path):
    own = llama(tmp_path / "own", 5)
    recipe = file(tmp_path, linear(str(own), models[0], name="first"), linear("first", models[1]))
    before = weights(own)
    with pytest.raises(UserError, match="own is not replaced: .*own is in it"):
        merge_stages(recipe, own, overwrite=True)
    assert all(torch.equal(each, before[name]) for name, each in weights(own).items())
    assert not [*tmp_path.glob(".*")]


def test_models_are_looked_for_before_anything_is_made(models, tmp_path, monkeypatch):
    made = counted(monkeypatch)
    with pytest.raises(UserError, match="not a folder with a model"):
        merge_stages(file(tmp_path, linear(*models[:2], name="a"), linear("a", "./nowhere")), tmp_path / "out")
    assert not made and not (tmp_path / ".out.stages").exists()


SLOWLY = r"""
import os, sys, time
from merge import engine
from merge.__main__ import command

write = engine._pwrite

def slowly(fd, data, begin):
    os.write(1, b"writing\n")
    time.sleep(0.2)
    return write(fd, data, begin)

if len(sys.argv) > 3:
    engine._pwrite = slowly
    sys.argv.pop()
command()
"""


def test_the_command_is_stopped_and_goes_on(models, tmp_path):
    path, out = file(tmp_path, *four(models)), tmp_path / "out"
    words = [sys.executable, "-c", SLOWLY, str(path), str(out)]
    here = subprocess.Popen([*words, "slowly"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not any((tmp_path / ".out.stages").glob("left-*")):
        assert here.stdout.readline() == "writing\n"
    here.send_signal(signal.SIGINT)
    _, said = here.communicate()
    assert here.returncode == 130 and f"Interrupted; stages that are finished lie in {tmp_path}/.out.stages" in said
    code, said, errors = answer("-m", "merge", str(path), str(out))
    assert code == 0, errors
    assert json.loads((out / "config.json").read_text()) and "out: " in said
    assert not [*tmp_path.glob(".out*")]
