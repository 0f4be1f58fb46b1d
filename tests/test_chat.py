"""From rows to examples: which tokens of a conversation are learned, and what is wrong with a row."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from fleet.run_config import UserError
from tests.chat_rows import ASK, CHATML, HEAD, INSIDE, OUTSIDE, one, pieces, said, tokenizer
from train.chat_examples import examples
from train.text_sources import placed, read

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
