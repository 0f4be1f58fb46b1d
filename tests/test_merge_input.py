"""Recipes and models that cannot be merged: one line that says why, before anything is written."""

import json
import re
import shutil
import struct
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from transformers import BertConfig, BertForMaskedLM, RobertaConfig, RobertaForMaskedLM

from merge import merge_recipe as recipes
from merge.merging import merge
from merge.tensor_files import UserError
from merge.weight_files import size_of
from tests.merging import llama, run, weights


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("pair")
    return str(llama(folder / "a", 1)), str(llama(folder / "b", 2))


def refused(text: str, why: str, out: Path) -> None:
    with pytest.raises(UserError, match=why) as error:
        merge(recipes.parse(text), out)
    assert "\n" not in str(error.value).strip() and not out.exists()
    assert not [path for path in out.parent.iterdir() if path.name.startswith(f".{out.name}")]


MODELS = "models: [{model: A, parameters: {weight: 1}}, {model: B, parameters: {weight: 1}}]\n"
TIES = "merge_method: ties\nbase_model: A\nmodels: [{model: B, parameters: {weight: 1}}]\n"


@pytest.mark.parametrize("text, why", [
    ("merge_method: tiles\n" + MODELS, "merge_method is 'tiles'; the nearest known one is ties"),
    ("merge_method: ramplus\n" + MODELS, "merge_method is 'ramplus'; the nearest known one is ramplus_tl"),
    ("gate_mode: hidden\nexperts: []\nbase_model: A\n", "mergekit's key 'gate_mode' is not supported here"),
    ("merge_method: linear\nmodules: {}\n", "mergekit's key 'modules' is not supported here"),
    ("merge_methd: ties\n" + MODELS, "unknown key 'merge_methd'; the nearest known one is merge_method"),
    ("merge_method: linear\n", "one of `models` and `slices` is needed"),
    ("merge_method: linear\nslices: []\n" + MODELS, "not both"),
    ("merge_method: linear\nmodels: []\n", r"models: a list is expected"),
    ("merge_method: linear\nmodels: [{modl: A}]\n", "the nearest known one is model"),
    ("merge_method: linear\nmodels: [{model: 3}]\n", "text is expected, not 3"),
    (MODELS, "merge_method is missing"),
    ("[1, 2]", "`key: value` lines are expected"),
    ("", "`key: value` lines are expected"),
    ("merge_method: linear\nparameters: {wieght: 1}\n" + MODELS, "no parameter 'wieght'; the nearest .* is weight"),
    ("merge_method: linear\nmodels: [{model: A, parameters: {weight: x}}]\n", "weight` of .* is 'x'; a number"),
    ("merge_method: linear\nmodels: [{model: A}, {model: B}]\n", "`weight` of .* is missing"),
    (TIES + "parameters: {density: 1.5}\n", "density.* is 1.5; from 0 to 1 is possible"),
    (TIES + "parameters: {density: [0.5, -0.1]}\n", "density.* is -0.1; from 0 to 1"),
    (TIES + "parameters: {density: .nan}\n", "density.* is nan; a number is expected"),
    ("merge_method: linear\nparameters: {weight: .inf}\nmodels: [A, B]\n", "weight.* is inf; a number is expected"),
    ("merge_method: linear\nparameters: {weight: 1.0e+308}\nmodels: [A, B]\n", "weight.* is 1e.308; .* up to 1e.30"),
    (TIES + "parameters: {normalize: 1}\n", "normalize.* is 1.*; true or false is expected"),
    (TIES + "parameters: {density: []}\n", "an empty list says nothing"),
    (TIES + "parameters: {density: [{value: 1, fliter: x}]}\n", "the nearest known one is filter"),
    (TIES + "parameters: {density: [{filter: x}]}\n", "a value, or a list of values, is expected"),
    (TIES + "parameters: {density: {split: 0.5, value: 1}}\n", "split: values are one more than .* here 2, not 1"),
    (TIES + "parameters: {density: {split: [0.5, 1.5], value: [1, 1, 1]}}\n", "from 0, the first layer, to 1"),
    (TIES + "parameters: {density: {split: .nan, value: [1, 1]}}\n", "from 0, the first layer, to 1"),
    (TIES + "parameters: {density: {split: [], value: [1]}}\n", "an empty list says nothing"),
    (TIES + "parameters: {density: [[1, 2]]}\n", "a list of numbers, is expected"),
    (TIES + "dtype: float64\n", "dtype is 'float64'; float32, bfloat16, float16 are possible"),
    (TIES + "tokenizer_source: C\n", "tokenizer_source is 'C'; one of union, base, A, B is possible"),
    (TIES + "tokenizer_source: union\ntokenizer: {}\n", "one of them is enough"),
    (TIES + "tokenizer: {pad_to_multiple_of: 0}\n", "a whole number from 1"),
    ("merge_method: karcher\nparameters: {max_iter: 1.5}\nmodels: [A, B]\n", "max_iter.* a whole number is expected"),
    ("merge_method: ties\n" + MODELS, "ties needs a base_model"),
    ("merge_method: slerp\nbase_model: A\nparameters: {t: 0.5}\nmodels: [A, B, B]\n", "slerp merges just 1 model"),
    ("merge_method: slerp\nbase_model: A\nmodels: [{model: B, parameters: {t: 0.5}}]\n", "'t' is one value for all"),
    ("merge_method: model_stock\nbase_model: A\nmodels: [A, B]\n", "model_stock merges 2 or more"),
    ("merge_method: passthrough\nmodels: [A, B]\n", "passthrough merges just 1"),
    ("merge_method: linear\nparameters: {weight: 0}\nmodels: [A, B]\n", "sum to 0"),
    ("merge_method: della\nbase_model: A\nparameters: {density: 0.1, weight: 1}\nmodels: [B]\n", "epsilon"),
    ("merge_method: passthrough\nslices: [{sources: [{model: A}]}]\n", "needs a layer_range"),
    ("merge_method: passthrough\nslices: [{sources: [{model: A, layer_range: [2, 1]}]}]\n", "behind the last"),
    ("merge_method: passthrough\nslices: [{sources: [{model: A, layer_range: [0, 5]}]}]\n", "there is no layer 4"),
    (
        "merge_method: linear\nparameters: {weight: 1}\nslices: [{sources: [{model: A, layer_range: [0, 2]}, "
        "{model: B, layer_range: [0, 3]}]}]\n",
        "different numbers of layers",
    ),
    (TIES + "parameters: {density: 2020-01-01}\n", "a number, or a list of numbers, is expected"),
    (TIES + "parameters: {density: {filter: 3, value: 1}}\n", "filter: text is expected, not 3"),
    ("merge_method: slerp\nbase_model: A\nparameters: {t: 1}\nmodels: [A, A]\n", "just 1 model.* here are 0"),
    (
        "merge_method: linear\nparameters: {weight: 1}\nslices: [{sources: [{model: A, layer_range: [0, 2]}, "
        "{model: A, layer_range: [0, 3]}]}]\n",
        "different numbers of layers",
    ),
    (
        "merge_method: linear\nparameters: {weight: 1}\nslices: [{sources: [{model: A, layer_range: [0, 2]}, "
        "{model: A}]}]\n",
        "needs a layer_range",
    ),
    (TIES + f"parameters: {{density: 1{'0' * 400}}}\n", "a number, or a list of numbers, is expected"),
    (TIES + f"parameters: {{density: 1{'0' * 5000}}}\n", "not YAML"),
    (TIES + "parameters: {density: 2020-13-45}\n", "not YAML"),
    (TIES + "tokenizer: {pad_to_multiple_of: 10000000000}\n", "a whole number from 1 to"),
    (
        f"merge_method: passthrough\nslices: [{{sources: [{{model: A, layer_range: [0, 1{'0' * 30}]}}]}}]\n",
        "behind the last",
    ),
    # YAML
    ("merge_method: &x linear\nmodels: [*x]\n", "line 1: anchors and aliases are not accepted"),
    ("merge_method: !!python/name:os.system linear\n" + MODELS, "line 1: the tag .* is not accepted"),
    ("merge_method: linear\nmerge_method: ties\n" + MODELS, "line 2: the key 'merge_method' stands there twice"),
    ("merge_method: linear\nmodels: [{model: A, model: B}]\n", "line 2: the key 'model' stands there twice"),
    ("merge_method: linear\n<<: {dtype: float16}\n" + MODELS, "line 2: not YAML: .*merge"),
    ("merge_method: [linear\n", "line 2: not YAML"),
    ("1: linear\n" + MODELS, "the key 1 is not text"),
    ("a: " + "[" * 5000, "not YAML|nested too deeply"),
    ("merge_method: linear\x00\n", "not YAML"),
])  # fmt: skip
def test_recipes(text, why, pair, tmp_path):
    for name, path in zip("AB", pair, strict=True):
        text = re.sub(rf"\b{name}\b", path, text)
        why = re.sub(rf"(?<=[ ,]){name}(?=[ ,])", re.escape(path), why)
    refused(text, why, tmp_path / "out")


