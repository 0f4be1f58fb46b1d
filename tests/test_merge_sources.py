"""Models that are not plain folders: adapters and GGUF files."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from evomerge.config import ModelReference
from evomerge.utils import EvoMergeException, load_models
from merge.tensor_files import UserError
from tests.commands import answer
from tests.merging import SHAPE, assert_equal, copied, llama, run, says, tokenizer, weights

peft = pytest.importorskip("peft", reason="peft is not installed: merging adapters is not tested")
gguf = pytest.importorskip("gguf", reason="gguf is not installed: reading GGUF files is not tested")


# -- adapters ----------------------------------------------------------------------------------------------------------

ALL = ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"]
ADAPTERS = {
    "plain": {"target_modules": ["q_proj", "v_proj"], "r": 4, "lora_alpha": 16},
    "stabilized": {"target_modules": ALL, "r": 4, "lora_alpha": 8, "use_rslora": True},
    "patterns": {
        **{"target_modules": ALL, "r": 4, "lora_alpha": 8, "rank_pattern": {"q_proj": 2}},
        "alpha_pattern": {"layers.1.mlp.up_proj": 32, "k_proj": 4},
    },
    "embeddings": {"target_modules": ["embed_tokens", "q_proj"], "r": 4, "lora_alpha": 8},
    "saved whole": {"target_modules": ["q_proj"], "r": 2, "lora_alpha": 8, "modules_to_save": ["lm_head"]},
    "decomposed": {"target_modules": ALL, "r": 4, "lora_alpha": 8, "use_dora": True},
}


def adapter(model, folder: Path, **settings) -> dict[str, torch.Tensor]:
    """Save an adapter with random weights; what peft makes of it."""
    torch.manual_seed(7)
    made = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    made.save_pretrained(folder)
    return {name: each.clone() for name, each in made.merge_and_unload().state_dict().items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapter_is_merged_as_peft_merges_it(kind, tmp_path):
    model = llama(tmp_path / "model", 1)
    wanted = adapter(AutoModelForCausalLM.from_pretrained(model), tmp_path / "lora", **ADAPTERS[kind])
    found = run(tmp_path / "out", copied(f"{model}+{tmp_path / 'lora'}"))
    before = weights(model)
    assert found.keys() == before.keys()
    assert all(torch.allclose(found[name], wanted[name], atol=1e-5) for name in found)
    assert sum(not torch.equal(found[name], before[name]) for name in found) >= 4


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_alone_is_refused_with_the_command_that_merges_it(tmp_path):
    model, lora = llama(tmp_path / "model", 1), tmp_path / "my lora"
    wanted = adapter(AutoModelForCausalLM.from_pretrained(model), lora, **ADAPTERS["plain"])
    with pytest.raises(UserError) as refused:
        run(tmp_path / "out", copied(str(lora)))
    said, _, command = str(refused.value).partition("; merge it with: python ")
    assert said == f"{lora}: this is an adapter of {model}"
    with pytest.raises(EvoMergeException, match="this is an adapter of"):
        load_models([ModelReference("", str(lora))])
    assert answer(*shlex.split(command))[0] == 0
    found = weights(tmp_path / "my lora-merged")
    assert all(torch.allclose(found[name], wanted[name], atol=1e-5) for name in found)


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_of_weights_that_stand_the_other_way_round(tmp_path):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2))
    model.save_pretrained(tmp_path / "model")
    settings = {"target_modules": ["c_attn", "c_proj"], "r": 4, "fan_in_fan_out": True}
    wanted = adapter(model, tmp_path / "lora", **settings)
    found = run(tmp_path / "out", copied(f"{tmp_path / 'model'}+{tmp_path / 'lora'}"))
    assert "lm_head.weight" not in found and len(found) > 10
    assert all(torch.allclose(found[name], wanted[name], atol=1e-5) for name in found)


@pytest.mark.filterwarnings("ignore")
def test_adapters_that_do_not_fit(tmp_path):
    model, other = llama(tmp_path / "model", 1), llama(tmp_path / "other", 1, hidden_size=64)
    adapter(AutoModelForCausalLM.from_pretrained(other), tmp_path / "lora", **ADAPTERS["plain"])
    with pytest.raises(UserError, match=r"q_proj.*\[64, 64\].*\[32, 32\]"):
        run(tmp_path / "out", copied(f"{model}+{tmp_path / 'lora'}"))
    settings = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps({**settings, "peft_type": "IA3"}))
    with pytest.raises(UserError, match="IA3"):
        run(tmp_path / "out", copied(f"{model}+{tmp_path / 'lora'}"))
    (tmp_path / "lora" / "adapter_config.json").write_text("[1]")
    with pytest.raises(UserError, match="an object .*is expected"):
        run(tmp_path / "out", copied(f"{model}+{tmp_path / 'lora'}"))
    for said, why in (
        ({"lora_alpha": float("inf")}, "lora_alpha is 'inf'; a number"),
        ({"init_lora_weights": "pissa"}, "'pissa': .*path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4': it began as a part of the model"),
        ({"init_lora_weights": "OLoRA"}, "'OLoRA': it began as a part of the model"),
        ({"lora_alpha": "16"}, "lora_alpha is '16'; a number"),
        ({"lora_alpha": True}, "lora_alpha is 'True'; a number"),
        ({"alpha_pattern": [1]}, "an alpha_pattern of .* is expected"),
        ({"alpha_pattern": {"(": 1}}, "alpha_pattern: the pattern .* is not understood"),
    ):
        adapter(AutoModelForCausalLM.from_pretrained(model), tmp_path / "lora", **ADAPTERS["plain"])
        (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps({**settings, **said}))
        with pytest.raises(UserError, match=why):
            run(tmp_path / "out", copied(f"{model}+{tmp_path / 'lora'}"))
    good = adapter(AutoModelForCausalLM.from_pretrained(model), tmp_path / "good", **ADAPTERS["plain"])
    file = tmp_path / "good" / "adapter_model.safetensors"
    whole = weights(tmp_path / "good")
    for change, why in (
        ({"base_model.model.model.nothing.lora_A.weight": torch.ones(4, 32)}, "does not have"),
        ({"base_model.model.nothing.weight": torch.ones(4)}, "belongs to no tensor"),
        ({"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(4, 32)}, "a pair of matrices"),
    ):
        save_file({**whole, **change}, file)
        with pytest.raises(UserError, match=why):
            run(tmp_path / "out", copied(f"{model}+{tmp_path / 'good'}"))
    assert good


# -- GGUF --------------------------------------------------------------------------------------------------------------


def write_gguf(path: Path, model: Path, kind: str, quantized) -> None:
    """A file as llama.cpp's converter writes it, by the gguf package."""
    shape = {**SHAPE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    tokens = tokenizer(path.parent / "words", "the quick brown fox jumps over the lazy dog")
    writer = gguf.GGUFWriter(str(path), kind)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(shape["vocab_size"])
    file = json.loads((path.parent / "words" / "tokenizer.json").read_text())
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens + [f"<unused{n}>" for n in range(shape["vocab_size"] - len(tokens))])
    writer.add_token_types([1] * shape["vocab_size"])
    writer.add_token_merges([" ".join(merge) for merge in file["model"]["merges"]])
    writer.add_eos_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], 2)
    for name, tensor in weights(model).items():
        stem, _, suffix = name.rpartition(".")
        data = tensor.float().numpy()
        if kind == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = 4 if ".q_proj." in name else 2
            data = data.reshape(heads, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        sort = quantized if data.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", gguf.quantize(data, sort), raw_dtype=sort)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("sort", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_a_gguf_file_is_read_as_transformers_reads_it(sort, tmp_path):
    model = llama(tmp_path / "model", 1, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
    write_gguf(tmp_path / "m.gguf", model, "llama", gguf.GGMLQuantizationType[sort])
    out = tmp_path / "out"
    found = run(out, {**copied(str(tmp_path / "m.gguf")), "out_dtype": "float32"})
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in found)
    if sort == "F32":
        assert all(torch.equal(found[name], each) for name, each in weights(model).items())
    assert torch.isfinite(says(out)).all()
    text = "the quick brown fox"
    assert AutoTokenizer.from_pretrained(out).decode(AutoTokenizer.from_pretrained(out)(text)["input_ids"]) == text


def test_a_gguf_file_beside_a_folder(tmp_path):
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    a, b = llama(tmp_path / "a", 1, **shape), llama(tmp_path / "b", 2, **shape)
    write_gguf(tmp_path / "b.gguf", b, "llama", gguf.GGMLQuantizationType.F32)
    assert_equal(
        run(tmp_path / "1", copied(str(a), str(tmp_path / "b.gguf"))), run(tmp_path / "2", copied(str(a), str(b)))
    )


def test_a_gguf_file_of_another_kind(tmp_path):
    shape = {**SHAPE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**shape))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path / "model")
    write_gguf(tmp_path / "m.gguf", tmp_path / "model", "qwen2", gguf.GGMLQuantizationType.F32)
    assert_equal(run(tmp_path / "out", copied(str(tmp_path / "m.gguf"))), weights(tmp_path / "model"))
    other = llama(tmp_path / "llama", 1, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
    write_gguf(tmp_path / "other.gguf", other, "gemma2", gguf.GGMLQuantizationType.F32)
    with pytest.raises(UserError, match="other.gguf: GGUF files of the kind gemma2 cannot be read here"):
        run(tmp_path / "other", copied(str(tmp_path / "other.gguf")))


@pytest.mark.filterwarnings("ignore")
def test_a_gguf_file_by_any_path_and_with_an_adapter(tmp_path, monkeypatch):
    model = llama(tmp_path / "model", 1, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
    write_gguf(tmp_path / "m.gguf", model, "llama", gguf.GGMLQuantizationType.F32)
    wanted = adapter(AutoModelForCausalLM.from_pretrained(model), tmp_path / "lora", **ADAPTERS["plain"])
    monkeypatch.chdir(tmp_path)
    found = run(tmp_path / "out", copied("./m.gguf+./lora"))
    assert all(torch.allclose(found[name], wanted[name], atol=1e-5) for name in found)
    assert_equal(run(tmp_path / "plain", copied("./m.gguf")), weights(model))


@pytest.mark.parametrize("damage", ["cut", "garbage", "missing"])
def test_a_damaged_gguf_file(damage, tmp_path):
    model = llama(tmp_path / "model", 1, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
    path = tmp_path / "m.gguf"
    write_gguf(path, model, "llama", gguf.GGMLQuantizationType.F16)
    data = path.read_bytes()
    path.write_bytes({"cut": data[: len(data) // 2], "garbage": b"GGUF" + b"\xff" * 5000, "missing": b""}[damage])
    if damage == "missing":
        path.unlink()
    with pytest.raises(UserError, match=r"m\.gguf"):
        run(tmp_path / "out", copied(str(path)))
