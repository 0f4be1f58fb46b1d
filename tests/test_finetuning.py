"""Fine-tuning's building blocks: what is learned of a row, packing, objectives, adapters."""

import json
import math
import sys
from itertools import chain

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from fleet.run_config import UserError
from tests.small import MODEL, SHAPE, config
from train.adapters import adapted, merged
from train.chat import Example, examples, pairs
from train.loop import Learner
from train.model import built, flat, layout_of
from train.objectives import (
    Comparison,
    answer_logprobs,
    begun,
    dpo_loss,
    preference_loss,
    reward_margin,
    sft_loss,
    steps_of,
)
from train.packing import batch, can_pack, plan
from train.posttrain.posttrain_config import PosttrainConfig
from train.text_sources import placed, preference, read

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|begin|>", "<|head|>", "<|/head|>", "<|eot|>", "</s>"]
ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
HEAD = "{{ '<|im_start|>' + m['role'] + '\n' }}"
CHATML = "{% for m in messages %}" + HEAD + "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}" + ASK
ANSWER = "{% for m in messages %}" + HEAD + "{% if m['role'] == 'assistant' %}{% generation %}"
OUTSIDE = ANSWER + "{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}<|im_end|>{{ '\n' }}"
OUTSIDE += "{% endfor %}" + ASK
INSIDE = ANSWER + "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}"
INSIDE += "{% endif %}{{ '\n' }}{% endfor %}" + ASK
LLAMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<|head|>' + m['role'] + '<|/head|>\n\n' + m['content'] | trim + "
    "'<|eot|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
THOUGHTS = (
    "{% for m in messages %}" + HEAD + "{% if m['role'] == 'assistant' and not loop.last %}"
    "{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}<|im_end|>{{ '\n' }}"
    "{% endfor %}" + ASK
)
PLAIN = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def tokenizer(template=None, merges=(), trim=True):
    """Of bytes, of a few that are joined, and of special tokens; like GPT-2's it may leave spaces out of offsets."""
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    made = Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=list(merges)))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor, made.decoder = processors.ByteLevel(trim_offsets=trim), decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<|begin|>", eos_token="</s>", chat_template=template
    )


def said(*contents, first="user"):
    roles = {"user": ("user", "assistant"), "system": ("system", "user", "assistant")}[first]
    turns = roles if first == "user" else (*roles, *("user", "assistant") * 9)
    turns = turns * 9 if first == "user" else turns
    return {"messages": [{"role": role, "content": content} for role, content in zip(turns, contents, strict=False)]}


def pieces(tokens, *parts):
    """Tokens and mask of texts, of which every second is learned. Bytes are not joined, so parts may be tokenised."""
    found = [(token, n % 2 == 1) for n, part in enumerate(parts) for token in tokens.encode(part)]
    return [token for token, _ in found], [learned for _, learned in found]


def one(row, tokens, longest=1000):
    ((found,),) = examples(placed([row], "rows"), tokens, longest).kept
    return found.tokens.tolist(), found.learned.tolist()


# -- what is learned of a conversation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("trim", [True, False])
@pytest.mark.parametrize("template", [CHATML, OUTSIDE, INSIDE], ids=["chatml", "outside", "inside"])
def test_answers_and_their_ends_are_learned_and_nothing_else(template, trim):
    tokens = tokenizer(template, trim=trim)
    row = said("be brief", "1+1?", "2", "so\nwhat?", " \nnaïve 😀 \n", first="system")
    head = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    between = "\n<|im_start|>user\nso\nwhat?<|im_end|>\n<|im_start|>assistant\n"
    assert one(row, tokens) == pieces(tokens, head, "2<|im_end|>", between, " \nnaïve 😀 \n<|im_end|>", "\n")


@pytest.mark.parametrize("trim", [True, False])
def test_of_llamas_template_too(trim):
    tokens, row = tokenizer(LLAMA, trim=trim), said("hi", " yes ", "why?", "so")
    head = "<|begin|><|head|>user<|/head|>\n\nhi<|eot|><|head|>assistant<|/head|>\n\n"
    between = "<|head|>user<|/head|>\n\nwhy?<|eot|><|head|>assistant<|/head|>\n\n"
    assert one(row, tokens) == pieces(tokens, head, "yes<|eot|>", between, "so<|eot|>")


