"""Models that are not plain folders: adapters, GGUF files, other vocabularies; and chat templates."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from evomerge.config import ModelReference
from evomerge.utils import EvoMergeException, load_models
from merge.donors import Donors
from merge.merge_recipe import parse
from merge.merging import merge
from merge.tensor_files import UserError
from tests.commands import answer
from tests.merging import SHAPE, llama, run, says, tokenizer, weights

peft = pytest.importorskip("peft", reason="peft is not installed: merging adapters is not tested")
gguf = pytest.importorskip("gguf", reason="gguf is not installed: reading GGUF files is not tested")


def copied(*models: str) -> dict:
    """The model as it is; or the mean of several."""
    inputs = [{"model": model, "parameters": {"weight": 1.0}} for model in models]
    return {"merge_method": "linear", "models": inputs}


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


def assert_equal(one: dict, other: dict) -> None:
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


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


# -- vocabularies ------------------------------------------------------------------------------------------------------

TEXTS = ("aa ab abc abcd the then there", "xx xy xyz the then zebra zebras")


@pytest.fixture
def speakers(tmp_path) -> tuple[Path, Path]:
    """Two models whose tokenizers share some tokens, at different places; the second has one more row than tokens."""
    folders = []
    for n, (text, special) in enumerate(zip(TEXTS, (("</s>",), ("</s>", "<tool>")), strict=True)):
        folder = tmp_path / f"speaker{n}"
        words = tokenizer(folder, text, special, size=270 + n)
        llama(folder, n + 1, vocab_size=len(words) + n)
        folders.append(folder)
    return folders[0], folders[1]


def vocabulary(folder: Path) -> dict[str, int]:
    return AutoTokenizer.from_pretrained(folder).get_vocab()


def test_different_vocabularies_need_a_rule(speakers, tmp_path):
    with pytest.raises(UserError, match=r"has different shapes: \[2\d\d, 32\].*tokenizer_source"):
        run(tmp_path / "out", copied(*map(str, speakers)))


@pytest.mark.parametrize("source", ["base", "union", "second"])
def test_embeddings_follow_their_tokens(speakers, source, tmp_path):
    a, b = speakers
    recipe = {**copied(str(a), str(b)), "tokenizer_source": str(b) if source == "second" else source}
    found, out = run(tmp_path / "out", recipe), tmp_path / "out"
    one, other, made = vocabulary(a), vocabulary(b), vocabulary(out)
    assert made == {"base": one, "second": other}.get(source, made)
    if source == "union":
        assert made.keys() == one.keys() | other.keys() and all(made[token] == id for token, id in one.items())
    before = [weights(model) for model in speakers]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        for token, row in made.items():
            x = before[0][name][one[token]] if token in one else before[1][name][other[token]]
            y = before[1][name][other[token]] if token in other else x
            assert torch.allclose(found[name][row], (x + y) / 2, atol=1e-6), (name, token)
    size = found["lm_head.weight"].shape[0]
    assert json.loads((out / "config.json").read_text())["vocab_size"] == size
    assert size == {"base": len(one), "second": len(other) + 1}.get(source, len(made))
    assert torch.isfinite(says(out)).all()
    words = AutoTokenizer.from_pretrained(out)
    for text in TEXTS if source == "union" else TEXTS[:1]:
        assert words.decode(words(text)["input_ids"]) == text
    if source == "union":
        ids = set(words(TEXTS[1])["input_ids"])
        assert ids & {made[token] for token in other.keys() - one.keys()}  # what the base did not know is put to use
        assert words.convert_tokens_to_ids("<tool>") == made["<tool>"] and words("<tool>")["input_ids"] == [
            made["<tool>"]
        ]


def test_a_union_of_the_same_model_twice_and_of_a_base_that_is_not_merged(speakers, tmp_path):
    a, b = map(str, speakers)
    twice = run(tmp_path / "twice", {**copied(a, a, b), "tokenizer_source": "union"})
    once = run(tmp_path / "once", {**copied(a, b), "tokenizer_source": "union"})
    assert twice.keys() == once.keys() and twice["lm_head.weight"].shape == once["lm_head.weight"].shape
    rules = {"<tool>": {"source": a, "force": True}, "</s>": {"source": a, "force": True}}
    tokens = {"source": "union", "tokens": {"</s>": rules["</s>"]}}
    recipe = {"merge_method": "passthrough", "models": [b], "base_model": a, "tokenizer": tokens}
    found = run(tmp_path / "base", recipe)["lm_head.weight"]
    made = vocabulary(tmp_path / "base")
    assert torch.equal(found[made["</s>"]], weights(speakers[0])["lm_head.weight"][vocabulary(speakers[0])["</s>"]])
    only = next(iter(vocabulary(speakers[0]).keys() - vocabulary(speakers[1]).keys()))
    assert torch.equal(found[made[only]], weights(speakers[0])["lm_head.weight"][vocabulary(speakers[0])[only]])


def test_a_head_with_a_bias(tmp_path):
    models = []
    for n, text in enumerate(TEXTS):
        folder = tmp_path / f"m{n}"
        words = tokenizer(folder, text, size=270)
        torch.manual_seed(n)
        model = GPTJForCausalLM(
            GPTJConfig(vocab_size=len(words), n_positions=16, n_embd=16, n_layer=1, n_head=2, rotary_dim=4)
        )
        torch.nn.init.normal_(model.lm_head.bias)
        model.save_pretrained(folder)
        models.append(folder)
    found = run(tmp_path / "out", {**copied(*map(str, models)), "tokenizer_source": "union"})["lm_head.bias"]
    made, one, other = (vocabulary(folder) for folder in (tmp_path / "out", *models))
    a, b = (weights(folder)["lm_head.bias"] for folder in models)
    for token, row in made.items():
        x = a[one[token]] if token in one else b[other[token]]
        y = b[other[token]] if token in other else x
        assert torch.allclose(found[row], (x + y) / 2, atol=1e-6)


KINDS = {
    **{"mamba": {"state_size": 4}, "rwkv": {}, "modernbert": {}, "t5": {"d_model": 16, "d_kv": 8, "d_ff": 24}},
    **{"bart": {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1}, "albert": {"embedding_size": 16}},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_and_heads_of_every_kind_follow_their_tokens(kind, tmp_path):
    """Read under a tokenizer that counts its words from behind, each row of them lies the other way round."""
    said = {"hidden_size": 16, "num_hidden_layers": 2, "num_layers": 2, "num_attention_heads": 2, "n_layer": 1}
    said |= {"intermediate_size": 24, "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(kind, **{**said, "cls_token_id": 1, "sep_token_id": 2, **KINDS[kind]})
    known = next(auto for auto in (AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM)
                 if type(config) in auto._model_mapping)  # fmt: skip
    model, words = known.from_config(config), [f"t{n}" for n in range(64)]
    with torch.no_grad():
        for each in model.parameters():
            each.normal_()
    for name, listed in (("a", words), ("b", words[::-1])):
        model.save_pretrained(tmp_path / name)
        made = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {w: n for n, w in enumerate(listed)}}}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({**made, "added_tokens": []}))
    recipe = {"merge_method": "passthrough", "models": [str(tmp_path / "b")], "base_model": str(tmp_path / "a")}
    found, before = run(tmp_path / "out", {**recipe, "tokenizer_source": "base"}), weights(tmp_path / "b")
    turned = {name for name, each in found.items() if not torch.equal(each, before[name])}
    assert turned and turned == {name for name, each in before.items() if each.shape[0] == 64}
    assert all(torch.equal(found[name], before[name].flip(0)) for name in turned)


def test_a_tokenizer_for_embeddings_that_nobody_knows(speakers, tmp_path):
    renamed = {name.replace("embed_tokens", "table"): each for name, each in weights(speakers[0]).items()}
    save_file(renamed, speakers[0] / "model.safetensors")
    recipe = {"merge_method": "passthrough", "models": [str(speakers[0])], "tokenizer_source": "base"}
    with pytest.raises(UserError, match="no tensor of .* known as that of embeddings: .* without tokenizer_source"):
        run(tmp_path / "out", recipe)


def test_a_token_of_one_model_is_a_piece_of_words_of_another(speakers, tmp_path):
    """Each way round: the union's pairs may only speak of what is in its vocabulary."""
    a, b = speakers
    piece = next(token for token in vocabulary(b) if token not in vocabulary(a) and len(token) > 2)
    file = a / "tokenizer.json"
    said = json.loads(file.read_text())
    mark = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    said["added_tokens"].append({**mark, "id": len(vocabulary(a)), "content": piece})
    file.write_text(json.dumps(said))
    llama(a, 1, vocab_size=len(vocabulary(a)))
    for n, pair in enumerate(((a, b), (b, a))):
        out = tmp_path / f"out{n}"
        run(out, {**copied(*map(str, pair)), "tokenizer_source": "union"})
        words = AutoTokenizer.from_pretrained(out)
        assert words(f"{TEXTS[1]}{piece}")["input_ids"].count(vocabulary(out)[piece]) >= 1
        assert words.decode(words(TEXTS[1])["input_ids"]) == TEXTS[1]


