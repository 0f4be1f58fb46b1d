"""What TRL's GRPOTrainer makes of rollouts: runs in an environment of its own, asked by tests/test_rl_trl.py.

python trl_peer.py FOLDER...

In each is a question.json, and answer.safetensors is written. The policy scores the answers; then it has the weights of
`moved`, as after some steps, and the loss is computed.
"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def trainer_of(asked, place):
    """Of one batch with all answers, which it may learn from twice, so that a ratio is to be computed."""
    count = len(asked["completion_ids"])
    args = GRPOConfig(
        output_dir=str(place / "trl"),
        per_device_train_batch_size=count,
        num_generations=asked["answers"],
        num_iterations=2,
        max_completion_length=max(map(len, asked["completion_ids"])),
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_dropout=True,
        **asked["settings"],
    )

    def rollouts(prompts, trainer):
        return {key: asked[key] for key in ("prompt_ids", "completion_ids", "logprobs", "reward")}

    def told(completions, reward, **_):
        return reward

    return GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(asked["policy"], dtype=torch.float32),
        told,
        args,
        Dataset.from_list([{"prompt": ""}] * count),
        processing_class=AutoTokenizer.from_pretrained(asked["policy"]),
        rollout_func=rollouts,
    )


def answered(place):
    asked = json.loads((place / "question.json").read_text())
    trainer = trainer_of(asked, place)
    model = trainer.model.train()
    if asked["off_policy"]:  # as with rollouts by vLLM, which another one gives here
        trainer.use_vllm, trainer._last_loaded_step = True, trainer.state.global_step
    inputs = trainer._generate_and_score_completions([{"prompt": ""} for _ in asked["completion_ids"]])
    model.load_state_dict(load_file(Path(asked["moved"]) / "model.safetensors"), strict=False)
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer.compute_loss(model, inputs)
    loss.backward()
    clipped = trainer._metrics["train"]["clip_ratio/region_mean"][-1]
    more = {"loss": loss.detach(), "advantages": inputs["advantages"], "clipped": torch.tensor(clipped)}
    return {**more, **{name: each.grad for name, each in model.named_parameters()}}


if __name__ == "__main__":
    for folder in map(Path, sys.argv[1:]):
        save_file(answered(folder), folder / "answer.safetensors")
