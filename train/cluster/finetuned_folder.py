"""What fine-tuning begins with, a model, and ends with: its folder, or an adapter's, and a card."""

import json
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from fleet.lm_eval_command import lm_eval
from fleet.places import on_hub
from fleet.plain import several
from merge import live_models
from merge.atomic_output import atomic_folder
from merge.donors import Donors
from merge.engine import MergeOptions
from merge.json_files import read_json, write_json
from merge.merge_planning import plan_merge
from merge.merging import RECIPE
from train.adapters import merged
from train.cluster.shared_learner import SharedLearner
from train.member.posttraining_round_zero import dtype_of
from train.member.posttraining_runtime import ChildModel, said_of, write_model
from train.posttrain.posttrain_config import PosttrainConfig

_SHOWN = (
    *("lr", "lr_schedule", "warmup_steps", "sft_epochs", "seq_length", "batch_size", "gradient_accumulation"),
    *("precision", "seed"),
)


_OF_A_CHAT = (
    'messages = [{"role": "user", "content": "What is the capital of France?"}]',
    'more = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}',
    "asked = tokenizer.apply_chat_template(messages, **more)",
)


class Opened:
    """The given model, before its weights are wanted."""

    def __init__(self, model: str, trust: bool) -> None:
        self._stack, self._trust = ExitStack(), trust
        recipe = {"merge_method": "passthrough", "models": [{"model": model}], "out_dtype": "float32"}
        self.said, self._donors = said_of(recipe), self._stack.enter_context(Donors())
        self.plan = plan_merge(self.said, self._donors)
        donor = self._donors[model]
        self.dtype, self.words = dtype_of(donor), donor.vocabulary_size or 1
        text = donor.config.get("text_config") or donor.config
        self.positions = int(text.get("max_position_embeddings") or text.get("n_positions") or 0)
        self.tokenizer = live_models.furnished(self.said, self.plan, "cpu", trust, with_model=False).tokenizer

    def loaded(self, device: str) -> ChildModel:
        """In fp32."""
        known = live_models.furnished(self.said, self.plan, device, self._trust)
        known.fill(self.plan, MergeOptions(threads=torch.get_num_threads()))
        return ChildModel(self.said, self.plan, known)


@dataclass(frozen=True)
class Finetuned:
    """What there is to say of it."""

    model: str
    rows: str
    c: PosttrainConfig
    steps: int
    before: float  # on held-out rows
    after: float
    merges: bool
    chats: bool  # its tokenizer has a chat template

    @property
    def is_adapter(self) -> bool:
        return self.c.adapter is not None and not self.merges

    def next_commands(self, out: Path) -> tuple[str, str]:
        """That make a file for llama.cpp of it, and evaluate it."""
        model, base = (f"{self.model}+{out}", self.model) if self.is_adapter else (str(out), "")
        return f"python -m merge.gguf {model} {out}.gguf --type Q8_0", lm_eval(out, base)


def write(
    out: Path, donor: Opened, child: ChildModel, learner: SharedLearner, about: Finetuned, overwrite: bool
) -> None:
    """All ranks come here; the first one writes."""
    state = learner.state_dict()

    def written() -> None:
        with atomic_folder(out, sum(each.nbytes for each in state.values()), overwrite) as draft:
            if about.is_adapter:
                _adapter(draft, donor, learner.model, about)
            else:
                _model(draft, donor, child, learner.model, dict(state), about)
            (draft / "README.md").write_text(card(about, out), encoding="utf-8")

    learner.ranks.some(learner.ranks.first, written)


def _adapter(draft: Path, donor: Opened, model: Any, about: Finetuned) -> None:
    model.peft_config["default"].base_model_name_or_path = about.model
    model.save_pretrained(draft)
    said = read_json(draft / "adapter_config.json")  # in which layers stand in another order each time
    write_json(draft / "adapter_config.json", {**said, "target_modules": sorted(said["target_modules"])})
    donor.tokenizer.save_pretrained(draft)
    for path in draft.glob("*.safetensors"):
        shutil.copymode(draft / "adapter_config.json", path)  # which would be the user's alone


def _model(
    draft: Path, donor: Opened, child: ChildModel, model: Any, state: dict[str, torch.Tensor], about: Finetuned
) -> None:
    c = about.c
    if c.adapter:
        if c.adapter.four_bits:  # the weights with all their bits have to come from the files again
            child = donor.loaded("cpu")
        merged(model, child.live.model if c.adapter.four_bits else None)
        state = child.live.model.state_dict()
    made = child.files(getattr(torch, c.dtype or donor.dtype), state)
    write_model(draft, replace(child.said, text=""), made, MergeOptions(threads=torch.get_num_threads()))
    (draft / RECIPE).unlink()


def card(about: Finetuned, out: Path) -> str:
    """README.md, with the fields that the hub reads."""
    c = about.c
    fields = {"library_name": "peft" if about.is_adapter else "transformers", "tags": [c.mutation]}
    fields |= {"base_model": about.model} if on_hub(about.model) else {}
    keys = (*_SHOWN, *(["dpo_beta"] if c.mutation == "dpo" else []), *(["adapter"] if c.adapter else []))
    how = {key: c.model_dump(mode="json")[key] for key in keys}
    commands = about.next_commands(out)
    what, steps = "an adapter (LoRA) of" if about.is_adapter else "a fine-tuned", several(about.steps, "step")
    return "\n".join(
        (
            f"---\n{yaml.safe_dump(fields, sort_keys=False).strip()}\n---\n# {out.name}",
            f"\nThis is {what} `{about.model}`, by {c.mutation} on `{about.rows}` in {steps}. The loss on",
            f"held-out rows was {about.before:.4f} before and is {about.after:.4f}.",
            f"\n## How to use it\n\n```python\n{_program(about, out)}\n```",
            "\n## As one file, and evaluated\n\n```sh\n" + "\n".join(commands) + "\n```",
            f"\n## How it was made\n\n```json\n{json.dumps(how, indent=2)}\n```\n",
        )
    )


def _program(about: Finetuned, out: Path) -> str:
    kind = "AutoPeftModelForCausalLM" if about.is_adapter else "AutoModelForCausalLM"
    return "\n".join(
        (
            *(["from peft import AutoPeftModelForCausalLM"] if about.is_adapter else []),
            f"from transformers import {'' if about.is_adapter else 'AutoModelForCausalLM, '}AutoTokenizer",
            "",
            f'model = {kind}.from_pretrained("{out}")',
            f'tokenizer = AutoTokenizer.from_pretrained("{out}")',
            *(_OF_A_CHAT if about.chats else ['asked = tokenizer("How a text begins", return_tensors="pt")']),
            "said = model.generate(**asked, max_new_tokens=100)",
            'print(tokenizer.decode(said[0][asked["input_ids"].shape[1]:], skip_special_tokens=True))',
        )
    )