def test_a_conversation_may_end_with_a_question():
    tokens = tokenizer(CHATML)
    head, rest = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "\n<|im_start|>user\nwhy?<|im_end|>\n"
    assert one(said("hi", "yo", "why?"), tokens) == pieces(tokens, head, "yo<|im_end|>", rest)


def test_a_token_that_reaches_into_the_answer_is_learned():
    """The prompt ends with a space that the answer's first token swallows, as if it had been written at once."""
    tokens = tokenizer(PLAIN, merges=[("Ġ", "y"), ("Ġy", "e"), ("Ġye", "s")])
    found, learned = one(said("no", "yes"), tokens)
    assert found == tokens.encode("user: no</s>assistant: yes</s>")
    assert tokens.convert_ids_to_tokens(np.array(found)[learned]) == ["Ġyes", "</s>"]


def test_what_ends_an_answer_may_be_a_space_or_a_line():
    lines = PLAIN.replace("eos_token", "'\n\n'").replace("'assistant: '", "'assistant:'").replace("': '", "':'")
    tokens = tokenizer(lines, trim=False)
    assert one(said("a", "b", "c", "d"), tokens) == pieces(
        tokens, "user:a\n\nassistant:", "b\n\n", "user:c\n\nassistant:", "d\n\n"
    )
    marked = "{{ m['role'] + ':' }}{% generation %}{{ m['content'] }}{% endgeneration %}{{ '\n\n' }}{% endfor %}"
    tokens = tokenizer("{% for m in messages %}" + marked, trim=False)
    assert one(said("a", "b"), tokens) == pieces(tokens, "user:", "a\n\n", "assistant:", "b\n\n")
    ended = tokenizer(PLAIN.replace("eos_token", "' ' + eos_token + ' '"))
    assert one(said("a", "b"), ended) == pieces(ended, "user: a </s> assistant: ", "b </s>", " ")


def test_where_thoughts_are_forgotten_each_answer_is_an_example():
    tokens = tokenizer(THOUGHTS)
    row = said("a", "<think>x</think>b", "c", "<think>y</think>d")
    (first,), (second,) = examples(placed([row], "rows"), tokens, 1000).kept
    head = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    forgotten = f"{head}b<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    for found, parts in ((first, (head, "<think>x</think>b")), (second, (forgotten, "<think>y</think>d"))):
        wanted = pieces(tokens, parts[0], parts[1] + "<|im_end|>", "\n")
        assert (found.tokens.tolist(), found.learned.tolist()) == wanted
    assert len(examples(placed([said("a", "b", "c", "d")], "rows"), tokens, 1000).kept) == 1, "nothing to forget"


def test_a_default_system_prompt_is_not_in_the_way():
    default = "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nbe kind<|im_end|>\n' }}{% endif %}"
    tokens = tokenizer(default + CHATML)
    head = "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert one(said("a", "b"), tokens) == pieces(tokens, head, "b<|im_end|>", "\n")


def test_the_day_makes_no_difference():
    tokens = tokenizer("{{ 'Today: ' + strftime_now('%c') + '\n' }}" + CHATML)
    begin = tokens.encode("Today: 01 January 2025\n<|im_start|>user")
    assert one(said("a", "b"), tokens)[0][: len(begin)] == begin


@pytest.mark.parametrize(
    "template, row, seen",
    [
        (THOUGHTS.replace("assistant\n", "assistant\n<think>"), said("a", "b"), "chat template asks for .*<think>"),
        ("{{ messages[0]['content'] }}", said("a", "b"), "chat template does not write what the assistant says"),
        ("{{ raise_exception('only users here') }}", said("a", "b"), "cannot write this .*only users here"),
        ("{{ messages[0]['content'] + 1 }}", said("a", "b"), "chat template cannot write this"),
        (None, said("a", "b"), "no chat template"),
        (CHATML, {"messages": [{"role": "assistant", "content": "b"}]}, "an answer is expected after a question"),
    ],
)
def test_what_a_template_cannot_do_is_said_with_the_row(template, row, seen):
    with pytest.raises(UserError, match=rf"rows, row 2: .*{seen}.*the row is \{{") as caught:
        examples(placed([{"text": "fine"}, row], "rows"), tokenizer(template), 1000)
    assert "\n" not in str(caught.value)


