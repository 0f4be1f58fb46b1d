"""Rewards that can be verified: checkers, answers, the loss against a float64 reference, verifiers of one's own."""

import gzip
import json
import math
import sys
from datetime import datetime
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fleet.run_config import UserError
from tests.chat_rows import CHATML, OUTSIDE, tokenizer
from tests.small import MODEL, config
from train import packing
from train.chat_examples import ChatWriter
from train.learner import Learner
from train.member.posttraining_runtime import ends_in
from train.model import built
from train.posttrain.posttrain_sections import DatasetSource
from train.rl import answering, environments, grpo, rollouts
from train.rl.answering import Asking
from train.rl.checkers import Said, checked_question, terms_of, whole_question
from train.rl.grpo import Lesson, LessonBatch, Settings, grpo_loss, token_losses
from train.rl.rollouts import Group, Rollouts, advantages
from train.rl.verifier import Verifier


def said(text: str, ended: bool = True, tokens: int = 2) -> Said:
    return Said(text, [1] * tokens, [-1.0] * tokens, ended)


# -- checkers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "right", "wrong"), [
    ({"answer": "Paris"}, [" paris\n", "PARIS"], ["Paris, France", ""]),
    ({"answer": 12, "checker": "numeric"}, ["12", "12.0", "3 and 9 make 12", "1.2e1"], ["21", "no", "12 or 13", ""]),
    ({"answer": "1,200.5", "checker": "numeric"}, ["1200.5"], ["1200"]),
    ({"answer": "^b[aeiou]t$", "checker": "regex"}, ["bat", "bit"], ["bt", "a bat"]),
    ({"answer": "red", "checker": "choice", "choices": ["red", "blue"]}, ["red", "it is Red."],
     ["blue", "red or blue", "reddish", ""]),
    *(({"answer": "strongly agree", "checker": "choice", "choices": choices},
       ["strongly agree", "I Strongly  agree."], ["agree", "disagree", "strongly agree, or agree", "agree strongly"])
      for choices in (["agree", "strongly agree", "disagree"], ["Strongly agree", "agree", *["strongly agree"] * 2])),
    ({"answer": "agree", "checker": "choice", "choices": ["agree", "strongly agree"]},
     ["agree", "I agree", "agree, agree"], ["strongly agree", "I strongly agree"]),
    *(({"answer": answer, "checker": "choice", "choices": [answer, other]}, [answer, f"it is {answer}."],
       [other, f"{answer} {other}"])
      for both in (("0.5", "5"), ("-1", "1"), ("C", "C++")) for answer, other in (both, both[::-1])),
    ({"answer": "a b", "checker": "choice", "choices": ["a b", "b c"]}, ["a b"], ["a b c", "b c"]),
])  # fmt: skip
def test_an_answer_is_right_or_not(row, right, wrong):
    checked = checked_question({"prompt": "x", **row})
    assert [terms_of(checked, said(each), 8)["correct"] for each in right] == [1.0] * len(right)
    assert [terms_of(checked, said(each), 8)["correct"] for each in wrong] == [0.0] * len(wrong)


def test_terms_tell_of_the_form_and_of_the_length():
    row = checked_question({"prompt": "x", "answer": "red", "checker": "choice", "choices": ["red", "blue"]})
    assert terms_of(row, said("blue", tokens=2), 8) == {"correct": 0.0, "format": 1.0, "brief": 0.75}
    assert terms_of(row, said("red", ended=False), 8)["format"] == 0.0
    assert terms_of(row, said("it is red"), 8) == {"correct": 1.0, "format": 0.0, "brief": 0.75}