def test_a_file_that_is_not_there_or_not_text(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        merge(tmp_path / "nowhere.yml", tmp_path / "out")
    (tmp_path / "bad.yml").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"bad.yml: not UTF-8"):
        merge(tmp_path / "bad.yml", tmp_path / "out")


def linear(*models) -> str:
    inputs = [{"model": str(model), "parameters": {"weight": 1}} for model in models]
    return yaml.safe_dump({"merge_method": "linear", "models": inputs})


def copy_of(model: str, folder: Path, **config) -> Path:
    shutil.copytree(model, folder)
    if config:
        said = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**said, **config}))
    return folder


def test_models_of_other_shapes(pair, tmp_path):
    wide = llama(tmp_path / "wide", 1, intermediate_size=64)
    refused(linear(pair[0], wide), r"mlp.*\[32, 48\] in .*a, \[32, 64\] in .*wide", tmp_path / "out")
    deep = llama(tmp_path / "deep", 1, num_hidden_layers=5)
    refused(linear(pair[0], deep), r"model.layers.4.* is missing in .*a", tmp_path / "out")
    refused(linear(deep, pair[0]), r"model.layers.4.* is missing in .*a", tmp_path / "out")
    large = llama(tmp_path / "large", 1, vocab_size=100)
    refused(linear(pair[0], large), "has different shapes.*give a tokenizer_source", tmp_path / "out")
    heads = copy_of(pair[0], tmp_path / "heads", num_attention_heads=8)
    refused(linear(pair[0], heads), "num_attention_heads is 4 in .*, 8 in", tmp_path / "out")
    older = copy_of(pair[1], tmp_path / "older", head_dim=None, num_key_value_heads=None)
    run(tmp_path / "both", yaml.safe_load(linear(pair[0], older)))