def test_a_text_is_learned_to_its_end():
    tokens = tokenizer()
    found, learned = one({"text": "a text"}, tokens)
    assert found == tokens.encode("a text</s>") and learned == [False] + [True] * 6


def test_long_rows_are_cut_and_those_with_nothing_to_learn_left_out():
    tokens = tokenizer(CHATML)
    head = len(tokens.encode("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"))
    rows = [said("a", "b" * 50), said("a" * 100, "b"), said("a"), said("a", "b"), {"text": ""}, {"text": "ab" * 50}]
    made = examples(placed(rows, "rows"), tokens, head + 5)
    assert [int(each.learned.sum()) for (each,) in made.kept] == [5, 2, head + 4]
    assert [len(each.tokens) for (each,) in made.kept] == [head + 5, head + 3, head + 5]
    assert (made.cut, made.empty) == (3, 3)


# -- rows --------------------------------------------------------------------------------------------------------------

ROWS = [said("a", "b"), {"text": "c"}]


def test_rows_are_read_from_files_and_datasets(tmp_path):
    (tmp_path / "hub").mkdir()
    for file in (tmp_path / "a.jsonl", tmp_path / "hub" / "train.jsonl"):
        file.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    messages = [{**each, "name": None} for each in ROWS[0]["messages"]]
    table = [{"messages": messages, "text": None}, {"messages": None, "text": "c"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / "a.parquet")
    for place in ("a.jsonl", "a.parquet", "hub"):
        assert [row for _, row in read(str(tmp_path / place))] == ROWS, place


@pytest.mark.parametrize(
    "line, seen",
    [
        ('{"text": 3}', r'"text": "..."} is expected; the row is {"text": 3}'),
        ('{"prompt": "a"}', '"messages": .* is expected; the row is {"prompt"'),
        ('{"messages": []}', "is expected"),
        ('{"messages": [{"role": "user"}]}', "is expected"),
        ('{"messages": [{"role": "user", "content": ["a"]}]}', "is expected"),
        ('["text"]', "is expected"),
        ('{"text": "' + "x" * 500, 'no JSON: .*; the line is {"text": "x{190}$'),
    ],
)
def test_a_bad_row_is_shown_with_its_line(tmp_path, line, seen):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "fine"}}\n\n{line}\n')
    with pytest.raises(UserError, match=rf"a\.jsonl, line 3: .*{seen}"):
        [*read(str(tmp_path / "a.jsonl"))]


def test_files_that_cannot_be_read_and_datasets_that_are_none(tmp_path):
    (tmp_path / "a.parquet").write_text("no table")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "\xff"}\n')
    (tmp_path / "hub").mkdir()
    for place in ("a.parquet", "b.jsonl", "c.jsonl", "d.parquet", "hub"):
        with pytest.raises(UserError, match=f"{place}: (cannot be (read|loaded)|no UTF-8): "):
            [*read(str(tmp_path / place))]


# -- packing -----------------------------------------------------------------------------------------------------------


