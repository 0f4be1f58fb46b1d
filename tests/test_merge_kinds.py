"""Kinds of models, and what is special about each: heads, names, old files, layers that are not all alike."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    OPTConfig,
    OPTForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

from merge.merge_recipe import parse
from merge.merging import merge
from merge.tensor_files import UserError
from tests.merging import llama, run, says, weights

SMALL = {
    **{"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2},
    **{"num_key_value_heads": 2, "max_position_embeddings": 32, "head_dim": 8},
}


def saved(kind, config, folder: Path, seed: int) -> str:
    torch.manual_seed(seed)
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return str(folder)


def linear(*models: str, **more) -> dict:
    return {"merge_method": "linear", "parameters": {"weight": 1.0}, "models": list(models), **more}


def stack(*layers: tuple[str, int, int]) -> dict:
    slices = [{"sources": [{"model": model, "layer_range": [begin, end]}]} for model, begin, end in layers]
    return {"merge_method": "passthrough", "slices": slices}


def test_the_bias_of_a_head_that_is_tied(tmp_path):
    config = RobertaConfig(**{key: value for key, value in SMALL.items() if key not in ("head_dim",)})
    models = [saved(RobertaForMaskedLM, config, tmp_path / f"m{n}", n) for n in range(2)]
    found = run(tmp_path / "out", linear(*models))
    assert torch.allclose(found["lm_head.bias"], sum(weights(Path(m))["lm_head.bias"] for m in models) / 2, atol=1e-6)
    assert found.keys() == weights(Path(models[0])).keys()
    assert json.loads((tmp_path / "out" / "config.json").read_text()).get("tie_word_embeddings", True)
    _, missing = AutoModelForMaskedLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not missing["missing_keys"] and not missing["unexpected_keys"]


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_with_a_bias_beside_one_that_is_tied(tied, tmp_path):
    shape = {key: value for key, value in SMALL.items() if key != "head_dim"}
    one = saved(PhiForCausalLM, PhiConfig(**shape, tie_word_embeddings=False), tmp_path / "one", 1)
    two = saved(PhiForCausalLM, PhiConfig(**shape, tie_word_embeddings=tied), tmp_path / "two", 2)
    found, first, second = run(tmp_path / "out", linear(one, two)), weights(Path(one)), weights(Path(two))
    assert torch.allclose(found["lm_head.bias"], (first["lm_head.bias"] + second["lm_head.bias"]) / 2, atol=1e-6)
    theirs = second["model.embed_tokens.weight" if tied else "lm_head.weight"]
    assert torch.allclose(found["lm_head.weight"], (first["lm_head.weight"] + theirs) / 2, atol=1e-6)
    assert torch.isfinite(says(tmp_path / "out")).all()


def test_gpt2_with_and_without_its_outermost_name(tmp_path):
    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    one, two = (saved(GPT2LMHeadModel, config, tmp_path / f"m{n}", n) for n in range(2))
    bare = tmp_path / "bare"  # as the first GPT-2 lies on the hub, masks and all
    shutil.copytree(two, bare)
    tensors = {name.removeprefix("transformer."): each for name, each in weights(Path(two)).items()}
    tensors |= {f"h.{n}.attn.bias": torch.ones(1, 1, 16, 16) for n in range(2)}
    save_file(tensors, bare / "model.safetensors", {"format": "pt"})
    wanted = run(tmp_path / "wanted", linear(one, two))
    found = run(tmp_path / "found", linear(one, str(bare)))
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in found)
    other = run(tmp_path / "other", linear(str(bare), one))
    assert all(torch.allclose(other[name.removeprefix("transformer.")], wanted[name]) for name in wanted)


def test_tensors_before_the_layers_come_from_the_first_slice(tmp_path):
    config = {**{"vocab_size": 50, "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 2}}
    config |= {"word_embed_proj_dim": 8, "max_position_embeddings": 32}
    one, two = (saved(OPTForCausalLM, OPTConfig(**config), tmp_path / f"m{n}", n) for n in range(2))
    found = run(tmp_path / "out", stack((one, 0, 1), (two, 1, 2)))
    for name, wanted in (("project_in", one), ("embed_positions", one), ("project_out", two)):
        name = f"model.decoder.{name}.weight"
        assert torch.equal(found[name], weights(Path(wanted))[name])


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("parameters", [False, True])
def test_bin_files_old_and_new(legacy, parameters, tmp_path):
    model = llama(tmp_path / "m", 1)
    wanted = weights(model)
    (model / "model.safetensors").unlink()
    tensors = {name: torch.nn.Parameter(each) if parameters else each for name, each in wanted.items()}
    torch.save(tensors, model / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    found = run(tmp_path / "out", linear(str(model)))
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_one_file_counts_before_an_index(tmp_path):
    model, other = llama(tmp_path / "m", 1), llama(tmp_path / "other", 2, shard="20KB")
    for file in (*other.glob("*.safetensors"), other / "model.safetensors.index.json"):
        shutil.copy(file, model)
    one = run(tmp_path / "out", linear(str(model)))
    assert torch.equal(one["lm_head.weight"], weights(llama(tmp_path / "again", 1))["lm_head.weight"])


def test_a_path_with_a_plus(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed: a path with a + before an adapter is not tested")
    model = llama(tmp_path / "c++" / "m", 1)
    made = peft.get_peft_model(_loaded(model), peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    made.save_pretrained(tmp_path / "lo+ra")
    found = run(tmp_path / "out", linear(f"{model}+{tmp_path / 'lo+ra'}"))
    assert found.keys() == weights(model).keys()


def _loaded(model: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model)


def test_a_base_beside_the_models_of_a_method_that_knows_none(tmp_path):
    a, b, c = (str(llama(tmp_path / f"m{n}", n)) for n in range(3))
    beside, among = run(tmp_path / "1", linear(b, c, base_model=a)), run(tmp_path / "2", linear(b, c, a))
    assert all(torch.equal(beside[name], among[name]) for name in among)
    one = {"model": b, "parameters": {"weight": 1.0}}
    with pytest.raises(UserError, match=r"`weight` of .*, .*m0 is missing"):
        run(tmp_path / "3", {"merge_method": "linear", "models": [one], "base_model": a})


# -- layers that are not all alike -------------------------------------------------------------------------------------


def experts(folder: Path, seed: int, **more) -> str:
    config = Qwen3MoeConfig(**SMALL, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8, **more)
    return saved(Qwen3MoeForCausalLM, config, folder, seed)


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def test_dense_layers_keep_their_kind_among_layers_of_experts(tmp_path):
    model, out = experts(tmp_path / "m", 1, mlp_only_layers=[0, 3]), tmp_path / "out"
    run(out, stack((model, 0, 2), (model, 0, 1), (model, 2, 4)))
    assert config_of(out)["mlp_only_layers"] == [0, 2, 4] and config_of(out)["num_hidden_layers"] == 5
    assert torch.isfinite(says(out)).all()


def test_layers_whose_kind_follows_from_their_number(tmp_path):
    model = experts(tmp_path / "m", 1, decoder_sparse_step=2)
    run(tmp_path / "out", stack((model, 0, 2), (model, 0, 4)))
    assert torch.isfinite(says(tmp_path / "out")).all()
    with pytest.raises(UserError, match="decoder_sparse_step of 2, what layer 1 is follows from its number"):
        run(tmp_path / "bad", stack((model, 1, 3)))


def test_each_layer_is_of_the_type_that_its_own_model_says(tmp_path):
    kinds = (["full_attention", "sliding_attention"] * 2, ["sliding_attention"] * 4)
    models = []
    for n, types in enumerate(kinds):
        config = Qwen3Config(**SMALL, layer_types=types, use_sliding_window=True, sliding_window=8)
        models.append(saved(Qwen3ForCausalLM, config, tmp_path / f"m{n}", n))
    run(tmp_path / "out", stack((models[0], 2, 4), (models[1], 0, 2)))
    assert config_of(tmp_path / "out")["layer_types"] == [*kinds[0][2:], *kinds[1][:2]]
    file = Path(models[1]) / "config.json"
    file.write_text(
        json.dumps({key: each for key, each in json.loads(file.read_text()).items() if key != "layer_types"})
    )
    with pytest.raises(UserError, match="says nothing of layer 0 in layer_types"):
        run(tmp_path / "bad", stack((models[0], 2, 4), (models[1], 0, 2)))


def test_every_setting_that_may_change_the_arithmetic_is_named(tmp_path):
    a, b = (str(llama(tmp_path / f"m{n}", n)) for n in range(2))
    file = Path(b) / "config.json"
    changes = {"attention_scale_of_mine": 3.0, "eos_token_id": 7, "transformers_version": "0", "auto_map": {"x": "y.z"}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    notes = merge(parse(json.dumps(linear(a, b))), tmp_path / "out").notes
    assert [note.split()[0] for note in notes] == ["attention_scale_of_mine", b]
    assert "code is never copied" in notes[1]