def test_encoders_of_two_kinds(tmp_path):
    shape = {
        "vocab_size": 50,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    BertForMaskedLM(BertConfig(**shape)).save_pretrained(tmp_path / "bert")
    RobertaForMaskedLM(RobertaConfig(**shape)).save_pretrained(tmp_path / "roberta")
    refused(
        linear(tmp_path / "bert", tmp_path / "roberta"),
        "kind bert.* kind roberta: .* cannot be merged",
        tmp_path / "out",
    )
    run(tmp_path / "both", yaml.safe_load(linear(tmp_path / "bert", tmp_path / "bert")))


def test_a_missing_tensor(pair, tmp_path):
    less = copy_of(pair[1], tmp_path / "less")
    tensors = weights(less)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, less / "model.safetensors")
    refused(linear(pair[0], less), r"model.layers.2.mlp.up_proj.weight is missing in .*less", tmp_path / "out")
    refused(linear(less, pair[0]), r"model.layers.2.mlp.up_proj.weight is missing in .*less", tmp_path / "out")


def test_a_parameter_of_the_base_is_named(pair, tmp_path):
    a, b = pair
    inputs = [{"model": a, "parameters": {"weight": 0.5}}, {"model": b, "parameters": {"weight": 0.5}}]
    text = yaml.safe_dump({"merge_method": "task_arithmetic", "base_model": a, "models": inputs})
    assert "`weight` has no effect: it is the base" in merge(recipes.parse(text), tmp_path / "out").notes[0]


def test_one_model_twice(pair, tmp_path):
    found = run(tmp_path / "out", yaml.safe_load(linear(pair[0], pair[0], pair[1])))
    a, b = (weights(Path(path)) for path in pair)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.allclose(found[name], (2 * a[name] + b[name]) / 3, atol=1e-6)


