"""transformers.Trainer with a callback that joins a run: its loop, its optimizer, its schedule; DiLoCo around them.

Start it in as many terminals, and on as many machines, as you like: python -m examples.trainer runs/trainer
"""

import sys
import sysconfig
from itertools import islice
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from diloco import join

BATCH, LENGTH, STEPS, ROUNDS = 16, 48, 15, 6
TEXT = "".join((Path(sysconfig.get_path("stdlib")) / f"{name}.py").read_text() for name in ("ast", "typing", "tarfile"))
NUMBERS = torch.tensor([min(ord(letter), 127) for letter in TEXT])


class JoinCallback(TrainerCallback, torch.utils.data.IterableDataset):
    """A run around a Trainer, and the data of whose turn it is: each turn is an epoch to the Trainer."""

    def __init__(self, rows, *settings, **keys):
        self.rows, self.settings, self.keys = rows, settings, keys

    def on_train_begin(self, args, state, control, model, optimizer, lr_scheduler, **more):
        self.batch = args.train_batch_size * args.gradient_accumulation_steps
        self.run = join(*self.settings, model, optimizer, lr_scheduler, **self.keys).__enter__()
        control.should_training_stop = self.run.over

    def on_step_end(self, args, state, control, **more):
        turn = self.run.round, self.run.slot
        self.run.step()
        control.should_training_stop = self.run.over
        control.should_epoch_stop = self.run.over or turn != (self.run.round, self.run.slot)

    def on_train_end(self, *about, **more):
        self.run.__exit__(None, None, None)

    def __iter__(self):
        return islice(self.rows(self.run.slot, self.run.round), self.run.steps_taken * self.batch, None)


def rows(slot: int, round: int):
    """Without end, and the same each time."""
    dice = torch.Generator().manual_seed(1000 * round + slot)
    while True:
        begin = int(torch.randint(len(NUMBERS) - 30_000, (), generator=dice))
        yield {"input_ids": NUMBERS[begin : begin + LENGTH], "labels": NUMBERS[begin : begin + LENGTH]}


def loss_on_held_out() -> torch.Tensor:
    held_out = NUMBERS[-200 * LENGTH :].view(200, LENGTH)
    return model(input_ids=held_out, labels=held_out).loss


torch.manual_seed(1)
shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=128, max_position_embeddings=LENGTH, use_cache=False, **shape))
joined = JoinCallback(
    rows, sys.argv[1], evaluate=loss_on_held_out, population_size=2, inner_steps=STEPS, max_generations=ROUNDS
)
arguments = TrainingArguments(
    per_device_train_batch_size=BATCH, learning_rate=1e-2, max_steps=STEPS * ROUNDS, warmup_steps=5, use_cpu=True,
    save_strategy="no", report_to="none", logging_strategy="no", disable_tqdm=True,
)  # fmt: skip
Trainer(model, arguments, train_dataset=joined, callbacks=[joined]).train()
model.eval()
with torch.no_grad():
    print(f"loss {float(loss_on_held_out()):.3f}")