@pytest.mark.parametrize(("row", "why"), [
    ({"prompt": "x"}, '"answer": ...'), ({"answer": "x"}, '"prompt": ...'),
    ({"prompt": "x", "answer": "y", "checker": "nope"}, "no checker 'nope'; there are exact, numeric"),
    ({"prompt": "x", "answer": "y", "checker": "numeric"}, "no number"),
    ({"prompt": "x", "answer": "(", "checker": "regex"}, "is none"),
    ({"prompt": "x", "answer": "(a+)+$", "checker": "regex"}, "could take for ever"),
    ({"prompt": "x", "answer": "y", "checker": "choice", "choices": ["a"]}, '"choices" must be a list with the answer'),
])  # fmt: skip
def test_a_question_that_cannot_be_judged_is_refused(row, why):
    with pytest.raises(UserError, match=why.replace("(", r"\(").replace(")", r"\)").replace("+", r"\+")):
        checked_question(row)


def test_a_verifier_is_shown_the_whole_row():
    row = {"prompt": "x", "answer": 4, "tests": ["f(1) == 2"], "checker": None, "made": datetime(2026, 1, 1), "at": {}}
    assert whole_question(row) == {
        "prompt": "x", "answer": "4", "checker": "exact", "tests": ["f(1) == 2"], "at": {}
    }  # fmt: skip
    assert {*checked_question(row)} == {"prompt", "answer", "checker"}


def test_nobody_ever_learns_from_a_skills_held_out_questions():
    found = environments.questions_of(DatasetSource(source="skill:kinds"), 3, 200, 0.5)
    sides = {part: {row["prompt"] for row, its in zip(found.rows, found.parts, strict=True) if its == part}
             for part in ("train", "validation", "test")}  # fmt: skip
    assert all(sides.values()) and len(found.rows) == 200
    assert not sides["validation"] & sides["test"] and not sides["train"] & (sides["validation"] | sides["test"])
    from train.skills import rows

    learned = {row["messages"][0]["content"] for row in rows("skill:kinds", 1, 3000)}
    assert not learned & (sides["validation"] | sides["test"])


def questions_in(file, prompts) -> environments.Questions:
    """200 of a file's."""
    file.write_text("".join(json.dumps({"prompt": each, "answer": "x"}) + "\n" for each in prompts))
    return environments.questions_of(DatasetSource(source=str(file)), 3, 200, 0.5)


def test_questions_come_from_anywhere_in_a_file(tmp_path):
    found = questions_in(tmp_path / "both.jsonl", [f"{what} {n}" for what in ("first", "then") for n in range(300)])
    asked = [row["prompt"].split()[0] for row in found.rows]
    assert len(asked) == 200 and 0.35 < asked.count("first") / 200 < 0.65