def test_what_differs_without_harm_is_said(pair, tmp_path):
    other = copy_of(pair[1], tmp_path / "other", rms_norm_eps=1e-3)
    stats = merge(recipes.parse(linear(pair[0], other)), tmp_path / "out")
    assert ["rms_norm_eps is 0.001 in" in note for note in stats.notes] == [True]


def test_layers_that_a_configuration_promises(pair, tmp_path):
    less = copy_of(pair[1], tmp_path / "less", num_hidden_layers=6)
    refused(linear(less, less), "model.layers has 4 layers, its config.json says 6", tmp_path / "out")
    hole = copy_of(pair[1], tmp_path / "hole")
    save_file({k: v for k, v in weights(hole).items() if "layers.2." not in k}, hole / "model.safetensors")
    refused(linear(hole, hole), "model.layers has 3 layers, its config.json says 4", tmp_path / "out")


def test_an_index_that_promises_more_than_its_shards_have(tmp_path):
    model = llama(tmp_path / "m", 1, shard="20KB")
    index = model / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    said["weight_map"]["model.layers.0.extra.weight"] = said["weight_map"]["lm_head.weight"]
    index.write_text(json.dumps(said))
    refused(linear(model), "its index has model.layers.0.extra.weight, its files do not", tmp_path / "out")


BINS = {
    "a list": ([torch.ones(2)], "a dictionary of tensors is expected"),
    "keys": ({3: torch.ones(2)}, "cannot be merged"),
    "complex": ({"x": torch.ones(2, dtype=torch.complex64)}, "cannot be merged"),
    "sparse": ({"x": torch.ones(2, 2).to_sparse()}, "cannot be merged|not a file of tensors"),
    "giant": ({"x": torch.ones(1).expand(1 << 40)}, "cannot be merged"),
    "meta": ({"x": torch.ones(2, device="meta")}, "cannot be merged|not a file of tensors"),
    "nothing": ({}, "there is no tensor"),
    "code": ({"x": Path("/")}, "not a file of tensors alone"),
}


@pytest.mark.parametrize("kind", BINS)
def test_bin_files_with_something_else(kind, pair, tmp_path):
    bad = copy_of(pair[0], tmp_path / "bad")
    (bad / "model.safetensors").unlink()
    torch.save(BINS[kind][0], bad / "pytorch_model.bin")
    refused(linear(bad), f"bad.*: .*({BINS[kind][1]})", tmp_path / "out")


def test_quantized_models(pair, tmp_path):
    other = copy_of(pair[1], tmp_path / "other", quantization_config={"quant_method": "gptq"})
    refused(linear(pair[0], other), "its weights are quantized", tmp_path / "out")
    raw = copy_of(pair[1], tmp_path / "raw")
    save_file({name: each.to(torch.float8_e4m3fn) for name, each in weights(raw).items()}, raw / "model.safetensors")
    refused(linear(pair[0], raw), "quantized", tmp_path / "out")


@pytest.mark.parametrize("path, why", [
    ("/no/such/folder", "not a folder with a model"),
    ("./no-such", "not a folder with a model"),
    ("a/b/c", "not a folder with a model"),
    ("no-such.gguf", "no such file"),
    ("~nobody-of-this-name/model", "nobody-of-this-name"),
    pytest.param("org/model@refs/pr/1", "the hub does not give it", marks=pytest.mark.slow),
])  # fmt: skip
def test_models_that_are_not_there(path, why, tmp_path):
    refused(linear(path), why, tmp_path / "out")


