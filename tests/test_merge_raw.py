"""`--raw`: any safetensors whose tensors have the same names, files or whole pipelines."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from merge.merge_recipe import parse, text_of
from merge.raw_models import merge_raw
from merge.tensor_files import UserError
from tests import formulas
from tests.commands import answer


def linear(*models: Path, **more) -> dict:
    inputs = [{"model": str(model), "parameters": {"weight": n + 1.0}} for n, model in enumerate(models)]
    return {"merge_method": "linear", "models": inputs, **more}


def merged(out: Path, recipe: dict, **more):
    return merge_raw(parse(text_of(recipe)), out, **more)


def tensors(seed: int, dtype=torch.float32) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    shapes = {
        "conv_in.weight": (4, 3, 3, 3),
        "time.bias": (8,),
        "blocks.0.q.weight": (6, 6),
        "blocks.1.q.weight": (6, 6),
    }
    made = {name: torch.randn(shape, generator=rng).to(dtype) for name, shape in shapes.items()}
    return {**made, "steps": torch.tensor(1000 + seed), "scale": torch.tensor(0.5 * seed, dtype=dtype)}


def checkpoint(path: Path, seed: int, dtype=torch.float32) -> Path:
    save_file(tensors(seed, dtype), path, {"modelspec.title": f"number {seed}", "format": "pt"})
    return path


def pipeline(folder: Path, seed: int, shards: int = 1) -> Path:
    """As diffusion's lie on the hub: a folder for each part, whose tensors may be called as another part's."""
    for n, part in enumerate(("unet", "vae")):
        (folder / part).mkdir(parents=True)
        (folder / part / "config.json").write_text(json.dumps({"part": part, "seed": seed}))
        save_file(tensors(10 * n + seed), folder / part / "diffusion_pytorch_model.safetensors")
    text = folder / "text_encoder"
    text.mkdir()
    weights, map = tensors(20 + seed), {}
    for n in range(shards):
        name = f"model-{n + 1:05}-of-{shards:05}.safetensors" if shards > 1 else "model.safetensors"
        some = {key: each for k, (key, each) in enumerate(weights.items()) if k % shards == n}
        save_file(some, text / name)
        map |= dict.fromkeys(some, name)
    index = {"metadata": {"total_size": 1}, "weight_map": map}
    (text / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model_index.json").write_text("{}")
    (folder / "README.md").write_text("of that one")
    (folder / "old.ckpt").write_bytes(b"\0")
    return folder


def test_two_files_become_one(tmp_path):
    one, two = (checkpoint(tmp_path / f"{n}.safetensors", n) for n in (1, 2))
    stats = merged(tmp_path / "out.safetensors", linear(one, two))
    found, first, second = (load_file(path) for path in (tmp_path / "out.safetensors", one, two))
    assert found.keys() == first.keys() and int(found["steps"]) == 1001 and found["scale"].shape == ()
    for name in found.keys() - {"steps"}:
        wanted = formulas.linear([first[name].double(), second[name].double()], [1.0, 2.0])
        assert torch.allclose(found[name].double(), wanted, atol=1e-6), name
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert file.metadata() == {"modelspec.title": "number 1", "format": "pt"}
    assert not stats.notes and stats.written == (tmp_path / "out.safetensors").stat().st_size - _header(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"1.safetensors", "2.safetensors", "out.safetensors"}


def _header(folder: Path) -> int:
    return 8 + int.from_bytes((folder / "out.safetensors").read_bytes()[:8], "little")


def test_methods_with_bases_filters_and_curves(tmp_path):
    base, one, two = (checkpoint(tmp_path / f"{n}.safetensors", n, torch.bfloat16) for n in range(3))
    told = {"weight": [{"filter": "conv_in", "value": 0.0}, {"value": [0.2, 0.6]}], "density": 0.5}
    merged(
        tmp_path / "out.safetensors",
        {"merge_method": "ties", "base_model": str(base), "models": [str(one), str(two)], "parameters": told,
         "dtype": "float32", "out_dtype": "float32"},
    )  # fmt: skip
    found, *before = (load_file(path) for path in (tmp_path / "out.safetensors", base, one, two))
    wide = {name: [each[name].double() for each in before] for name in found}
    assert torch.equal(found["conv_in.weight"], before[0]["conv_in.weight"].float())
    for name, weight in (("blocks.0.q.weight", 0.2), ("blocks.1.q.weight", 0.6)):
        b, *xs = wide[name]
        assert torch.allclose(found[name].double(), formulas.ties(xs, b, [weight] * 2, [0.5] * 2), atol=1e-6)


@pytest.mark.parametrize("shards", [(1, 1), (1, 3), (3, 1)])
def test_pipelines_part_by_part_whatever_their_shards(shards, tmp_path):
    one, two = (pipeline(tmp_path / f"p{n}", n, shards[n]) for n in (0, 1))
    stats = merged(tmp_path / "out", linear(one, two, dtype="bfloat16"))
    assert stats.notes == ("left out: old.ckpt",)
    out = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    there = {str(path.relative_to(one)) for path in one.rglob("*") if path.is_file()}
    assert out == there - {"README.md", "old.ckpt"} | {"mergekit_config.yml"}
    for part, begin in (("unet", 0), ("vae", 10), ("text_encoder", 20)):
        found = {
            key: each
            for file in (tmp_path / "out" / part).glob("*.safetensors")
            for key, each in load_file(file).items()
        }
        first, second = tensors(begin), tensors(begin + 1)
        assert found.keys() == first.keys()
        for name in found.keys() - {"steps"}:
            narrow = [each[name].bfloat16().double() for each in (first, second)]  # as `dtype` has it
            wanted = formulas.linear(narrow, [1.0, 2.0])
            assert torch.allclose(found[name].double(), wanted, rtol=2**-8, atol=1e-6), (part, name)
    index = json.loads((tmp_path / "out/text_encoder/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in found.values())
    assert json.loads((tmp_path / "out/vae/config.json").read_text()) == {"part": "vae", "seed": 0}
    merged(tmp_path / "out", linear(two), overwrite=True)


def test_a_folder_of_one_model_beside_a_file(tmp_path):
    one = checkpoint(tmp_path / "1.safetensors", 1)
    (tmp_path / "two").mkdir()
    checkpoint(tmp_path / "two" / "of another name.safetensors", 2)
    merged(tmp_path / "a.safetensors", linear(one, tmp_path / "two"))
    merged(tmp_path / "b", {**linear(one, tmp_path / "two"), "base_model": str(tmp_path / "two")})
    a, b = load_file(tmp_path / "a.safetensors"), load_file(tmp_path / "b" / "of another name.safetensors")
    assert all(torch.equal(a[name], b[name]) for name in a.keys() - {"steps"})


def test_what_cannot_be_merged(tmp_path):
    one, two = (checkpoint(tmp_path / f"{n}.safetensors", n) for n in (1, 2))
    out = tmp_path / "out.safetensors"
    save_file({"conv_in.weight": torch.ones(2)}, tmp_path / "small.safetensors")
    cases = {
        "conv_in.weight has different shapes": linear(tmp_path / "small.safetensors", tmp_path / "odd.safetensors"),
        "is missing in .*small": linear(tmp_path / "small.safetensors", one),
        "is missing in .*small.safetensors; .*1.safetensors has it": linear(one, tmp_path / "small.safetensors"),
        "there is no such file or folder": linear(one, tmp_path / "none"),
        "no .safetensors file": linear(tmp_path / "empty"),
        "`tokenizer` says something of language models": {**linear(one, two), "tokenizer_source": "base"},
        "cut off": linear(one, tmp_path / "cut.safetensors"),
    }
    save_file({"conv_in.weight": torch.ones(3)}, tmp_path / "odd.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(one.read_bytes()[:-3])
    (tmp_path / "empty").mkdir()
    for why, recipe in cases.items():
        with pytest.raises(UserError, match=why):
            merged(out, recipe)
    for place, why in (
        (tmp_path / "out", "name the result like one"),
        (one, "exists; --overwrite"),
    ):
        with pytest.raises(UserError, match=why):
            merged(place, linear(two, two))
    with pytest.raises(UserError, match="it is one of the models"):
        merged(one, linear(one, two), overwrite=True)
    assert not [*tmp_path.glob("out*")] and not [*tmp_path.glob(".*")]


@pytest.mark.parametrize("said", ['{"weight_map": 3}', '{"metadata": [1]}', "[]", "nonsense"])
def test_an_index_that_is_none_is_named_where_it_lies(said, tmp_path):
    (tmp_path / "two").mkdir()
    checkpoint(tmp_path / "two" / "model.safetensors", 2)
    (tmp_path / "two" / "model.safetensors.index.json").write_text(said)
    with pytest.raises(UserError, match=r"two/model.safetensors.index.json: "):
        merged(tmp_path / "out", linear(tmp_path / "two", tmp_path / "two"))
    assert [each.name for each in tmp_path.iterdir()] == ["two"]


def test_the_command(tmp_path):
    one, two = (checkpoint(tmp_path / f"{n}.safetensors", n) for n in (1, 2))
    (tmp_path / "recipe.yml").write_text(text_of(linear(one, two)))
    words = ("-m", "merge", str(tmp_path / "recipe.yml"), str(tmp_path / "out.safetensors"), "--raw")
    code, said, errors = answer(*words)
    assert code == 0 and "out.safetensors: " in said and "lm_eval" not in said, errors
    code, _, errors = answer(*words, "--shard-size", "1GB")
    assert code == 2 and "as many files as its first model" in errors
    code, _, errors = answer(*words)
    assert code == 2 and "exists; --overwrite" in errors
    (tmp_path / "one").mkdir()
    checkpoint(tmp_path / "one" / "model.safetensors", 1)
    recipe = tmp_path / "out" / "mergekit_config.yml"
    recipe.parent.mkdir()
    recipe.write_text(text_of(linear(tmp_path / "one", two)))
    code, _, errors = answer("-m", "merge", str(recipe), str(recipe.parent), "--raw", "--overwrite")
    assert code == 2 and f"is not replaced: {recipe} is in it" in errors
