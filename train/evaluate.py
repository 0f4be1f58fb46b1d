"""How good a model is on text that it was not trained on: always the same windows."""

import math
from collections.abc import Sequence

import torch

from train.batches import TokenFile, needed
from train.config import TrainConfig
from train.loop import Learner, NotFinite


def evaluated(learner: Learner, sources: Sequence[TokenFile], config: TrainConfig) -> dict[str, float]:
    """Loss a token, and perplexity, over the held-out windows of all sources."""
    rows = [torch.tensor(row) for row in held_windows(sources, config)]
    total, count = 0.0, 0
    for begin in range(0, len(rows), config.eval_batch_size):
        batch = torch.stack(rows[begin : begin + config.eval_batch_size])
        total += learner.looked_at(batch) * len(batch)
        count += len(batch)
    if not math.isfinite(total):
        raise NotFinite(f"the loss on held-out text is {total}")
    loss = total / count
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}


def held_windows(sources: Sequence[TokenFile], config: TrainConfig) -> list[list[int]]:
    """Each source's share of EVAL_SEQUENCES, from the beginning of what it holds out."""
    rows: list[list[int]] = []
    for number, source in enumerate(sources):
        windows = (needed(config, number)["held"] - 1) // config.seq_length
        rows += [source.get(window).astype("int64").tolist() for window in range(windows)]
    return rows