def test_the_ids_of_special_tokens_follow_the_tokenizer(speakers, tmp_path):
    a, b = speakers
    for folder, eos in ((a, 0), (b, 1)):
        for name in ("config.json", "generation_config.json"):
            file = folder / name
            file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": eos}))
    for source, eos in ((a, 0), (b, 1)):
        out = tmp_path / f"out{eos}"
        run(out, {**copied(str(a), str(b)), "tokenizer_source": str(source)})
        found = [
            json.loads((out / name).read_text())["eos_token_id"] for name in ("config.json", "generation_config.json")
        ]
        assert found == [eos, eos]


def test_other_tokens_of_the_same_number_are_named(tmp_path):
    models = []
    for n, text in enumerate(TEXTS):
        words = tokenizer(tmp_path / f"m{n}", text, size=270)
        models.append(str(llama(tmp_path / f"m{n}", n, vocab_size=max(270, len(words)))))
    for recipe, count in ((copied(*models), 1), ({**copied(*models), "tokenizer_source": "union"}, 0)):
        notes = merge(parse(json.dumps(recipe)), tmp_path / f"out{count}").notes
        assert sum("has other tokens than" in note for note in notes) == count


def test_damaged_tokenizers(speakers, tmp_path):
    a, b = speakers
    said = json.loads((b / "tokenizer.json").read_text())
    for change in (
        {"vocab": {"x": "y"}},
        {"vocab": {"x": -1}},
        {"vocab": {"x": 1 << 40}},
        {"vocab": {}, "merges": []},
        {"vocab": 3},
        {"merges": ["ab"]},
        {"merges": [3]},
    ):
        added = [] if change.get("vocab") == {} else said["added_tokens"]
        changed = {**said, "added_tokens": added, "model": {**said["model"], **change}}
        (b / "tokenizer.json").write_text(json.dumps(changed))
        with pytest.raises(UserError, match=r"tokenizer\.json"):
            run(tmp_path / "out", {**copied(str(a), str(b)), "tokenizer_source": "union"})


