"""Recipes in, models out: what stands in the files, and that it is the same whoever made it."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from merge.engine import MergeOptions
from merge.merge_recipe import parse, setting_of
from merge.merging import merge
from merge.parameters import value_at
from merge.tensor_files import UserError
from tests import formulas
from tests.commands import answer
from tests.merging import llama, run, says, weights

CURVES = [
    {"filter": "self_attn", "value": [0, 0.5, 0.3, 0.7, 1]},
    {"filter": "mlp", "value": [1, 0.5, 0.7, 0.3, 0]},
    {"value": 0.5},
]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    return [str(llama(folder / f"m{seed}", seed)) for seed in range(4)]


@pytest.fixture(scope="module")
def halves(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("halves")
    return [str(llama(folder / f"m{seed}", seed, torch.bfloat16)) for seed in range(3)]


def ties(models: list[str], **more) -> dict:
    inputs = [{"model": m, "parameters": {"weight": 0.5, "density": 0.6}} for m in models[1:]]
    return {"merge_method": "ties", "base_model": models[0], "models": inputs, **more}


# -- what comes out ----------------------------------------------------------------------------------------------------


def test_a_model_that_transformers_loads(models, tmp_path):
    shares = [0.5, 0.2, 0.3]
    inputs = [{"model": m, "parameters": {"weight": w}} for m, w in zip(models, shares, strict=False)]
    found = run(tmp_path / "out", {"merge_method": "linear", "models": inputs})
    before = [weights(Path(m)) for m in models]
    assert found.keys() == before[0].keys()
    for name, tensor in found.items():
        wanted = formulas.linear([each[name].double() for each in before[:3]], shares)
        assert torch.allclose(tensor.double(), wanted, atol=1e-6), name
    assert torch.isfinite(says(tmp_path / "out")).all()
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"model.safetensors", "config.json", "generation_config.json", "README.md", "mergekit_config.yml"}
    assert yaml.safe_load((tmp_path / "out" / "mergekit_config.yml").read_text())["models"] == inputs
    card = (tmp_path / "out" / "README.md").read_text()
    assert "linear" in card and models[2] in card and card.startswith("---\nlibrary_name: transformers")


def test_the_same_bytes_with_any_number_of_threads(halves, tmp_path):
    first = None
    for n, how in enumerate(
        [MergeOptions(1), MergeOptions(2), MergeOptions(4), MergeOptions(3), MergeOptions(1, seed=0)]
    ):
        for method in ("ties", "dare_ties"):
            run(tmp_path / f"{n}-{method}", ties(halves, merge_method=method, dtype="bfloat16"), how)
        both = [(tmp_path / f"{n}-{method}" / "model.safetensors").read_bytes() for method in ("ties", "dare_ties")]
        first = first or both
        assert both == first, how
    other = run(tmp_path / "seed", ties(halves, merge_method="dare_ties", dtype="bfloat16"), MergeOptions(seed=1))
    assert not torch.equal(other["lm_head.weight"], weights(tmp_path / "0-dare_ties")["lm_head.weight"])


def test_shards_hold_what_one_file_holds(models, tmp_path):
    one = run(tmp_path / "one", ties(models))
    many = run(tmp_path / "many", ties(models), shard_size=20_000)
    assert one.keys() == many.keys() and all(torch.equal(one[name], many[name]) for name in one)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    sizes = [path.stat().st_size for path in (tmp_path / "many").glob("*.safetensors")]
    assert len(sizes) > 5 and set(index["weight_map"]) == set(one)
    assert index["metadata"]["total_size"] == sum(each.numel() * 4 for each in one.values())
    assert torch.equal(says(tmp_path / "one"), says(tmp_path / "many"))


def test_inputs_in_shards_and_as_bin_files(models, tmp_path):
    sharded = llama(tmp_path / "sharded", 1, shard="30KB")
    assert len([*sharded.glob("*.safetensors")]) > 2
    binary = tmp_path / "binary"
    binary.mkdir()
    (binary / "config.json").write_text((Path(models[2]) / "config.json").read_text())
    torch.save(weights(Path(models[2])), binary / "pytorch_model.bin")
    plain = run(tmp_path / "plain", ties(models[:3]))
    mixed = run(tmp_path / "mixed", ties([models[0], str(sharded), str(binary)]))
    assert all(torch.equal(plain[name], mixed[name]) for name in plain)


def test_a_bin_file_that_would_run_something_is_refused(models, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/ran",)

    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "config.json").write_text((Path(models[0]) / "config.json").read_text())
    torch.save({"x": Evil()}, bad / "pytorch_model.bin")
    with pytest.raises(UserError, match="tensors alone"):
        run(tmp_path / "out", ties([models[0], str(bad)]))
    assert not (tmp_path / "ran").exists()


# -- parameters --------------------------------------------------------------------------------------------------------


def test_curves_over_layers_and_filters(models, tmp_path):
    recipe = {"merge_method": "slerp", "base_model": models[0], "models": [{"model": m} for m in models[:2]]}
    found = run(tmp_path / "out", {**recipe, "parameters": {"t": CURVES}})
    a, b = (weights(Path(m)) for m in models[:2])
    attention = [0.0, 0.5 - 0.2 / 3, 0.3 + 0.4 * 2 / 3, 1.0]
    mlp = [1.0, 0.5 + 0.2 / 3, 0.7 - 0.4 * 2 / 3, 0.0]
    for name, tensor in found.items():
        layer = int(name.split(".")[2]) if ".layers." in name else 0
        t = attention[layer] if "self_attn" in name else mlp[layer] if "mlp" in name else 0.5
        wanted = formulas.slerp([b[name].double()], a[name].double(), t)
        assert torch.allclose(tensor.double(), wanted, atol=1e-6), (name, t)


def test_a_step_is_the_same_as_slices_that_end_there(models, tmp_path):
    inputs = [{"model": m, "parameters": {"weight": {"split": 0.5, "value": v}}} for m, v in zip(
        models[:2], ([0.25, 1.0], [0.5, 0.0]), strict=True)]  # fmt: skip
    stepped = run(tmp_path / "stepped", {"merge_method": "linear", "models": inputs})

    def part(begin: int, end: int, first: float, second: float) -> dict:
        weights = zip(models[:2], (first, second), strict=True)
        here = [{"model": m, "layer_range": [begin, end], "parameters": {"weight": w}} for m, w in weights]
        return {"sources": here}

    sliced = run(
        tmp_path / "sliced", {"merge_method": "linear", "slices": [part(0, 2, 0.25, 0.5), part(2, 4, 1.0, 0.0)]}
    )
    layers = [name for name in stepped if ".layers." in name]
    assert len({name.split(".")[2] for name in layers}) == 4
    assert all(torch.equal(stepped[name], sliced[name]) for name in layers)
    assert torch.equal(stepped["model.layers.3.mlp.up_proj.weight"], weights_of(models[0], "3.mlp.up_proj"))


def weights_of(model: str, part: str) -> torch.Tensor:
    return weights(Path(model))[f"model.layers.{part}.weight"]


@pytest.mark.parametrize("setting, name, t, value", [
    (0.3, "x", 0.9, 0.3),
    ([0, 1], "x", 0.25, 0.25),
    ([0, 1, 5], "x", 0.75, 3.0),
    (["0", "1e-1"], "x", 0.5, 0.05),
    ([True, False], "x", 0.9, True),
    ([True, False], "x", 1.0, False),
    ({"filter": "mlp", "value": 2}, "a.mlp.b", 0, 2),
    ({"filter": "mlp", "value": 2}, "a.attn.b", 0, None),
    ([{"filter": "mlp", "value": 2}, {"filter": "*", "value": 3}], "a.attn.b", 0, 3),
    ([{"filter": "a", "value": [2, 4]}, {"filter": "mlp", "value": 3}], "a.mlp.b", 0.5, 3.0),
    ({"split": 0.5, "value": [0.2, 0.7]}, "x", 0.49, 0.2),
    ({"split": 0.5, "value": [0.2, 0.7]}, "x", 0.5, 0.7),
    ({"split": ["6e-1", 0.2], "value": [1, 2, 3]}, "x", 0.59, 2.0),
    ({"split": [0, 1], "value": [1, 2, 3]}, "x", 0.0, 2.0),
    ({"split": 0.5, "value": [True, False]}, "x", 0.9, False),
    ([{"filter": "mlp", "split": 0.3, "value": [2, 4]}, {"value": [0, 1]}], "a.mlp.b", 0.5, 4.0),
    ([{"filter": "mlp", "split": 0.3, "value": [2, 4]}, {"value": [0, 1]}], "a.attn.b", 0.5, 0.5),
])  # fmt: skip
def test_settings(setting, name, t, value):
    assert value_at(setting_of(setting, "x"), name, t) == value


def test_a_source_wins_over_its_slice_and_that_over_the_recipe(models, tmp_path):
    def recipe(own, of_slice, of_all):
        sources = [{"model": m, "layer_range": [0, 4], "parameters": {"weight": 1.0, **own}} for m in models[1:2]]
        base = {"model": models[0], "layer_range": [0, 4]}
        slices = [{"sources": [base, *sources], "parameters": of_slice}]
        head = {"merge_method": "ties", "base_model": models[0], "slices": slices}
        return {**head, "parameters": of_all}

    plain = {d: run(tmp_path / f"d{d}", recipe({"density": d}, {}, {})) for d in (0.2, 0.5, 0.8)}
    cases = {0.5: ({"density": 0.5}, {"density": 0.2}, {"density": 0.8}), 0.2: ({}, {"density": 0.2}, {"density": 0.8})}
    for n, (wanted, (own, of_slice, of_all)) in enumerate([*cases.items(), (0.8, ({}, {}, {"density": 0.8}))]):
        found = run(tmp_path / str(n), recipe(own, of_slice, of_all))
        assert all(torch.equal(found[name], plain[wanted][name]) for name in found)


def test_every_parameter_of_every_method_changes_the_result(models, tmp_path):
    from merge.methods import METHODS

    def made(method: str, name: str, **params):
        spec = METHODS[method]
        usual = {"weight": 0.5, "density": 0.5, "t": 0.02}
        given = {key: value for key, value in usual.items() if key in spec.params} | params
        each = {key: value for key, value in given.items() if spec.params[key].each}
        head = {"merge_method": method, **({"base_model": models[0]} if spec.base != "none" else {})}
        inputs = [{"model": m, "parameters": {key: usual[key] for key in each if key in usual}} for m in models[1:]]
        inputs[0]["parameters"].update(each)
        shared = {key: value for key, value in given.items() if key not in each}
        return run(tmp_path / f"{method}-{name}", {**head, "models": inputs[: spec.most], "parameters": shared})

    turned = {
        **{"weight": -0.7, "density": 0.3, "gamma": 0.3, "epsilon": 0.4, "lambda": 0.5, "t": 0.05, "select_topk": 0.3},
        **{"scale": 0.5, "residual": 0.5, "max_iter": 0, "tol": 1.0, "eps": 10.0, "r": 0.5, "alpha": 2.0},
    }
    needs = {"nuslerp_row_wise": {"nuslerp_flatten": False}, "r": {"epsilon": 0.05}, "alpha": {"epsilon": 0.05}}
    for method, spec in METHODS.items():
        unturned = made(method, "unturned")
        for key, param in spec.params.items():
            value = (not param.default) if param.kind is bool else turned[key]
            if method == "karcher" and key == "weight":
                value = 0.2
            if (method, key) == ("multislerp", "eps"):
                continue  # at which length directions cancel out: tests/test_merge_methods.py
            around = needs.get(key, {})
            plain = made(method, f"beside-{key}", **around) if around else unturned
            other = made(method, key, **around, **{key: value})
            assert any(not torch.equal(plain[name], other[name]) for name in plain), (method, key)


# -- stacks of layers --------------------------------------------------------------------------------------------------


def test_layers_of_two_models_stacked(models, tmp_path):
    a, b = models[:2]
    scale = [{"filter": "o_proj", "value": 0.5}, {"value": 1.0}]
    slices = [
        {"sources": [{"model": a, "layer_range": [0, 3]}]},
        {"sources": [{"model": b, "layer_range": [1, 4], "parameters": {"scale": scale}}]},
    ]
    found = run(tmp_path / "out", {"merge_method": "passthrough", "slices": slices})
    first, second = weights(Path(a)), weights(Path(b))
    for n, (source, layer) in enumerate([(first, 0), (first, 1), (first, 2), (second, 1), (second, 2), (second, 3)]):
        for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj", "input_layernorm"):
            factor = 0.5 if part == "self_attn.o_proj" and source is second else 1.0
            wanted = factor * source[f"model.layers.{layer}.{part}.weight"]
            assert torch.equal(found[f"model.layers.{n}.{part}.weight"], wanted)
    assert torch.equal(found["model.embed_tokens.weight"], first["model.embed_tokens.weight"])
    assert torch.equal(found["lm_head.weight"], second["lm_head.weight"])
    assert AutoConfig.from_pretrained(tmp_path / "out").num_hidden_layers == 6
    assert torch.isfinite(says(tmp_path / "out")).all()


def test_what_a_configuration_says_of_each_layer_is_stacked_too(models, tmp_path):
    for model in models[:2]:
        copy = tmp_path / Path(model).name
        copy.mkdir()
        config = json.loads((Path(model) / "config.json").read_text())
        kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
        (copy / "config.json").write_text(json.dumps({**config, "layer_types": kinds}))
        (copy / "model.safetensors").symlink_to(Path(model) / "model.safetensors")
    slices = [
        {"sources": [{"model": str(tmp_path / name), "layer_range": each}]}
        for name, each in (("m0", [0, 2]), ("m1", [1, 4]))
    ]
    run(tmp_path / "out", {"merge_method": "passthrough", "slices": slices})
    kinds = json.loads((tmp_path / "out" / "config.json").read_text())["layer_types"]
    assert [kind[0] for kind in kinds] == ["f", "s", "s", "f", "s"]


def test_layers_merged_within_slices(models, tmp_path):
    def part(first, last, t):
        sources = [{"model": m, "layer_range": [first, last]} for m in models[:2]]
        return {"sources": sources, "parameters": {"t": t}}

    recipe = {"merge_method": "slerp", "base_model": models[0], "slices": [part(0, 2, [0, 1]), part(2, 4, 0.5)]}
    found = run(tmp_path / "out", recipe)
    a, b = (weights(Path(m)) for m in models[:2])
    for layer, t in enumerate([0.0, 1.0, 0.5, 0.5]):
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        assert torch.allclose(found[name].double(), formulas.slerp([b[name].double()], a[name].double(), t), atol=1e-6)
    assert torch.equal(found["model.embed_tokens.weight"], a["model.embed_tokens.weight"])  # t of the first layer


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_dtype_is_for_inputs_and_out_dtype_for_the_result(models, halves, tmp_path):
    inputs = [{"model": m, "parameters": {"weight": 1 / 3}} for m in models[:3]]
    recipe = {"merge_method": "linear", "models": inputs}
    before = [weights(Path(m)) for m in models[:3]]
    name = "model.layers.1.mlp.up_proj.weight"

    def mean(tensors):
        return (sum(tensor * torch.tensor(1 / 3) for tensor in tensors)) / 1.0

    exact = run(tmp_path / "1", recipe)[name]
    assert exact.dtype == torch.float32
    rounded = run(tmp_path / "2", {**recipe, "out_dtype": "bfloat16"})[name]
    assert torch.equal(rounded, exact.bfloat16())
    cast = run(tmp_path / "3", {**recipe, "dtype": "bfloat16", "out_dtype": "float32"})[name]
    wanted = mean([each[name].bfloat16().float() for each in before])
    assert cast.dtype == torch.float32 and torch.allclose(cast, wanted, atol=1e-7) and not torch.equal(cast, exact)
    both = run(tmp_path / "4", {**recipe, "dtype": "float16"})[name]
    assert both.dtype == torch.float16
    assert json.loads((tmp_path / "4" / "config.json").read_text())["dtype"] == "float16"
    mixed = [{"model": m, "parameters": {"weight": 0.5}} for m in (models[0], halves[1])]
    assert run(tmp_path / "5", {"merge_method": "linear", "models": mixed})[name].dtype == torch.float32


def test_tied_embeddings_stay_tied_and_untied_heads_are_merged(tmp_path):
    tied = [str(llama(tmp_path / f"t{n}", n, tie_word_embeddings=True)) for n in (1, 2)]
    free = str(llama(tmp_path / "free", 3))

    def linear(*models):
        return {"merge_method": "linear", "models": [{"model": m, "parameters": {"weight": 0.5}} for m in models]}

    both = run(tmp_path / "both", linear(*tied))
    assert "lm_head.weight" not in both
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "both")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    mixed = run(tmp_path / "mixed", linear(tied[0], free))
    a, b = weights(Path(tied[0])), weights(Path(free))
    assert torch.allclose(
        mixed["lm_head.weight"], (a["model.embed_tokens.weight"] + b["lm_head.weight"]) / 2, atol=1e-7
    )
    assert json.loads((tmp_path / "mixed" / "config.json").read_text())["tie_word_embeddings"] is False
    assert torch.isfinite(says(tmp_path / "mixed")).all()


# -- whole or not at all -----------------------------------------------------------------------------------------------


def test_an_existing_folder_is_refused_or_replaced(models, tmp_path):
    out = tmp_path / "out"
    run(out, ties(models))
    (out / "mine.txt").write_text("precious")
    with pytest.raises(UserError, match="--overwrite"):
        run(out, ties(models))
    assert (out / "mine.txt").exists()
    run(out, ties(models[:3]), overwrite=True)
    assert not (out / "mine.txt").exists() and sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_a_failure_leaves_nothing(models, tmp_path, monkeypatch):
    from merge import engine

    def broken(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(engine, "_pwrite", broken)
    with pytest.raises(OSError, match="No space"):
        run(tmp_path / "out", ties(models))
    assert [*tmp_path.iterdir()] == []


def test_too_small_a_disk_is_known_beforehand(models, tmp_path, monkeypatch):
    import shutil
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 100_000))
    with pytest.raises(UserError, match="free space; the result needs"):
        run(tmp_path / "out", ties(models))
    assert [*tmp_path.iterdir()] == []


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "merge", *arguments]


SLOW = """
import time
from merge import engine
whole = engine._pwrite
def slowly(*given):
    print("writing", flush=True)
    time.sleep(0.2)
    return whole(*given)