def of(kind, seed=2, **keys):
    gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 2}
    shape = gpt2 if kind == "gpt2" else {**SHAPE, "num_hidden_layers": 2}
    ends = {} if "pad_token_id" in keys else {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return built({"config": {"model_type": kind, **shape, **ends, **keys}}, 257, seed).eval()


def some_examples(sizes, seed=1):
    rng = np.random.default_rng(seed)
    made = [Example(rng.integers(0, 257, n).astype(np.int32), rng.random(n) < 0.5) for n in sizes]
    for each in made:
        each.learned[0], each.learned[-1] = False, True
    return made


def by_itself(model, example):
    """Its log-probability and number of learned tokens, as anybody would compute them."""
    tokens = torch.tensor(example.tokens, dtype=torch.long)
    said = model(input_ids=tokens[None]).logits[0].double().log_softmax(-1)
    places = [n for n, learned in enumerate(example.learned) if learned]
    return sum(float(said[n - 1, tokens[n]]) for n in places), len(places)


def test_examples_stand_in_the_first_row_with_room():
    assert plan([5, 6, 3, 2, 4, 8], 8) == [(0, 2), (1, 3), (4,), (5,)]
    assert plan([5, 6, 3], 8, packed=False) == [(0,), (1,), (2,)]
    sizes = np.random.default_rng(1).integers(1, 100, 500).tolist()
    rows = plan(sizes, 100)
    assert sorted(chain(*rows)) == [*range(500)] and all(sum(sizes[n] for n in row) <= 100 for row in rows)
    assert sum(sizes) / (100 * len(rows)) > 0.9
    with pytest.raises(UserError, match="example 1 has 9 tokens, and a row 8"):
        plan([1, 9], 8)


HEADS, WINDOW = {"num_key_value_heads": 1, "head_dim": 16}, {"sliding_window": 4}
PACKABLE = [
    ("llama", {}), ("gpt2", {}), ("qwen2", {"num_key_value_heads": 1}), ("mistral", HEADS | WINDOW),
    ("gemma", HEADS), ("gemma2", HEADS | WINDOW), ("mixtral", HEADS | {"num_local_experts": 4}),
]  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("kind, keys", PACKABLE)
def test_a_packed_loss_is_that_of_single_examples(kind, keys):
    model, given = of(kind, **keys), some_examples([7, 12, 1 + 1, 9, 5, 14])
    assert can_pack(model, 20)
    alone = [by_itself(model, each) for each in given]
    for rows in (plan([len(each.tokens) for each in given], 20), [[n] for n in range(6)]):
        packed = any(len(row) > 1 for row in rows)
        made = batch(given, rows, packed)
        assert answer_logprobs(model, made).tolist() == pytest.approx([nats for nats, _ in alone], rel=1e-5)
        mean = -sum(nats for nats, _ in alone) / sum(count for _, count in alone)
        assert float(sft_loss(model, made)) == pytest.approx(mean, rel=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind, keys", PACKABLE)
def test_an_example_has_no_effect_on_another(kind, keys):
    model, given = of(kind, **keys), some_examples([7, 12, 9, 5])
    rows = [(0, 1), (2, 3)]
    changed = [given[0], *some_examples([12], seed=5), *given[2:]]
    before, after = (answer_logprobs(model, batch(each, rows)) for each in (given, changed))
    assert torch.equal(before[[0, 2, 3]], after[[0, 2, 3]]) and before[1] != after[1]


@torch.no_grad()
@pytest.mark.parametrize(
    "kind, keys",
    [
        ("mamba", {"hidden_size": 32}),
        ("bloom", {"hidden_size": 32, "n_head": 2}),
        ("lfm2", {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 1}),
    ],
)
def test_models_that_remember_or_count_otherwise_are_not_packed(kind, keys):
    model = of(kind, **keys).train()
    assert not can_pack(model, 24) and model.training
    given = some_examples([7, 12])
    model.eval()
    found = answer_logprobs(model, batch(given, [[0], [1]], packed=False))
    assert found.tolist() == pytest.approx([by_itself(model, each)[0] for each in given], rel=1e-5)


def test_a_small_leak_and_other_positions_are_noticed():
    """In bf16 a leak may be smaller than rounding is elsewhere."""
    leaking = of("lfm2", layer_types=["conv", "full_attention"], num_key_value_heads=1).bfloat16()
    assert not can_pack(leaking, 24) and can_pack(of("llama").bfloat16(), 24)
    counting = of("llama")

    def count(model, asked, said):
        said.logits += torch.arange(said.logits.shape[1])[:, None]

    counting.register_forward_hook(count)
    assert not can_pack(counting, 24)
    assert can_pack(adapted(of("llama"), SMALL, 1), 24)


# -- objectives --------------------------------------------------------------------------------------------------------


def test_a_token_counts_the_same_in_whichever_part_of_a_step():
    given = some_examples([7, 12, 9, 15])
    whole, parts = [batch(given, [[0, 1], [2, 3]])], [batch(given, [[0]]), batch(given, [[1, 2], [3]])]
    learners = [Learner(built(MODEL, 257, 3), config(), objective=sft_loss) for _ in range(2)]
    for learner, step in zip(learners, (whole, parts), strict=True):
        [*learner.train([step], [1e-3])]
    assert learners[0].summed_loss() == pytest.approx(learners[1].summed_loss(), rel=1e-6)
    assert torch.allclose(learners[0].vectors["average"], learners[1].vectors["average"], atol=1e-8, rtol=1e-4)
    means = [float(learners[0].loss(part).detach()) for part in parts]
    assert abs(sum(means) / 2 - float(learners[0].loss(whole[0]).detach())) > 1e-4, "the test would notice"


def test_the_loss_of_preferences_is_its_formula():
    rng = torch.Generator().manual_seed(1)
    chosen, rejected, *before = (torch.randn(9, generator=rng, dtype=torch.float64) * 20 for _ in range(4))
    chosen.requires_grad_(), rejected.requires_grad_()
    found = dpo_loss(reward_margin(chosen, rejected, *before, 0.3))
    numbers = (each.tolist() for each in (chosen, rejected, *before))
    margins = [0.3 * ((c - a) - (r - b)) for c, r, a, b in zip(*numbers, strict=True)]
    assert found.tolist() == pytest.approx([math.log1p(math.exp(-each)) for each in margins], rel=1e-9)
    found.sum().backward()
    assert (chosen.grad < 0).all() and (rejected.grad > 0).all()
    equal = reward_margin(chosen, rejected, chosen, rejected, 0.3)
    assert dpo_loss(equal).tolist() == pytest.approx([math.log(2)] * 9)


def test_preferences_are_learned_and_parts_of_a_step_weigh_by_pairs():
    learner = Learner(built(MODEL, 257, 3), config(), objective=preference_loss)
    parts = []
    for seed, pairs_in_it in ((1, 1), (2, 3)):
        given = some_examples([8] * 2 * pairs_in_it, seed)
        made = batch(given, plan([8] * len(given), 24))
        with torch.no_grad():
            parts.append(Comparison(made, answer_logprobs(learner.model, made)))
    assert [part.count for part in parts] == [1, 3]
    [*learner.train([parts] * 15, [1e-2] * 15)]
    first = Learner(built(MODEL, 257, 3), config(), objective=preference_loss)
    [*first.train([parts], [1e-2])]
    assert first.summed_loss() == pytest.approx(math.log(2)) and learner.summed_loss() / 15 < 0.5
    moved = [answer_logprobs(learner.model, part.batch).detach() - part.reference for part in parts]
    margins = torch.cat([each[0::2] - each[1::2] for each in moved])
    assert (margins > 0).all()
    shares = [float(learner.loss(part, parts).detach()) for part in parts]
    assert sum(shares) == pytest.approx(float(-(0.1 * margins).sigmoid().log().mean()), rel=1e-5)


TOLD = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("template", [CHATML, OUTSIDE])
@pytest.mark.parametrize("prompt", ["a", TOLD])
@pytest.mark.parametrize("repeated", [None, [], TOLD])
def test_of_a_preference_only_the_answer_counts(template, prompt, repeated):
    tokens = tokenizer(template)
    answers = {"chosen": "good", "rejected": "bad"}
    if repeated is not None:
        answers = {which: [*repeated, {"role": "assistant", "content": text}] for which, text in answers.items()}
    ((chosen, rejected),) = pairs(placed([{"prompt": prompt, **answers}], "rows"), tokens, 1000).kept
    head = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    for found, text in ((chosen, "good"), (rejected, "bad")):
        assert (found.tokens.tolist(), found.learned.tolist()) == pieces(tokens, head, f"{text}<|im_end|>", "\n")


def begins(tokens):
    """As Llama's tokenizer: every text gets a first token."""
    begin = tokens.bos_token_id
    tokens.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{tokens.bos_token} $A", special_tokens=[(tokens.bos_token, begin)]
    )
    return tokens


def test_plain_pairs_and_completions_begin_as_texts_do():
    tokens = begins(tokenizer())
    row = {"prompt": "a b", "chosen": " c", "rejected": " d"}
    ((chosen, rejected),) = pairs(placed([row], "rows"), tokens, 1000).kept
    found = one({"prompt": "a b", "completion": " c"}, tokens)
    text, _ = one({"text": "a b c"}, tokens)
    assert chosen.tokens.tolist() == found[0] == text and text[0] == tokens.bos_token_id
    assert chosen.learned.tolist() == found[1] == [False] * 4 + [True] * 3
    assert rejected.tokens[0] == tokens.bos_token_id and rejected.tokens[-1] == tokens.eos_token_id


def test_a_completion_is_an_answer_where_there_is_a_template():
    tokens = tokenizer(CHATML)
    assert one({"prompt": "1+1?", "completion": "2"}, tokens) == one(said("1+1?", "2"), tokens)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_what_answers_are_compared_with_is_what_is_learned_from(precision):
    """In the same precision: before the first step all margins are 0, to the bit."""
    tokens = tokenizer()
    rows = [{"prompt": f"{n}", "chosen": " good", "rejected": " bad and worse"} for n in range(4)]
    made = [example for pair in pairs(placed(rows, "rows"), tokens, 1000).kept for example in pair]
    model = built({"config": {**MODEL["config"], "vocab_size": len(tokens)}}, 0, 3)
    learner = Learner(model, config(precision=precision), objective=preference_loss)
    c = PosttrainConfig(initial_population=("a/b",), mutation="dpo", mutation_datasets=("rows.jsonl",), batch_size=2)
    steps = begun(c, learner, steps_of(c, model, made))
    assert len(steps) == 2
    for (part,) in steps:
        said = answer_logprobs(learner.answer, part.to(learner.device).batch)
        assert torch.equal(said.detach().cpu(), part.reference)


def test_preferences_without_a_template_and_answers_before_the_last():
    tokens = tokenizer()
    ((_, rejected),) = pairs(placed([{"prompt": "a b", "chosen": " c", "rejected": " d"}], "rows"), tokens, 1000).kept
    assert (rejected.tokens.tolist(), rejected.learned.tolist()) == pieces(tokens, "a b", " d</s>")
    tokens = tokenizer(INSIDE)
    row = {"prompt": said("a", "b", "c")["messages"], "chosen": "d", "rejected": "e"}
    ((chosen, _),) = pairs(placed([row], "rows"), tokens, 1000).kept
    assert tokens.decode(chosen.tokens[chosen.learned]) == "d<|im_end|>"


@pytest.mark.parametrize("row", [{"prompt": "a", "chosen": "b"}, {"prompt": "a", "chosen": "b", "rejected": 3}, []])
def test_a_bad_preference_is_shown(row, tmp_path):
    with pytest.raises(UserError, match='rows, row 1: {"prompt": .*"rejected": .*, is expected; the row is'):
        pairs(placed([row], "rows"), tokenizer(CHATML), 99)
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match="line 1"):
        [*read(str(tmp_path / "a.jsonl"), check=preference)]
    with pytest.raises(UserError, match="one message of the assistant is expected after the prompt, not user"):
        pairs(
            placed([{"prompt": "a", "chosen": [{"role": "user", "content": "b"}], "rejected": "c"}], "rows"),
            tokenizer(CHATML),
            99,
        )