def test_what_is_no_number_is_copied(tmp_path):
    model = llama(tmp_path / "a", 1)
    tensors = {**weights(model), "model.counts": torch.arange(5), "model.layers.0.rotary_emb.inv_freq": torch.ones(3)}
    tensors["model.empty.weight"] = torch.zeros(0, 4)
    save_file(tensors, model / "model.safetensors")
    found = run(tmp_path / "out", copied(str(model), str(model)))
    assert torch.equal(found["model.counts"], torch.arange(5)) and found["model.empty.weight"].shape == (0, 4)
    assert found.keys() == tensors.keys() - {"model.layers.0.rotary_emb.inv_freq"}


def test_tokenizers_that_have_no_union(speakers, tmp_path):
    file = speakers[1] / "tokenizer.json"
    said = json.loads(file.read_text())
    file.write_text(json.dumps({**said, "model": {"type": "Unigram", "vocab": [["x", -1.0], ["yy", -2.0]]}}))
    with pytest.raises(UserError, match="BPE and Unigram have no union"):
        run(tmp_path / "out", {**copied(*map(str, speakers)), "tokenizer_source": "union"})
    file.write_text("{}")
    with pytest.raises(UserError, match="vocabularies need a tokenizer.json"):
        run(tmp_path / "out", {**copied(*map(str, speakers)), "tokenizer_source": "union"})


def test_padded_vocabularies_stay_padded(tmp_path):
    models = []
    for n in (1, 2):
        words = tokenizer(tmp_path / f"m{n}", TEXTS[0], size=270)
        models.append(str(llama(tmp_path / f"m{n}", n, vocab_size=len(words) + 20)))
    plain = run(tmp_path / "plain", copied(*models))
    ruled = run(tmp_path / "ruled", {**copied(*models), "tokenizer_source": "union"})
    assert_equal(plain, ruled)
    recipe = {**copied(*models), "tokenizer": {"source": "base", "pad_to_multiple_of": 128}}
    wide = run(tmp_path / "wide", recipe)["lm_head.weight"]
    assert wide.shape[0] % 128 == 0 and torch.equal(wide[: len(plain["lm_head.weight"])], plain["lm_head.weight"])


