"""Models with other words than each other's, whose embeddings follow their tokens; and chat templates."""

import json
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
    GPTJConfig,
    GPTJForCausalLM,
)

from merge.donors import Donors
from merge.merge_recipe import parse
from merge.merging import merge
from merge.tensor_files import UserError
from tests.merging import assert_equal, copied, llama, run, says, tokenizer, weights

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
