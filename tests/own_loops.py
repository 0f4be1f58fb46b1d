"""Little training loops of a user's own, as real processes: `python -m tests.own_loops KIND RUN_DIR KEYS`."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers import LONG, ROOT, Started, until

KEYS = {"population_size": 2, "inner_steps": 5, "max_generations": 2, "poll_seconds": 0.02, "dead_seconds": 5.0}
Made = tuple[nn.Module, list[Any], Callable[[nn.Module, Tensor], Tensor]]  # a model, what learns, the loss of a batch


def loader(slot: int, round: int) -> torch.utils.data.DataLoader[Any]:
    """Four batches, in an order that comes from torch's own random numbers: less than some rounds have steps."""
    dice = torch.Generator().manual_seed(100 * slot + round)
    return torch.utils.data.DataLoader(torch.rand(16, 12, generator=dice), batch_size=4, shuffle=True)  # type: ignore[arg-type]


def noised(model: nn.Module, batch: Tensor) -> Tensor:
    """Something to learn, with numbers that are drawn on the way."""
    return F.mse_loss(model(batch + 0.1 * torch.randn_like(batch)), batch.cumsum(1)[:, :4])


def words(model: nn.Module, batch: Tensor) -> Tensor:
    numbers = (batch * 10).long()
    return F.cross_entropy(model(numbers[:, :-1]).flatten(0, 1), numbers[:, 1:].flatten())