# -- adapters ----------------------------------------------------------------------------------------------------------

SMALL = {"r": 4, "alpha": 8, "targets": "all-linear"}


def trained(model, steps=10, **keys):
    """Its adapter, after it has learned."""
    learner = Learner(adapted(model, {**SMALL, **keys}, 7), config(weight_decay=0.0), objective=sft_loss)
    step = [batch(some_examples([9, 12, 8]), [[0, 1], [2]])]
    [*learner.train([step] * steps, [1e-2] * steps)]
    return learner, step


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_only_the_adapter_learns(kind):
    model = of(kind, tie_word_embeddings=True)
    before = {name: p.clone() for name, p in model.named_parameters()}
    learner, step = trained(model, 30)
    after = {name.replace(".base_layer", ""): p for name, p in model.named_parameters() if "lora_" not in name}
    assert after.keys() == before.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert learner.layout.shapes and all("lora_" in name for name in learner.layout.shapes)
    learner.model.eval()
    assert float(learner.loss(*step).detach()) < float(sft_loss(of(kind), *step).detach()) - 0.2


def test_an_adapter_follows_from_its_seed_and_begins_as_nothing():
    model, tokens = of("llama"), torch.arange(9)[None]
    made = [adapted(of("llama"), SMALL, seed) for seed in (1, 1, 2)]
    one, again, other = (flat(each, layout_of(each)) for each in made)
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert torch.equal(made[0](input_ids=tokens).logits, model(input_ids=tokens).logits)


