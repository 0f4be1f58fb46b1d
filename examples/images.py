"""A small convolutional network with batch normalisation that tells ten kinds of pictures apart, trained by DiLoCo.

Start it in as many terminals, and on as many machines, as you like: python -m examples.images runs/images
"""

import sys

import torch
from torch import nn

from diloco import join

SIZE, KINDS, BATCH = 12, 10, 64


def pictures(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each kind has a pattern of its own; a picture is one of them, shifted, in noise."""
    patterns = torch.randn(KINDS, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    dice = torch.Generator().manual_seed(seed)
    labels = torch.randint(KINDS, (count,), generator=dice)
    shifts = torch.randint(4, (count, 2), generator=dice).tolist()
    images = [patterns[k].roll((y, x), (0, 1)) for k, (y, x) in zip(labels.tolist(), shifts, strict=True)]
    return (torch.stack(images) + 1.2 * torch.randn(count, SIZE, SIZE, generator=dice))[:, None], labels


def loader(slot: int, round: int):
    images, labels = pictures(4096, seed=1 + slot)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), BATCH, shuffle=True)


def loss_on_test() -> dict[str, float]:
    images, labels = pictures(1000, seed=0)
    said = model(images)
    return {"loss": nn.functional.cross_entropy(said, labels), "accuracy": (said.argmax(1) == labels).float().mean()}


torch.manual_seed(1)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
    nn.Flatten(), nn.Dropout(0.1), nn.Linear(128, KINDS),
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=8 * 25 + 1)

settings = {"population_size": 4, "inner_steps": 25, "max_generations": 8}
with join(sys.argv[1], model, optimizer, scheduler, evaluate=loss_on_test, **settings) as run:
    for images, labels in run.batches(loader):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        run.step(loss)

model.eval()
with torch.no_grad():
    print({name: round(float(value), 3) for name, value in loss_on_test().items()})
