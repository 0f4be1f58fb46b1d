"""Files that mean harm, or nothing anybody can mean: refused at once, with words."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from fleet.errors import UserError
from fleet.untrusted_model import check_config, check_words, endless
from merge import strictyaml
from merge.adapters import matcher
from merge.donors import Donors
from tests import merging
from train import text_sources
from train.member.pretraining_round_zero import named_tokenizer
from train.model import can_be_built
from train.training_config import Dataset

# -- YAML --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deep", [
    "[" * 40_000, "- " * 20_000 + "1", "{a: " * 500, "".join(" " * n + "a:\n" for n in range(500)), "? " * 5_000,
])  # fmt: skip
def test_nested_yaml_is_refused_while_it_is_read(deep):
    with pytest.raises(strictyaml.BadYaml, match=r"^line \d+: nested too deeply; 32 levels are accepted"):
        strictyaml.parse(deep)
    assert strictyaml.parse("[" * 31 + "1" + "]" * 31)


@pytest.mark.parametrize("number", ["1" + ":1" * 100_000, "1" + ":1" * 5_000 + ".5", "9" * 5_000])
def test_endless_numbers_in_yaml(number):
    with pytest.raises(strictyaml.BadYaml, match="line 1: not YAML: a number of [0-9]+ characters"):
        strictyaml.parse(f"a: {number}")


def test_long_yaml_is_not_read(tmp_path):
    (tmp_path / "long.yml").write_text("#" * (strictyaml.LIMIT + 1))
    with pytest.raises(strictyaml.BadYaml, match="longer than"):
        strictyaml.read(tmp_path / "long.yml")


# -- patterns of adapters ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*b", "(.*)*(.*)*x", "(" * 8 + "a" + ")*" * 8 + "b"])
def test_patterns_that_would_never_end_do(pattern):
    assert not matcher(pattern)("a." * 500 + "a" * 500)


@pytest.mark.parametrize("pattern", [
    "q_proj", "model.layers.0.self_attn.q_proj", r"model\.layers\.0\.mlp", r"layers\.[0-9]\..*proj",
    r"^model.*\.0\.q_proj",
    r"layers\.(0|1)\.(?:k|q)_proj", r".*\.(k_proj|q_proj)$", r"layers\.\d+\.self_attn\.[^.]*", "^q_proj",
    "[a-m]_proj", "q.proj",
])  # fmt: skip
def test_patterns_that_adapters_have_mean_what_they_mean_to_peft(pattern):
    for module in (
        *("q_proj", "model.q_proj", "model.layers.0.self_attn.q_proj", "model.layers.11.self_attn.k_proj", "m.qxproj"),
        *(
            "model.layers.0.mlp",
            "layers.1.q_proj",
            "model.layers.0.mlp.up_proj",
            "xq_proj",
            "q_proj.x",
            "model.0.q_proj",
        ),
    ):
        assert matcher(pattern)(module) == bool(re.match(rf"(.*\.)?({pattern})$", module)), module


@pytest.mark.parametrize("pattern", [r"(a)\1", "(?=a)b", "a{2,9}", "(a", "a)", "[a", "*", "a**", "x" * 513, r"\bq"])
def test_other_patterns_are_refused(pattern):
    with pytest.raises(UserError, match="pattern"):
        matcher(pattern)


def test_a_hostile_adapter_does_not_hang_a_merge(tmp_path):
    merging.llama(tmp_path / "model", 1)
    (tmp_path / "adapter").mkdir()
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    save_file({f"{name}.lora_A.weight": torch.ones(2, 32), f"{name}.lora_B.weight": torch.ones(32, 2)},
              tmp_path / "adapter/adapter_model.safetensors")  # fmt: skip
    settings = {"peft_type": "LORA", "lora_alpha": 2, "alpha_pattern": {r"([a-z_0-9]+\.?)+X": 1}}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(settings))
    with Donors() as donors:
        assert donors[f"{tmp_path / 'model'}+{tmp_path / 'adapter'}"].tensors
    settings["alpha_pattern"] = {"(?<!a)q_proj": 1}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(settings))
    with (
        Donors() as donors,
        pytest.raises(UserError, match="adapter_config.json: alpha_pattern: the pattern .* not understood"),
    ):
        donors[f"{tmp_path / 'model'}+{tmp_path / 'adapter'}"]


# -- config.json -------------------------------------------------------------------------------------------------------

ABSURD = [
    *({"num_hidden_layers": 10**9}, {"hidden_size": 10**9}, {"num_attention_heads": 10**9}, {"vocab_size": 10**9}),
    *({"num_local_experts": 10**9}, {"num_hidden_layers": 2000, "num_experts": 2000}, {"n_layer": 10**400}),
    *({"text_config": {"num_hidden_layers": 10**9}}, {"intermediate_size": [1, 10**9]}),
]  # fmt: skip


@pytest.mark.parametrize("said", ABSURD)
def test_a_model_that_nobody_has_is_not_built(tmp_path, said):
    with pytest.raises(UserError, match="no model has more than"):
        can_be_built({"config": {"model_type": "qwen2", **said}})
    merging.llama(tmp_path / "model", 1)
    merging.tokenizer(tmp_path / "model", "some words")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "qwen2", **said}))
    with pytest.raises(UserError, match="no model has more than"):
        can_be_built(str(tmp_path / "model"))
    with pytest.raises(UserError, match="no model has more than"), Donors() as donors:
        donors[str(tmp_path / "model")]
    with pytest.raises(UserError, match="no model has more than"):
        named_tokenizer(str(tmp_path / "model"))


def test_every_model_that_transformers_knows_is_plausible():
    from transformers import CONFIG_MAPPING

    seen = 0
    for kind in (
        "llama",
        "qwen2",
        "qwen2_moe",
        "gpt2",
        "mixtral",
        "gemma3",
        "mamba2",
        "bert",
        "t5",
        "deepseek_v3",
        "doge",
    ):
        check_config(CONFIG_MAPPING[kind]().to_dict(), kind)
        seen += 1
    assert seen == 11
    check_config({"num_hidden_layers": 126, "hidden_size": 16384, "max_position_embeddings": 10_485_760}, "llama")
    check_config(
        {"num_hidden_layers": 61, "n_routed_experts": 384, "vocab_size": 262_144, "rope_theta": 10**9}, "large"
    )


def test_nested_config_json():
    deep: dict = {}
    for _ in range(100):
        deep = {"a": deep}
    with pytest.raises(UserError, match="nested too deeply"):
        check_config(deep, "here")


# -- tokenizer.json ----------------------------------------------------------------------------------------------------

SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
GROW = [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}] * 5
ADDED = {"content": "<x>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


@pytest.mark.parametrize("change, why", [
    ({"pre_tokenizer": SPLIT}, "could take for ever"),
    ({"normalizer": {"type": "Replace", "pattern": {"Regex": "(x+x+)+y"}, "content": ""}}, "could take for ever"),
    ({"normalizer": {"type": "Sequence", "normalizers": GROW}}, "letters of one"),
    ({"added_tokens": [{**ADDED, "id": 4_000_000_000}]}, "the token '<x>' has the number 4000000000"),
    ({"added_tokens": [{**ADDED, "id": -1}]}, "the token '<x>' has the number -1"),
])  # fmt: skip
def test_a_hostile_tokenizer(tmp_path, change, why):
    merging.tokenizer(tmp_path, "some words")
    path = tmp_path / "tokenizer.json"
    named_tokenizer(str(tmp_path))
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=why):
        named_tokenizer(str(tmp_path))
    path.write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"tokenizer.json: (not JSON|nested)"):
        named_tokenizer(str(tmp_path))


GPT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LATE = r"[^\r\n\p{L}]?[\p{Lu}\p{M}]*[\p{Ll}\p{M}]+(?i:'s|'t)?|\d{1,3}(?=(?:\d{3})*\b)|'(ll|ve)|\p{L}++|[^(\s|[.,])]+"


@pytest.mark.parametrize("pattern", [GPT, LLAMA, LATE, " {2,}", "[一-龥]+", r"(?:ab)+", r"\(+x)", r"[(a+)+]+"])
def test_patterns_that_tokenizers_have(pattern):
    assert not endless(pattern)
    check_words({"pre_tokenizer": {**SPLIT, "pattern": {"Regex": pattern}}, "model": {"vocab": {"a": 0}}}, "here")


@pytest.mark.parametrize("pattern", [
    "(a+)+$", "(a|a)*c", "(?:a|aa)+$", "(a*)*b", r"(a)\1*", "((a)?b?)*", "(?:a?){1,50}", "(?i:a|b){2,}", "a" * 5000,
    r"[\\](a+)+$", r"\p{(a+)+", r"[[a]\]](a{1,2}){3}",
])  # fmt: skip
def test_patterns_that_could_take_for_ever(pattern):
    assert endless(pattern)


@pytest.mark.parametrize("pattern", ["(?i", "a\\", "a{", "[", "[^]", "a{²}", "(?", ")", r"\x{"])
def test_patterns_without_an_end_have_one(pattern):
    assert endless(pattern) == ""


# -- text --------------------------------------------------------------------------------------------------------------


def test_endless_lines_and_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(text_sources, "LONGEST", 1000)
    (tmp_path / "long.jsonl").write_text('{"text": "short"}\n\n' + "x" * 5000 + "\n")
    documents = text_sources.documents(Dataset(source=str(tmp_path / "long.jsonl")))
    next(documents)
    with pytest.raises(UserError, match=r"long.jsonl, line 3: longer than 1000 characters"):
        next(documents)
    with pytest.raises(UserError, match="long.jsonl, line 3: longer"):
        [*text_sources.read(str(tmp_path / "long.jsonl"))]
    (tmp_path / "many.txt").write_text("some words\n" * 200)
    with pytest.raises(UserError, match="many.txt: a document longer than 1000 characters, no '---' in it"):
        [*text_sources.documents(Dataset(source=str(tmp_path / "many.txt"), separator="---"))]