@pytest.mark.parametrize("shots", [1, 3])
def test_examples_before_a_question_do_not_decide_which_it_is_for(tmp_path, shots):
    def prompt(n: int) -> list[dict[str, str]]:
        said = (("user", f"shot {n % shots}"), ("assistant", "yes"), ("user", f"question {n // 2}"))
        return [{"role": role, "content": content} for role, content in said]

    found = questions_in(tmp_path / "shots.jsonl", [prompt(n // 2 * 2) for n in range(200)])
    assert found.parts.count("train") > 150 and {*found.parts} == {"train", "validation", "test"}
    sides = {(row["prompt"][2]["content"], part) for row, part in zip(found.rows, found.parts, strict=True)}
    assert len(sides) == 100, "one that is asked twice lies on one side"


def test_a_generator_of_reasoning_gym_asks_and_judges():
    pytest.importorskip("reasoning_gym", reason="pip install -r requirements-rl.txt")
    source = DatasetSource(source="gym:chain_sum", options={"max_terms": 3})
    found, again = (environments.questions_of(source, 5, 40, 0.5) for _ in range(2))
    assert found == again and len(found.rows) == 40 and {*found.parts} == {"train", "validation", "test"}
    for row in found.rows[:5]:
        right, wrong = (environments.reward_terms(source, 5, row, said(text), 8) for text in (row["answer"], "no"))
        assert right["correct"] == 1.0 and wrong["correct"] < 0.5
    with pytest.raises(UserError, match="gym:chain_sum: reasoning-gym cannot make it"):
        environments.questions_of(DatasetSource(source="gym:chain_sum", options={"nope": 3}), 5, 40, 0.5)


def test_what_a_generator_is_asked_for_may_be_a_list():
    pytest.importorskip("reasoning_gym", reason="pip install -r requirements-rl.txt")
    source = DatasetSource(source="gym:basic_arithmetic", options={"operators": ["+", "-"], "min_terms": 2})
    row, *rest = environments.questions_of(source, 5, 40, 0.5).rows
    assert environments.reward_terms(source, 5, row, said(row["answer"]), 8)["correct"] == 1.0
    assert not any("*" in each["prompt"] for each in (row, *rest))


def test_a_generator_needs_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    environments._generator.cache_clear()
    with pytest.raises(UserError, match="gym:leg_counting needs the package reasoning-gym"):
        environments.questions_of(DatasetSource(source="gym:leg_counting"), 5, 40, 0.5)


# -- answers -----------------------------------------------------------------------------------------------------------


def asking(temperature: float = 1.0, longest: int = 5) -> Asking:
    return Asking(temperature, longest, (6,), 10_000)


def small(seed: int = 3):
    return built(MODEL, 257 + 6, seed).eval()


def test_draws_follow_the_probabilities():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    seeds = torch.arange(40_000, dtype=torch.int64) * 7919
    drawn = (torch.log_softmax(logits, -1) + answering.gumbel(seeds, 3, 4)).argmax(-1)
    shares = torch.bincount(drawn, minlength=4) / len(drawn)
    assert torch.allclose(shares, torch.softmax(logits, -1), atol=0.01)
    again = (torch.log_softmax(logits, -1) + answering.gumbel(seeds, 4, 4)).argmax(-1)
    same = float((drawn == again).float().mean())
    assert same == pytest.approx(float((torch.softmax(logits, -1) ** 2).sum()), abs=0.01), "steps are independent"


def test_an_answer_does_not_depend_on_who_else_is_in_its_batch():
    model, words = small(), tokenizer(CHATML)
    prompts = [[10, 20, 30], [40, 50, 60, 70, 80], [90], [100, 101]]
    seeds = [answering.seed_of(1, 2, 3, n) for n in range(4)]
    together = answering.answers(model, words, prompts, seeds, asking())
    alone = [answering.answers(model, words, [p], [s], asking())[0] for p, s in zip(prompts, seeds, strict=True)]
    assert [each.tokens for each in together] == [each.tokens for each in alone]
    other = answering.answers(model, words, prompts, [s + 1 for s in seeds], asking())
    assert [each.tokens for each in other] != [each.tokens for each in alone]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_of_the_whole_text(temperature):
    """With a cache and filling on the left, or at once."""
    model, words = small(), tokenizer(CHATML)
    prompts = [[10, 20, 30], [40, 50, 60, 70, 80]]
    for prompt, each in zip(
        prompts, answering.answers(model, words, prompts, [1, 2], asking(temperature)), strict=True
    ):
        tokens = torch.tensor([[*prompt, *each.tokens]])
        logprobs = torch.log_softmax(model(tokens).logits[0] / temperature, -1)
        wanted = [float(logprobs[len(prompt) - 1 + n, token].detach()) for n, token in enumerate(each.tokens)]
        assert each.logprobs == pytest.approx(wanted, abs=1e-4)


def test_an_answer_ends_at_its_end_token_and_the_likeliest_one_needs_no_draw():
    model, words = small(), tokenizer(CHATML)
    first = answering.answers(model, words, [[10, 20]], [1], asking(0.0, 6))[0]
    assert len(first.tokens) == 6 and not first.ended
    how = Asking(0.0, 6, (first.tokens[2],), 100)
    cut = answering.answers(model, words, [[10, 20]], [9], how)[0]
    assert cut.tokens == first.tokens[: first.tokens.index(first.tokens[2]) + 1] and cut.ended


def test_batches_have_room_for_questions_and_answers():
    prompts = [[1] * n for n in (3, 4, 50, 2, 2)]
    found = [*answering.batches(prompts, Asking(1.0, 6, (6,), 30))]
    assert [*map(list, found)] == [[0, 1], [2], [3, 4]]


def test_a_tokenizer_without_an_end_token_is_refused():
    words = tokenizer()
    words.eos_token = None
    with pytest.raises(UserError, match="no end token"):
        answering.ends_of(words, SimpleNamespace(eos_token_id=None))


@pytest.mark.parametrize(("template", "file", "ends"), [
    (None, {}, (6, 9)), (None, {"eos_token_id": [6, 5]}, (6, 9, 5)), (None, {"eos_token_id": 7}, (6, 9, 7)),
    (CHATML, {}, (6, 9, 1)), (OUTSIDE, {}, (6, 9, 1)),
    ("{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}", {}, (6, 9)),  # many an answer has lines
    ("{% for m in messages %}{{ m['content'] + 'over' }}{% endfor %}", {}, (6, 9)),
    ("{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}", {}, (6, 9)),
])  # fmt: skip
def test_an_answer_ends_where_any_of_a_models_files_says(tmp_path, template, file, ends):
    if file:
        (tmp_path / "generation_config.json").write_text(json.dumps(file))
    assert answering.ends_of(tokenizer(template), SimpleNamespace(eos_token_id=[9, 6]), ends_in(tmp_path)) == ends


def test_a_prompt_is_what_stands_before_the_answer():
    for template in (CHATML, None):
        writer = ChatWriter(tokenizer(template))
        whole = writer.answer("what?", "that").tokens.tolist()
        prompt = writer.prompt("what?")
        assert whole[: len(prompt)] == prompt and len(prompt) < len(whole)


# -- rollouts ----------------------------------------------------------------------------------------------------------


def group(rewards: list[float], source: str = "a") -> Group:
    answers = [said(f"answer {n}") for n in range(len(rewards))]
    return Group(source, "what?", [5, 6, 7], answers, [{"correct": each, "format": 1.0} for each in rewards])


def test_rollouts_are_the_same_bytes_again():
    found = Rollouts(0.9, (group([1.0, 0.0]), group([0.5, 0.5], "b")))
    data = rollouts.packed(found)
    assert data == rollouts.packed(rollouts.unpacked(data)) and rollouts.unpacked(data).groups[1].source == "b"
    assert json.loads(gzip.decompress(data))["temperature"] == 0.9


def test_advantages_are_their_formula():
    rewards = [1.0, 0.0, 0.25, 0.5]
    mean, spread = np.mean(rewards), np.std(rewards, ddof=1)
    assert advantages(rewards) == pytest.approx([(x - mean) / (spread + 1e-4) for x in rewards])
    assert advantages(rewards, by_spread=False) == pytest.approx([x - mean for x in rewards])


def test_the_most_instructive_groups_are_those_that_differ_most():
    groups = [group([1.0, 1.0]), group([1.0, 0.9]), group([1.0, 0.0]), group([0.0, 0.0]), group([0.0, 1.0])]
    found = rollouts.most_instructive(groups, {"correct": 1.0, "format": 0.0}, 3)
    assert [groups.index(each) for each in found] == [2, 4, 1]
    assert len(rollouts.most_instructive(groups, {"correct": 1.0}, 9)) == 3, "nothing can be learned from the others"
    assert not rollouts.most_instructive(groups, {"correct": 0.0, "format": 1.0}, 9)


def test_what_is_told_of_rollouts():
    found = rollouts.metrics_of(
        Rollouts(1.0, [group([1.0, 0.0]), group([1.0, 1.0], "b")]), {"correct": 3.0, "format": 1.0}
    )
    assert found["reward"] == pytest.approx((0.75 * 3 + 1) / 4) and found["silent"] == 0.5
    assert found["reward/a/correct"] == 0.5 and found["reward/b/correct"] == 1.0 and found["generated"] == 8
    with pytest.raises(UserError, match="rewards has 'tidy', but an answer is told correct, format"):
        rollouts.metrics_of(Rollouts(1.0, [group([1.0, 0.0])]), {"tidy": 1.0})
    shown = rollouts.samples(Rollouts(1.0, [group([1.0, 0.0])]), {"correct": 1.0}, 1)
    assert shown["best"][0]["correct"] == 1.0 and shown["worst"][0]["reward"] == 0.0


# -- the loss ----------------------------------------------------------------------------------------------------------

SETTINGS = Settings(clip_low=0.2, clip_high=0.28, kl=0.05, truncation=1.5)


def reference(logprobs, begun, behaviour, advantage, s: Settings) -> tuple[list[float], list[float]]:
    """Of each token, in Python's doubles: its loss, and how that changes with the log-probability."""
    losses, slopes = [], []
    for new, old, said, gain in zip(logprobs, begun, behaviour, advantage, strict=True):
        ratio, weight = math.exp(new - old), min(s.truncation, math.exp(old - said))
        clipped = min(max(ratio, 1 - s.clip_low), 1 + s.clip_high)
        kept = ratio * gain <= clipped * gain
        away = math.exp(old - new) - (old - new) - 1
        losses.append(-weight * ((ratio if kept else clipped) * gain - s.kl * away))
        slopes.append(-weight * ((ratio * gain if kept else 0.0) - s.kl * (1 - math.exp(old - new))))
    return losses, slopes


def test_losses_and_their_gradients_are_those_of_a_float64_reference():
    rng = torch.Generator().manual_seed(5)
    new, old, said, gain = (torch.randn(500, generator=rng, dtype=torch.float64) for _ in range(4))
    old, said = new + old * 0.3, new + said * 0.5
    new = new.requires_grad_()
    part = LessonBatch(None, gain, said, old, 1.0)  # type: ignore[arg-type]
    losses = token_losses(new, part, SETTINGS)
    losses.sum().backward()
    wanted, slopes = reference(new.tolist(), old.tolist(), said.tolist(), gain.tolist(), SETTINGS)
    assert losses.tolist() == pytest.approx(wanted, rel=1e-12, abs=1e-14)
    assert new.grad.tolist() == pytest.approx(slopes, rel=1e-9, abs=1e-12)
    outside = [abs(x) < 1e-12 for x in slopes]
    assert not any(outside) and 50 < sum(
        math.exp(n - o) > 1.28 for n, o in zip(new.tolist(), old.tolist(), strict=True)
    )


def lessons(count: int = 9) -> list[Lesson]:
    rng = np.random.default_rng(4)
    groups = []
    for _ in range(count // 3):
        answers = [
            Said("", rng.integers(8, 250, size).tolist(), (-rng.random(size)).tolist(), True) for size in (2, 4, 3)
        ]
        terms = [{"correct": each} for each in (1.0, 0.0, 0.5)]
        groups.append(Group("a", "", rng.integers(8, 250, 5).tolist(), answers, terms))
    return grpo.lessons(groups, {"correct": 1.0}, True)


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_the_loss_of_a_model_is_the_mean_over_its_answers_tokens(temperature):
    """Packed or not, in whichever parts, and as an ordinary forward pass of each text says."""
    model, some = small(), lessons()
    device, wanted, count = torch.device("cpu"), 0.0, 0
    for each in some:
        tokens = torch.tensor(each.tokens, dtype=torch.int64)
        logprobs = torch.log_softmax(model(tokens[None]).logits[0].double() / temperature, -1)
        begin = int(each.example.learned.argmax())
        mine = [float(logprobs[n - 1, tokens[n]].detach()) for n in range(begin, len(tokens))]
        said, gain = [x + 0.1 for x in each.logprobs], [each.advantage] * len(mine)
        found, _ = reference(mine, [x - 0.05 for x in mine], said, gain, SETTINGS)
        wanted, count = wanted + sum(found), count + len(mine)
    shifted = [Lesson(e.example, e.advantage, [x + 0.1 for x in e.logprobs]) for e in some]
    for packed, rows, parts in ((True, 2, 1), (False, 3, 2), (False, 16, 1)):
        total = 0.0
        for step in grpo.steps_of(shifted, packed, 32, rows, parts, temperature, device):
            step = [grpo.with_first_logprobs(model, part, device) for part in step]
            step = [LessonBatch(p.batch, p.advantage, p.behaviour, p.first - 0.05, p.temperature) for p in step]
            share = sum(part.count for part in step) / count
            total += share * sum(float(grpo_loss(model, part, step, s=SETTINGS).detach()) for part in step)
        assert total == pytest.approx(wanted / count, rel=2e-5), (packed, rows, parts)


def test_better_answers_become_likelier():
    """And a step with a rate of 0 begins at a ratio of 1, where the loss is minus the mean advantage."""
    some, device = lessons(), torch.device("cpu")
    learner = Learner(built(MODEL, 263, 3), config(), device, lambda m, p, step: grpo_loss(m, p, step, s=SETTINGS))

    def likely() -> tuple[float, float]:
        learner.model.eval()
        sums = {True: 0.0, False: 0.0}
        for each in some:
            batch = packing.single([each.example])
            part = grpo.with_first_logprobs(learner.answer, grpo.batch_of(batch, [each], 1.0), device)
            if each.advantage:
                sums[each.advantage > 0.1] += float(part.first.sum())
        return sums[True], sums[False]

    before = likely()
    for _ in range(8):
        steps = [[grpo.with_first_logprobs(learner.answer, part, device) for part in step]
                 for step in grpo.steps_of(some, True, 48, 4, 1, 1.0, device)]  # fmt: skip
        [*learner.train(steps, [3e-3] * len(steps))]
    after = likely()
    assert after[0] - after[1] > before[0] - before[1] + 1.0


# -- verifiers of one's own --------------------------------------------------------------------------------------------

ROW = {"prompt": "what?", "answer": "that"}


def verifier(tmp_path, body: str, seconds: float = 5.0) -> Verifier:
    file = tmp_path / "mine.py"
    file.write_text(f"import os, time\n\n\ndef reward(prompt, answer, row):\n    {body}\n")
    return Verifier(str(file), seconds)


def test_a_verifier_is_asked_in_a_process_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    body = "print('noise'); return {'right': answer == row['answer'], 'secret': 'AWS_SECRET_ACCESS_KEY' in os.environ}"
    with verifier(tmp_path, body) as mine:
        assert mine.terms(ROW, "that") == {"right": 1.0, "secret": 0.0}
        assert mine.terms(ROW, "this") == {"right": 0.0, "secret": 0.0}


@pytest.mark.parametrize(("body", "why"), [
    ("raise ValueError('no idea')", "ValueError: no idea; the answer was 'x'"),
    ("return {'right': float('nan')}", "its term 'right' is nan, not from 0 to 1"),
    ("return {'right': 2}", "its term 'right' is 2.0, not from 0 to 1"),
    ("return 3", "TypeError: 'int' object is not iterable"),
    ("os._exit(1)", "its process ended"),
])  # fmt: skip
def test_what_a_verifier_can_do_wrong_is_said_in_a_line(tmp_path, body, why):
    with verifier(tmp_path, body) as mine, pytest.raises(UserError, match=why) as error:
        mine.terms(ROW, "x")
    assert "\n" not in str(error.value)


def test_a_verifier_that_hangs_is_ended(tmp_path):
    with verifier(tmp_path, "time.sleep(600 * (answer == 'x')); return {'right': 1}", 0.3) as mine:
        assert mine.terms(ROW, "y") == {"right": 1.0}
        with pytest.raises(UserError, match="no answer within 0.3 seconds"):
            mine.terms(ROW, "x")
    assert mine._process.returncode is not None
