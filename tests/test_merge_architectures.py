"""No kind of model needs a template: whatever transformers makes, at toy size, is merged by every method, stacked layer
by layer, and loads again."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from evomerge.formula import Formula, Step
from evomerge.model_builder import ModelBuilder
from merge.methods import METHODS
from merge.tensor_files import UserError
from tests.merging import run, weights

pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1},
    **{"eos_token_id": 2, "tie_word_embeddings": False},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    **{"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    **{"kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
    **{"num_key_value_heads": 4, "head_dim": 4, "first_k_dense_replace": 2},
}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
ALTERNATING = {"layer_types": ["linear_attention", "full_attention"] * 2}
SEEING = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"image_size": 16, "patch_size": 8, "num_channels": 3, "head_dim": 8},
}
# The class of its configuration, and what that is told beside SMALL.
KINDS = {
    "qwen3": ("Qwen3Config", {}),
    "qwen3-moe": ("Qwen3MoeConfig", EXPERTS),
    "qwen3.5": ("Qwen3_5TextConfig", {**LINEAR, **ALTERNATING}),
    "qwen3.5-moe": (
        "Qwen3_5MoeTextConfig",
        {**LINEAR, **ALTERNATING, **EXPERTS, "shared_expert_intermediate_size": 16},
    ),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "llama4": ("Llama4TextConfig", {"intermediate_size_mlp": 48, "num_local_experts": 4, "attention_chunk_size": 16}),
    "deepseek-v3": ("DeepseekV3Config", LATENT),
    "phi": ("PhiConfig", {}),
    "phi3": ("Phi3Config", {}),
    "olmo": ("OlmoConfig", {}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", {"sliding_window": 8}),
    "mistral": ("MistralConfig", {}),
    "ministral3": ("Ministral3Config", {}),
    "gpt-oss": ("GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
}
PICTURES = {
    "gemma3, with pictures": ("Gemma3Config", "Gemma3TextConfig", "SiglipVisionConfig"),
    "mistral3, with pictures": ("Mistral3Config", "MistralConfig", "PixtralVisionConfig"),
}
FAST = ["qwen3.5", "mistral3, with pictures"]


def config_of(kind: str):
    if kind in PICTURES:
        whole, text, vision = (getattr(transformers, name) for name in PICTURES[kind])
        return whole(
            text_config=text(**SMALL).to_dict(), vision_config=vision(**SEEING).to_dict(), image_token_index=63
        )
    name, told = KINDS[kind]
    return getattr(transformers, name)(**{**SMALL, **told})


def loader(kind: str):
    return AutoModelForImageTextToText if kind in PICTURES else AutoModelForCausalLM


def saved(kind: str, folder: Path, seed: int) -> str:
    torch.manual_seed(0)
    model = loader(kind).from_config(config_of(kind))
    torch.manual_seed(seed)
    with torch.no_grad():
        for each in model.parameters():
            each.add_(0.05 * torch.randn_like(each))
    model.save_pretrained(folder)
    return str(folder)


def loaded(kind: str, folder: Path) -> torch.Tensor:
    """What it says, if all of its tensors are where they belong."""
    model, report = loader(kind).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    with torch.no_grad():
        said = model.eval()(input_ids=torch.arange(3, 19)[None]).logits
    assert torch.isfinite(said).all()
    return said


def recipe(method: str, models: list[str]) -> dict:
    spec = METHODS[method]
    usual = {"weight": 0.4, "density": 0.6, "t": 0.3}
    head = {"base_model": models[0]} if spec.base != "none" else {}
    others = models[1:] if head else models
    told = {key: value for key, value in usual.items() if key in spec.params}
    return {"merge_method": method, **head, "models": others[: spec.most], "parameters": told}


ALL = [pytest.param(kind, marks=() if kind in FAST else pytest.mark.slow) for kind in (*KINDS, *PICTURES)]


@pytest.mark.parametrize("kind", ALL)
def test_all_methods_and_stacks(kind, tmp_path):
    if not hasattr(transformers, KINDS[kind][0] if kind in KINDS else PICTURES[kind][0]):
        pytest.skip(f"this transformers has no {kind}")
    models = [saved(kind, tmp_path / f"m{n}", n) for n in range(3)]
    before = [weights(Path(model)) for model in models]
    for method in METHODS:
        found = run(tmp_path / method, recipe(method, models))
        assert {name: each.shape for name, each in found.items()} == {
            name: each.shape for name, each in before[0].items()
        }
        assert all(torch.isfinite(each).all() for each in found.values()), method
        if method == "linear":
            for name, each in found.items():
                wanted = sum(model[name].double() for model in before) / 3
                assert torch.allclose(each.double(), wanted, atol=1e-6), name
    for method in ("linear", "ties", "passthrough"):
        loaded(kind, tmp_path / method)
    assert torch.equal(loaded(kind, tmp_path / "passthrough"), loaded(kind, Path(models[0])))
    layers(kind, models[:2], tmp_path)


@pytest.mark.parametrize("kind, lost", [("gpt-oss", False), ("gemma3", True), ("olmo2", True)])
def test_what_a_layer_adds_is_scaled_unless_a_norm_takes_that_out_again(kind, lost, tmp_path):
    model = saved(kind, tmp_path / "m", 1)
    scaled = {"merge_method": "passthrough", "models": [{"model": model, "parameters": {"residual": 0.25}}]}
    if lost:
        with pytest.raises(UserError, match="residual: in .* norms stand behind"):
            run(tmp_path / "out", scaled)
    else:
        found, before = run(tmp_path / "out", scaled), weights(Path(model))
        changed = {name.split(".", 3)[3] for name in found if torch.equal(found[name], before[name] / 4)}
        assert changed >= {"self_attn.o_proj.weight", "mlp.experts.down_proj", "mlp.experts.down_proj_bias"}
        assert not any(torch.equal(each, before[name]) for name, each in found.items() if "down_proj" in name)
    path = tuple(Step(model="m", layer=n, scale=0.5) for n in range(4))
    with ModelBuilder({"m": model}, "") as shop:
        shop.write(Formula(path=path, scaled=True), tmp_path / "path")
    assert torch.equal(loaded(kind, tmp_path / "path"), loaded(kind, Path(model))) == lost


def layers(kind: str, models: list[str], folder: Path) -> None:
    """The same layers one after the other are the model; and six of two models are a model, too."""
    cut = [{"sources": [{"model": models[0], "layer_range": [n, n + 2]}]} for n in (0, 2)]
    run(folder / "same", {"merge_method": "passthrough", "slices": cut})
    assert torch.equal(loaded(kind, folder / "same"), loaded(kind, Path(models[0])))
    more = {"sources": [{"model": models[1], "layer_range": [2, 4]}]}
    found = run(folder / "more", {"merge_method": "passthrough", "slices": [*cut, more]})
    assert not torch.equal(loaded(kind, folder / "more"), loaded(kind, Path(models[0])))
    config = json.loads((folder / "more" / "config.json").read_text())
    assert config.get("text_config", config)["num_hidden_layers"] == 6
    assert any(".5." in name for name in found) and not any(".layers.6." in name for name in found)