@torch.no_grad()
@pytest.mark.parametrize("dtype, close", [(torch.float32, 1e-6), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_merged_is_the_same_as_applied(kind, dtype, close):
    model = of(kind, tie_word_embeddings=True).to(dtype)
    before, tokens = {name: p.clone() for name, p in model.named_parameters()}, torch.arange(30)[None]
    with torch.enable_grad():
        learner, _ = trained(model, 20)
    adapter = {name: p.double() for name, p in learner.model.named_parameters() if "lora_" in name}
    applied, plainly = learner.model.eval()(input_ids=tokens).logits, of(kind).to(dtype)(input_ids=tokens).logits
    found = merged(learner.model)
    said = found.eval()(input_ids=tokens).logits
    assert (said - applied).abs().max() <= close * applied.abs().max() < 0.2 * (said - plainly).abs().max()
    assert found.state_dict().keys() == of(kind, tie_word_embeddings=True).state_dict().keys()
    assert all(p.requires_grad and p.dtype == dtype for p in found.parameters()) and not hasattr(found, "peft_config")
    for name, p in found.named_parameters():
        exact, inside = before[name].double(), f"base_model.model.{name.removesuffix('.weight')}"
        if f"{inside}.lora_A.default.weight" not in adapter:
            assert torch.equal(p, before[name]) and not name.endswith("q_proj.weight"), name
            continue
        change = adapter[f"{inside}.lora_B.default.weight"] @ adapter[f"{inside}.lora_A.default.weight"] * 2
        exact = exact + (change.T if kind == "gpt2" else change)
        assert dtype == torch.float32 or (p == exact.to(dtype)).float().mean() > 0.999, "rounded once"
        assert torch.allclose(p.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-7)
    assert found.lm_head.weight is found.get_input_embeddings().weight


def test_an_adapter_is_put_into_another_copy():
    learner, step = trained(of("llama"))
    whole = merged(learner.model, of("llama"))
    assert float(sft_loss(whole, *step).detach()) == pytest.approx(float(learner.loss(*step).detach()), rel=1e-5)
    assert Learner(whole, config()).layout.size == layout_of(of("llama")).size


def test_rank_scale_and_targets_are_what_was_said():
    def named(**keys):
        return layout_of(adapted(of("llama"), {**SMALL, **keys}, 1)).shapes

    assert {shape[0] for name, shape in named(r=3).items() if "lora_A" in name} == {3}
    assert len(named()) == 2 * 2 * 7 and not any("lm_head" in name for name in named())
    few = named(targets=["q_proj", "mlp"])
    assert len(few) == 2 * 2 * 4 and all("q_proj" in name or "mlp" in name for name in few)
    one, two = (adapted(of("llama"), {**SMALL, "alpha": alpha}, 1) for alpha in (8, 16))
    for each in (one, two):
        for name, p in each.named_parameters():
            if "lora_B" in name:
                p.data.fill_(0.1)
    start = flat(of("llama"), layout_of(of("llama")))
    moved = [flat(m := merged(each), layout_of(m)) - start for each in (one, two)]
    assert torch.allclose(moved[0] * 2, moved[1], atol=1e-6) and moved[0].abs().max() > 0.01


@pytest.mark.parametrize(
    "keys, seen",
    [
        ({"targets": ["q_prj"]}, "no linear layer has 'q_prj' in its name; there are q_proj, k_proj"),
        ({"targets": ["lm_head"]}, "no linear layer has 'lm_head'"),
        ({"targets": "some"}, 'targets is "some"'),
        ({"rank": 3}, 'unknown key "rank"'),
        ({"r": 0}, "r is 0"),
        ({"four_bits": True}, "four_bits works on a CUDA device only, and this is cpu"),
    ],
)
def test_adapters_that_cannot_be(keys, seen):
    with pytest.raises(UserError, match=f"adapter: {seen}"):
        adapted(of("llama"), {**SMALL, **keys}, 1)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match="pip install peft"):
        adapted(of("llama"), SMALL, 1)