class TiedWords(nn.Module):
    """Its head is its table of words."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.mix = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, numbers: Tensor) -> Tensor:
        return self.head(self.mix(self.table(numbers))[0])


def net(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 8), *more, nn.Tanh(), nn.Linear(8, 4))


def plain() -> Made:
    model = net()
    return model, [torch.optim.SGD(model.parameters(), 0.05)], noised  # which remembers nothing


def norm() -> Made:
    model = net(nn.BatchNorm1d(8), nn.Dropout(0.2))
    return model, [torch.optim.AdamW(model.parameters(), 1e-2)], noised


def tied() -> Made:
    model = TiedWords()
    return model, [torch.optim.Adam(model.parameters(), 1e-2, amsgrad=True)], words


def muon() -> Made:
    """Two optimizers, each with parameters of its own."""
    model = net()
    matrices, rest = ([p for p in model.parameters() if (p.ndim == 2) == each] for each in (True, False))
    return model, [torch.optim.Muon(matrices, 1e-2), torch.optim.SGD(rest, 1e-2, momentum=0.9)], noised


def free() -> Made:
    """Without a schedule: what is trained and what is to be looked at are two."""
    import schedulefree

    model = net()
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), 1e-2, warmup_steps=3)
    optimizer.train()
    return model, [optimizer], noised


def scheduled() -> Made:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    both = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [3])
    return model, [optimizer, both, torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)], noised


def kinds() -> Made:
    """Parameters of several kinds of numbers, one of them frozen."""
    model = net()
    model[0].to(torch.bfloat16)
    model[2].bias.requires_grad_(False)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        first, act, last = model.children()
        return F.mse_loss(last(act(first(batch.to(torch.bfloat16)).float())), batch.cumsum(1)[:, :4])

    return model, [torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)], loss


def counted() -> Made:
    """Numbers that differ from slot to slot beside those that are averaged."""
    made = norm()
    made[0].register_buffer("seen", torch.zeros((), dtype=torch.long))
    made[0].register_buffer("gone", torch.randn(3), persistent=False)
    return made


MODELS = {each.__name__: each for each in (plain, norm, tied, muon, free, scheduled, kinds, counted)}


def steps(run: Any, made: Made, batches: Iterable[Tensor], after: Callable[[Any, Tensor], None] | None = None) -> None:
    """As people write them; a gradient scaler, if there is one, is the last of what learns."""
    model, learning, loss_of = made
    optimizers = [each for each in learning if isinstance(each, torch.optim.Optimizer)]
    schedulers = [each for each in learning if isinstance(each, torch.optim.lr_scheduler.LRScheduler)]
    scaler = learning[-1] if isinstance(learning[-1], torch.amp.GradScaler) else None
    for batch in batches:
        loss = loss_of(model, batch)
        for each in optimizers:
            each.zero_grad()
        (scaler.scale(loss) if scaler else loss).backward()
        for each in optimizers:
            scaler.step(each) if scaler else each.step()
        if scaler:
            scaler.update()
        for each in schedulers:
            each.step()
        if after:
            after(run, loss)
        run.step(loss)


def train(
    kind: str,
    folder: str | Path,
    algorithm: str = "diloco",
    seed: int = 1,
    only: int = 10**6,
    wrap: str = "",
    together: bool = False,
    after: str = "",
    **keys: Any,
) -> tuple[nn.Module, bool]:
    """A run in this process, or so many steps of it; the model that it ends with, and whether the run is over.
    `together`: in the first rounds nobody goes on before two processes train."""
    import diloco
    import edt

    torch.manual_seed(1)
    made = WRAPS[wrap](MODELS[kind]())
    join = {"diloco": diloco.join, "edt": edt.join}[algorithm]

    def evaluate() -> Tensor:
        return made[2](made[0], torch.linspace(0, 1, 96).view(8, 12))

    with join(folder, made[0], *made[1], evaluate=evaluate, **{**KEYS, **keys}) as run:
        batches = run.batches(met(Path(folder)) if together else loader)
        steps(run, made, (batch for _, batch in zip(range(only), batches, strict=False)), AFTER[after])
    return made[0], run.over


# -- two processes -----------------------------------------------------------------------------------------------------


def met(folder: Path) -> Callable[[int, int], Iterable[Any]]:
    def make_loader(slot: int, round: int) -> Iterable[Any]:
        if round < 3:
            until(lambda: len([*folder.glob(f"rounds/{round:05d}/*.claim.0")]) > 1, "two processes train", LONG)
        return loader(slot, round)

    return make_loader


def die(run: Any, loss: Tensor) -> None:
    if (run.round, run.steps_taken) == (2, 3):
        os.kill(os.getpid(), signal.SIGKILL)


def third_is_fittest(run: Any, loss: Tensor) -> None:
    run.report(fitness=-abs(run.slot - 1.9))


AFTER: dict[str, Callable[[Any, Tensor], None] | None] = {"": None, "die": die, "third": third_is_fittest}


def started(kind: str, folder: Path, **keys: Any) -> Started:
    """Such a process by itself."""
    out = folder.parent / f"{len([*folder.parent.glob('*.out')])}.out"
    words = [sys.executable, "-m", "tests.own_loops", kind, str(folder), json.dumps(keys)]
    with out.open("wb") as file:
        return Started(subprocess.Popen(words, cwd=ROOT, stdout=file, stderr=file), out)


# -- two ranks that share a model --------------------------------------------------------------------------------------


def in_ddp(made: Made) -> Made:
    return nn.parallel.DistributedDataParallel(made[0]), *made[1:]


def in_fsdp(made: Made) -> Made:
    """Each rank has a part of each tensor; the optimizer is made of those."""
    from torch.distributed.fsdp import fully_shard

    fully_shard(made[0])
    return made[0], [torch.optim.AdamW(made[0].parameters(), 1e-2)], made[2]


WRAPS: dict[str, Callable[[Made], Made]] = {"": lambda made: made, "ddp": in_ddp, "fsdp": in_fsdp}


def ranks(place: Path) -> None:
    """Runs that two ranks take part in: each as a whole, and left in the middle and gone on with."""
    from torch import distributed as dist

    dist.init_process_group("gloo")
    for wrap in ("ddp", "fsdp"):
        train("norm", place / f"{wrap}-calm", wrap=wrap)
        assert not train("norm", place / f"{wrap}-hurried", wrap=wrap, only=7)[1]
        assert train("norm", place / f"{wrap}-hurried", wrap=wrap)[1]
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        ranks(Path(sys.argv[1]))
    else:
        train(sys.argv[1], sys.argv[2], **json.loads(sys.argv[3]))
