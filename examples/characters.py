"""A recurrent network that foretells the characters of Python's standard library, trained by EDT: a population whose
members inherit their learning rates.

Start it in as many terminals, and on as many machines, as you like: python -m examples.characters runs/characters
"""

import sys
import sysconfig
from pathlib import Path

import torch
from torch import nn

from edt import join

LENGTH, BATCH = 48, 32
LIBRARY = Path(sysconfig.get_path("stdlib"))
TEXT = "".join((LIBRARY / f"{name}.py").read_text() for name in ("ast", "argparse", "inspect", "typing", "tarfile"))
NUMBERS = torch.tensor([min(ord(letter), 127) for letter in TEXT])
LEARNED, HELD_OUT = NUMBERS[:-20_000], NUMBERS[-20_000:]


class Characters(nn.Module):
    """Its head is its table of characters."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.table, self.memory = nn.Embedding(128, width), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 128, bias=False)
        self.head.weight = self.table.weight
        nn.init.normal_(self.table.weight, std=0.1)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        said = self.head(self.memory(self.table(windows[:, :-1]))[0])
        return nn.functional.cross_entropy(said.flatten(0, 1), windows[:, 1:].flatten())


def windows(slot: int, round: int):
    """Without end, from anywhere in the text."""
    while True:
        begins = torch.randint(len(LEARNED) - LENGTH, (BATCH, 1))
        yield LEARNED[begins + torch.arange(LENGTH + 1)]


def loss_on_held_out() -> torch.Tensor:
    return model(HELD_OUT[: 200 * (LENGTH + 1)].view(200, LENGTH + 1))


torch.manual_seed(1)
model = Characters()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.99))

settings = {"inner_steps": 25, "max_generations": 8, "genes": {"lr": 0.01}, "lr_spread": 4}
with join(sys.argv[1], model, optimizer, evaluate=loss_on_held_out, **settings) as run:
    for batch in run.batches(windows):
        for group in optimizer.param_groups:
            group["lr"] = run.genome["lr"] * (1 - (run.round - 1) / 8)
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss)

with torch.no_grad():
    print(f"loss {float(loss_on_held_out()):.3f}")