def test_folders_that_are_no_models(pair, tmp_path):
    (tmp_path / "empty").mkdir()
    refused(linear(tmp_path / "empty"), "config.json: cannot be read: No such file", tmp_path / "out")
    bare = copy_of(pair[0], tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    refused(linear(bare), "no model.safetensors in it", tmp_path / "out")
    index = bare / "model.safetensors.index.json"
    for text, why in (
        ('{"weight_map": {"x": "model-1.safetensors"}}', "shards are missing: model-1.safetensors"),
        ('{"weight_map": {"x": "../secret.safetensors"}}', "files of other folders"),
        ('{"weight_map": 3}', "a weight_map of files is expected"),
        ("{", "not JSON"),
    ):
        index.write_text(text)
        refused(linear(bare), why, tmp_path / "out")


def header(fields: dict | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize("data, why", [
    (b"", "ends within its header"),
    (b"\x01\x02", "ends within its header"),
    (header({"x": GOOD}, b"1234"), "cut off"),
    (header({"x": GOOD}, bytes(12)), "cut off"),
    (header({}, length=2**63), "its header would have 9223372036854775808 bytes"),
    (header({}, length=90_000_000), "its header would have 90000000 bytes"),
    (header(b"{not json"), "not a safetensors file"),
    (header(b"[" * 50_000), "not a safetensors file"),
    (header(b"[1]"), "not a safetensors file"),
    (header({"x": 3}), "not a safetensors file"),
    (header({"__metadata__": 3, "x": GOOD}, bytes(8)), "__metadata__ is text by text"),
    (header({"__metadata__": {"a": {}}, "x": GOOD}, bytes(8)), "__metadata__ is text by text"),
    (header({"x": {**GOOD, "dtype": "F33"}}, bytes(8)), "not a safetensors file"),
    (header({"x": {**GOOD, "shape": [-2]}}, bytes(8)), "a shape of"),
    (header({"x": {**GOOD, "shape": [2.0]}}, bytes(8)), "a shape of"),
    (header({"x": {**GOOD, "shape": [True, 2]}}, bytes(8)), "a shape of"),
    (header({"x": {**GOOD, "shape": [10**30, 10**30]}}, bytes(8)), "more numbers than any disk"),
    (header({"x": {**GOOD, "shape": [0, 10**30], "data_offsets": [0, 0]}}), "more numbers than any disk"),
    (header({"x": {**GOOD, "shape": [1] * 100}}, bytes(4)), "more numbers than any disk"),
    (header({"x": {**GOOD, "shape": 2}}, bytes(8)), "a shape of"),
    (header({}), "there is no tensor in model.safetensors"),
    (header({"x": {**GOOD, "data_offsets": [0, 80]}}, bytes(8)), "were expected"),
    (header({"x": {**GOOD, "data_offsets": [4, 12]}}, bytes(12)), "were expected"),
    (header({"x": GOOD, "y": GOOD}, bytes(8)), "were expected"),
    (header({"x": {**GOOD, "data_offsets": "08"}}, bytes(8)), "two whole numbers"),
    (header({"x": {**GOOD, "data_offsets": None}}, bytes(8)), "two whole numbers"),
    (header({"x": {**GOOD, "data_offsets": [0, "8"]}, "y": GOOD}, bytes(8)), "two whole numbers"),
    (header(json.dumps({"x": GOOD}).encode().replace(b"8]", b"9" * 5000 + b"]"), bytes(8)), "not a safetensors file"),
])  # fmt: skip
def test_damaged_or_hostile_weight_files(data, why, pair, tmp_path):
    bad = copy_of(pair[0], tmp_path / "bad")
    (bad / "model.safetensors").write_bytes(data)
    refused(linear(bad), f"bad.*: .*({why})", tmp_path / "out")


def test_a_truncated_weight_file(pair, tmp_path):
    bad = copy_of(pair[0], tmp_path / "bad")
    data = (bad / "model.safetensors").read_bytes()
    (bad / "model.safetensors").write_bytes(data[:-1000])
    refused(linear(bad), "cut off, or not whole yet", tmp_path / "out")


def test_a_device_that_is_not_there(pair, tmp_path):
    from merge.engine import MergeOptions

    with pytest.raises(UserError, match="the device cuda:77 cannot be used here"):
        merge(recipes.parse(linear(*pair)), tmp_path / "out", how=MergeOptions(device="cuda:77"))
    for name in ("gpu", "meta"):
        with pytest.raises(UserError, match=f"the device {name} cannot be used here"):
            merge(recipes.parse(linear(*pair)), tmp_path / "out", how=MergeOptions(device=name))


@pytest.mark.parametrize(
    "text, size", [("5GB", 5 * 10**9), ("512MiB", 512 << 20), ("1.5k", 1500), ("7", 7), ("2 GiB", 2 << 30)]
)
def test_sizes(text, size):
    assert size_of(text) == size


@pytest.mark.parametrize("text", ["", "x", "5XB", "-1GB", "0", "1e9", "9" * 400])
def test_what_is_no_size(text):
    with pytest.raises(UserError, match="not a size"):
        size_of(text)
