"""The same rollouts through TRL, in an environment of its own: the same advantages, loss and gradients. Slow."""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.posttraining import model, tokenizer_of
from train.chat_examples import ChatWriter
from train.rl import answering, grpo
from train.rl.answering import Asking
from train.rl.checkers import checked_question, terms_of
from train.rl.grpo import Settings, grpo_loss
from train.rl.rollouts import Group, rewards_differ

ROOT = Path(__file__).parent.parent
PYTHON = ROOT / ".venv-trl" / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="NOT COMPARED: TRL is not here; `make trl` installs it beside"),
]
ANSWERS, WEIGHTS = 4, {"correct": 1.0, "brief": 0.3}
MOST = 1.05  # that a token counts of whoever else said it
CPU = torch.device("cpu")
NEAR = 1e-5


def loaded(place: Path):
    return AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()


def moved(policy: Path, folder: Path, seed: int) -> Path:
    """A model as it is after some steps."""
    found, rng = loaded(policy), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for each in found.parameters():
            each.add_(0.03 * torch.randn(each.shape, generator=rng))
    found.save_pretrained(folder)
    tokenizer_of(policy).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The policy; the same after steps, some of which go farther than clipping lets them; another slot's."""
    place = tmp_path_factory.mktemp("models")
    policy = model(place / "policy", 1)
    return {"policy": policy, "moved": moved(policy, place / "moved", 2), "other": moved(policy, place / "other", 3)}


def groups_of(place: Path, temperature: float) -> list[Group]:
    """What it says to some questions, judged by a checker; those groups of which something can be learned."""
    policy, words = loaded(place), tokenizer_of(place)
    writer, found = ChatWriter(words), []
    ends = (*answering.ends_of(words, policy.generation_config), *range(8, 60))  # it knows of no end: some are short
    how = Asking(temperature, 7, ends, 10_000)
    for n in range(12):
        row = checked_question({"prompt": "the cat " * (n % 3) + str(n), "answer": "[ao]", "checker": "regex"})
        prompt, seeds = writer.prompt(row["prompt"]), [answering.seed_of(n, k) for k in range(ANSWERS)]
        said = answering.answers(policy, words, [prompt] * ANSWERS, seeds, how)
        group = Group("a", "", prompt, said, [terms_of(row, each, 7) for each in said])
        if rewards_differ(group.rewards(WEIGHTS)):
            found.append(group)
    assert len(found) > 6 and len({len(each.tokens) for group in found for each in group.answers}) > 2
    return found


@dataclass(frozen=True)
class Case:
    said_by: str
    temperature: float
    kl: float
    by_spread: bool
    loss_type: str  # of TRL: which of its means over tokens

    def question(self, models, groups):
        said = [each for group in groups for each in group.answers]
        return {
            "policy": str(models["policy"]), "moved": str(models["moved"]), "answers": ANSWERS,
            "off_policy": self.said_by != "policy", "completion_ids": [each.tokens for each in said],
            "prompt_ids": [group.prompt for group in groups for _ in group.answers],
            "logprobs": [each.logprobs for each in said],
            "reward": [reward for group in groups for reward in group.rewards(WEIGHTS)],
            "settings": {
                "loss_type": self.loss_type, "epsilon": 0.2, "epsilon_high": 0.28, "beta": self.kl,
                "use_bias_correction_kl": False,  # as GRPO was published; theirs weighs it by the ratio by default
                "temperature": self.temperature, "scale_rewards": "group" if self.by_spread else "none",
                "importance_sampling_level": "token", "vllm_importance_sampling_mode": "token_truncate",
                "vllm_importance_sampling_clip_max": MOST,
            },
        }  # fmt: skip


CASES = {
    "as GRPO": Case("policy", 1.0, 0.0, True, "dapo"),
    "cooler, held near": Case("policy", 0.8, 0.05, True, "bnpo"),
    "not by spread": Case("policy", 1.0, 0.05, False, "dapo"),
    "of another slot": Case("other", 1.0, 0.0, True, "dapo"),
}


@pytest.fixture(scope="module")
def rollouts(models):
    return {name: groups_of(models[each.said_by], each.temperature) for name, each in CASES.items()}


@pytest.fixture(scope="module")
def theirs(models, rollouts, tmp_path_factory):
    """All in one process: it takes a while to start."""
    place = tmp_path_factory.mktemp("asked")
    for name, case in CASES.items():
        (place / name).mkdir()
        (place / name / "question.json").write_text(json.dumps(case.question(models, rollouts[name])))
    words = [str(PYTHON), str(Path(__file__).with_name("trl_peer.py")), *map(str, place.iterdir())]
    done = subprocess.run(words, cwd=place, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: load_file(place / name / "answer.safetensors") for name in CASES}


def ours(models, groups, case: Case):
    """In packed rows of some answers each, and in several parts of one step, as in a run."""
    policy, after = (loaded(models[name]) for name in ("policy", "moved"))
    lessons, s = grpo.lessons(groups, WEIGHTS, case.by_spread), Settings(0.2, 0.28, case.kl, MOST)
    (step,) = grpo.steps_of(lessons, True, 96, 8, 100, case.temperature, CPU)
    assert len(step) > 1
    step = [grpo.with_first_logprobs(policy, part, CPU) for part in step]
    loss = sum(grpo_loss(after, part, step, s=s) for part in step)
    loss.backward()
    advantages = torch.tensor([each.advantage for each in lessons])
    return {
        "loss": loss.detach(),
        "advantages": advantages,
        **{name: each.grad for name, each in after.named_parameters()},
    }


@pytest.mark.parametrize("name", CASES)
def test_trl_says_the_same_of_the_same_rollouts(models, rollouts, theirs, name):
    """Of the policy's own answers; or another's, whose tokens count as TRL lets those of vLLM count."""
    mine, other = ours(models, rollouts[name], CASES[name]), theirs[name]
    assert float(other.pop("clipped")) > 0.02, "some tokens are clipped"
    assert mine.keys() == other.keys() and abs(float(mine["loss"])) > 1e-3
    far = {key: float((each - other[key]).abs().max()) for key, each in mine.items()}
    largest = max(float(each.abs().max()) for key, each in mine.items() if "." in key)
    print(f"loss {float(mine['loss']):.6f}, {far['loss']:.1e} apart; gradients up to {largest:.2g}, "
          f"all within {max(far.values()):.1e}")  # fmt: skip
    assert max(far.values()) < NEAR and largest > 1e-2, far