def test_rules_for_tokens(speakers, tmp_path):
    a, b = map(str, speakers)
    rules = {
        "</s>": {"source": b, "force": True},
        "<new>": {"source": {"kind": "model_token", "model": b, "token": "<tool>"}},
        "<zero>": {"source": {"kind": "zero"}},
        "<tool>": {"source": {"kind": "model_token", "model": a, "token_id": 5}},
    }
    found = run(tmp_path / "out", {**copied(a, b), "tokenizer": {"source": "union", "tokens": rules}})
    made, one, other = vocabulary(tmp_path / "out"), vocabulary(speakers[0]), vocabulary(speakers[1])
    first, second, rows = (each["lm_head.weight"] for each in (weights(speakers[0]), weights(speakers[1]), found))
    assert torch.allclose(rows[made["</s>"]], second[other["</s>"]], atol=1e-6)
    assert torch.allclose(rows[made["<new>"]], second[other["<tool>"]], atol=1e-6)
    assert not rows[made["<zero>"]].any()
    assert torch.allclose(rows[made["<tool>"]], (first[5] + second[other["<tool>"]]) / 2, atol=1e-6)
    assert one.keys() < made.keys()


@pytest.mark.parametrize("rule, why", [
    ({"source": {"kind": "model_token", "model": "A", "token": "nowhere"}}, "no token 'nowhere'"),
    ({"source": {"kind": "model_token", "model": "A", "token_id": 10_000}}, "not number 10000"),
    ({"source": {"kind": "model_token", "model": "A", "token_id": 300}}, "has 2[0-9][0-9] embeddings, not number 300"),
    ({"source": "elsewhere"}, "not one of the models"),
    ({"source": {"kind": "zero", "model": "A"}}, "is expected"),
    ({"force": 3}, "true or false"),
])  # fmt: skip
def test_rules_that_cannot_be_followed(speakers, rule, why, tmp_path):
    text = json.dumps(rule).replace('"A"', json.dumps(str(speakers[0])))
    file = speakers[0] / "config.json"  # it may say what it likes
    file.write_text(json.dumps({**json.loads(file.read_text()), "vocab_size": 1000}))
    recipe = {**copied(*map(str, speakers)), "tokenizer": {"source": "base", "tokens": {"<x>": json.loads(text)}}}
    with pytest.raises(UserError, match=why):
        run(tmp_path / "out", recipe)


def test_the_tokenizer_comes_along(speakers, tmp_path):
    a = str(speakers[0])
    run(tmp_path / "out", copied(a, a))
    assert vocabulary(tmp_path / "out") == vocabulary(speakers[0])


# -- chat templates ----------------------------------------------------------------------------------------------------

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


@pytest.mark.parametrize("template, said", [
    ("chatml", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n"),
    ("alpaca", "### Instruction:\nhi\n\n### Response:\nho\n\n"),
    ("llama3", "<bos><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant"
     "<|end_header_id|>\n\nho<|eot_id|>"),
    ("mistral", "<bos>[INST] hi [/INST] ho</s>"),
    ("{% for m in messages %}[{{ m['content'] }}]{% endfor %}", "[hi][ho]"),
    ("auto", "B:hiB:ho"),
])  # fmt: skip
def test_chat_templates(speakers, template, said, tmp_path):
    models = [str(speakers[0])]
    for n, mark in enumerate("ABB"):
        folder = tmp_path / f"copy{n}"
        shutil.copytree(speakers[0], folder)
        (folder / "chat_template.jinja").write_text(
            f"{{% for m in messages %}}{mark}:{{{{ m['content'] }}}}{{% endfor %}}"
        )
        models.append(str(folder))
    run(tmp_path / "out", {**copied(*models), "chat_template": template})
    words = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert words.apply_chat_template(TALK, tokenize=False, bos_token="<bos>") == said


def test_an_unknown_chat_template(speakers, tmp_path):
    with pytest.raises(UserError, match="nearest known one is chatml"):
        run(tmp_path / "out", {**copied(str(speakers[0])), "chat_template": "chatlm"})


def test_files_are_closed_again(speakers):
    with Donors() as donors:
        tensor = next(iter(donors[str(speakers[0])].tensors.values()))
        tensor.read()
    with pytest.raises(OSError):
        tensor.read()