engine._pwrite = slowly
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_merge_leaves_nothing_that_looks_finished(how, tmp_path):
    models = [str(llama(tmp_path / f"m{n}", n)) for n in range(2)]
    recipe, out = tmp_path / "recipe.yml", tmp_path / "out"
    recipe.write_text(yaml.safe_dump(ties(models)))
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parent.parent)])
    started = subprocess.Popen(
        command(str(recipe), str(out)),
        **{
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "env": {**os.environ, "PYTHONPATH": path},
        },
    )
    assert "writing" in started.stdout.readline()
    started.send_signal(how)
    _, error = started.communicate(timeout=60)
    left = [path for path in tmp_path.iterdir() if path.name.startswith(".out")]
    assert not out.exists() and not any((path / "config.json").exists() for path in left)
    if how != signal.SIGKILL:
        assert started.returncode == 128 + how and error.strip() == "Interrupted; nothing is left behind." and not left
    code, _, errors = answer("-m", "merge", str(recipe), str(out))
    assert code == 0, errors
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".out")]


def test_only_the_folder_of_a_model_is_replaced(models, tmp_path, monkeypatch):
    out, recipe = tmp_path / "out", tmp_path / "out" / "r.yml"
    out.mkdir()
    run(out, ties(models), overwrite=True)  # an empty one
    run(out, ties(models), overwrite=True)  # a model's
    recipe.write_text(yaml.safe_dump(ties(models)))
    with pytest.raises(UserError, match="r.yml is in it"):
        merge(recipe, out, overwrite=True)
    link = tmp_path / "link"
    link.symlink_to(out)
    run(link, ties(models), overwrite=True)
    assert link.is_symlink() and (out / "config.json").is_file()
    with pytest.raises(UserError, match="is not replaced: .* is in it"):
        run(Path(models[1]), ties(models), overwrite=True)
    monkeypatch.chdir(out)
    with pytest.raises(UserError, match="is not replaced"):
        run(out, ties(models), overwrite=True)
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "to_my_mother.txt").write_text("dear")
    for place in (tmp_path / "letters", tmp_path / "letters" / "to_my_mother.txt"):
        with pytest.raises(UserError, match="is not the folder of a model"):
            run(place, ties(models), overwrite=True)


