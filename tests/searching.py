"""Donors that each know another part of some facts, and a task that asks for all of them: made on the spot."""

import json
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SUBJECTS, PARTS, ANSWERS = 24, 3, 24
TASK = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""


def words() -> list[str]:
    parts = [f"p{n}" for n in range(PARTS)]
    return ["<pad>", *parts, *(f"s{n}" for n in range(SUBJECTS)), *(f"a{n}" for n in range(ANSWERS)), "of", "is"]


def facts(seed: int = 0) -> list[tuple[int, str, str, str]]:
    """Part, subject, and the answer in two words."""
    rng = random.Random(seed)
    return [
        (part, f"s{subject}", f"a{rng.randrange(ANSWERS)}", f"a{rng.randrange(ANSWERS)}")
        for part in range(PARTS)
        for subject in range(SUBJECTS)
    ]


def donors(folder: Path, layers: int = 2, steps: int = 30, first: int = 3) -> list[Path]:
    """A base that knows a little of everything; and for each part of the facts a model that went on to learn it."""
    number = {word: n for n, word in enumerate(words())}
    rows = torch.tensor([[number[w] for w in (f"p{part}", "of", s, "is", a, b)] for part, s, a, b in facts()])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(number), hidden_size=64, intermediate_size=128, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=False,
        )  # fmt: skip
        base = LlamaForCausalLM(config)
        _learn(base, rows, first, 3e-3)
        made = [_saved(base, folder / "base")]
        for part in range(PARTS):
            model = LlamaForCausalLM(config)
            model.load_state_dict(base.state_dict())
            _learn(model, rows[part * SUBJECTS : (part + 1) * SUBJECTS], steps, 2e-3)
            made.append(_saved(model, folder / f"part{part}"))
    return made


def _learn(model: LlamaForCausalLM, rows: torch.Tensor, steps: int, rate: float) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(steps):
        logits = model(rows[:, :-1]).logits[:, 3:]
        F.cross_entropy(logits.flatten(0, 1), rows[:, 4:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def _saved(model: LlamaForCausalLM, folder: Path) -> Path:
    model.save_pretrained(folder)
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words())}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<pad>", pad_token="<pad>").save_pretrained(folder)
    return folder


def task(folder: Path, name: str = "facts", seed: int = 1) -> Path:
    """All facts as questions of four choices; the folder to look for tasks in."""
    folder.mkdir(exist_ok=True)
    rng, known, lines = random.Random(seed), facts(), []
    for part, subject, *answer in known:
        choices = [" ".join(answer)]
        while len(choices) < 4:
            other = " ".join(rng.choice(known)[2:])
            choices += [other] if other not in choices else []
        rng.shuffle(choices)
        question = {
            "question": f"p{part} of {subject} is",
            "choices": choices,
            "answer": choices.index(" ".join(answer)),
        }
        lines.append(question)
    rng.shuffle(lines)
    (folder / f"{name}.json").write_text("\n".join(map(json.dumps, lines)))
    (folder / f"{name}.yaml").write_text(TASK.format(name=name, file=folder / f"{name}.json"))
    return folder
