"""What fine-tuning makes smaller: the loss of answers (SFT) and of preferences (DPO) are their formulas."""

import json
import math

import pytest
import torch
from tokenizers import processors

from fleet.run_config import UserError
from tests.chat_rows import CHATML, INSIDE, OUTSIDE, one, pieces, said, some_examples, tokenizer
from tests.small import MODEL, config
from train.chat_examples import pairs
from train.learner import Learner
from train.model import built
from train.objectives import (
    Comparison,
    answer_logprobs,
    dpo_loss,
    preference_loss,
    reward_margin,
    sft_loss,
    steps_of,
    with_first_logprobs,
)
from train.packing import batch, plan
from train.posttrain.posttrain_config import PosttrainConfig
from train.text_sources import placed, preference, read


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
    steps = with_first_logprobs(c, learner, steps_of(c, model, made))
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