def test_folders_made_for_a_merge_that_failed_are_removed(models, tmp_path, monkeypatch):
    from merge import engine

    monkeypatch.setattr(engine, "write", lambda *more: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "a" / "b" / "out", ties(models))
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("dtype, value", [("float16", 1e5), ("float32", float("nan")), ("bfloat16", float("inf"))])
def test_numbers_that_are_none_are_named(dtype, value, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    model = llama(tmp_path / "bad", 1)
    tensors = weights(model)
    tensors[name][3, 4] = value
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    recipe = {"merge_method": "linear", "parameters": {"weight": 1}, "models": [str(model)] * 2, "out_dtype": dtype}
    stats = merge(parse(yaml.safe_dump(recipe)), tmp_path / "out")
    assert stats.notes == (f"{name} has numbers that are not finite, or too large for its dtype",)


def test_a_disk_that_fails_while_it_is_flushed(models, tmp_path, monkeypatch):
    """The system tells each error once: it must not get lost with the thread that hears it."""
    from merge import engine

    monkeypatch.setattr(engine, "_FLUSH", 1)
    before = run(tmp_path / "good", ties(models))
    calls = []

    def broken(fd):
        calls.append(fd)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", broken)
    with pytest.raises(OSError, match="Input/output"):
        run(tmp_path / "out", ties(models))
    assert calls and before and [path.name for path in tmp_path.iterdir()] == ["good"]


def test_two_merges_into_one_folder(models, tmp_path):
    from merge.atomic_output import atomic_folder

    with atomic_folder(tmp_path / "out", 1, False) as draft:
        assert draft.is_dir()
        with pytest.raises(UserError, match="another merge"), atomic_folder(tmp_path / "out", 1, False):
            pass
        assert draft.is_dir()


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command(models, tmp_path):
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(yaml.safe_dump(ties(models, parameters={"int8_mask": True})))
    done = subprocess.run(command(str(recipe), str(tmp_path / "out")), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = r" [\d.]+ kB made of [\d.]+ kB in [\d.]+ s, [\d.]+ [kM]B/s read and written, peak memory"
    assert re.search(told, done.stdout)
    assert "int8_mask" in done.stdout
    line = f"lm_eval --model hf --model_args pretrained={tmp_path}/out "
    assert line in done.stdout and line in (tmp_path / "out" / "README.md").read_text()
    code, _, again = answer("-m", "merge", str(recipe), str(tmp_path / "out"))
    assert code == 2 and "--overwrite" in again
    _, text, _ = answer("-m", "merge", "--help")
    assert "merge_method: slerp" in text and "--shard-size" in text
    recipe.write_text("merge_method: ties\nmodels: [{model: nowhere/at-all}]\n")
    missing = subprocess.run(
        command(str(recipe), str(tmp_path / "other")),
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert missing.returncode == 2 and "Traceback" not in missing.stderr and len(missing.stderr.splitlines()) == 1


def test_a_merge_imports_only_what_it_needs(models, tmp_path):
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(yaml.safe_dump(ties(models)))
    code = (
        "import sys, merge\n"
        "merge.merge(sys.argv[1], sys.argv[2])\n"
        "print([name for name in ('transformers', 'pydantic', 'huggingface_hub', 'peft') if name in sys.modules])"
    )
    arguments = [sys.executable, "-c", code, str(recipe), str(tmp_path / "out")]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_record_instead_of_a_file(models, tmp_path):
    stats = merge(parse(yaml.safe_dump(ties(models))), tmp_path / "out")
    assert stats.written == sum(each.numel() * 4 for each in weights(tmp_path / "out").values())
    assert stats.read == 4 * stats.written and stats.notes == ()
