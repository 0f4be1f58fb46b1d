"""Recipe to member, on vectors of floats."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fleet.work import Failed, InputMember, Maker, Work
from tests.toy.config import ToyConfig

Vector = np.ndarray[Any, np.dtype[np.float64]]


def maker(config: ToyConfig) -> Maker:
    return lambda work: make(work, config.size, config.sleep)


def make(work: Work, size: int, sleep: float = 0.0) -> Mapping[str, float]:
    if work.recipe.task == "outer" and "before" not in work.writer.known:  # as DiLoCo's shards: it may be early
        write(work, before=vector(work.inputs[work.recipe.args["old"]], "weights"))
    if work.early:
        return {}
    start, momentum = merge(work, size)
    trains = work.recipe.args.get("steps")
    end = train(work, start, sleep) if trains else start
    if sleep and not trains:
        work.host.sleep(sleep)
    publish(work, start, end, momentum)
    return evaluate(end, work.recipe.args) if work.recipe.evaluated_on else {}


def vector(parent: InputMember, name: str) -> Vector:
    return np.frombuffer(parent.read(name), dtype="<f8")


def mean(vectors: list[Vector]) -> Vector:
    total = np.zeros_like(vectors[0])
    for each in vectors:
        total = total + each
    return total / len(vectors)


def merge(work: Work, size: int) -> tuple[Vector, Vector]:
    """The weights and the momentum that the recipe starts from."""
    m, there = work.recipe.args, list(work.inputs.values())
    zero = np.zeros(size)
    match work.recipe.task:
        case "init":
            return np.random.default_rng(m["start"]).standard_normal(size), zero
        case "assemble":
            return np.concatenate([vector(p, "weights") for p in there]), zero
        case "cut":
            cut = np.array_split(vector(there[0], "weights"), m["shards"])[m["shard"]]
            return cut, np.zeros(len(cut))
        case "outer":  # one shard of DiLoCo's outer step
            old = work.inputs[m["old"]]
            changes = [vector(p, f"change.{m['shard']}") for id, p in work.inputs.items() if id != m["old"]]
            return outer(vector(old, "weights"), vector(old, "momentum"), mean(changes), m)
        case "mean":
            return mean([vector(p, "weights") for p in there]), mean([vector(p, "momentum") for p in there])
        case "linear":
            total = zero
            for weight, parent in zip(m["weights"], there, strict=True):
                total = total + weight * vector(parent, "weights")
            return total, zero
    raise ValueError(work.recipe.task)


def outer(start: Vector, momentum: Vector, change: Vector, settings: Mapping[str, Any]) -> tuple[Vector, Vector]:
    momentum = settings["momentum"] * momentum + change
    step = change + settings["momentum"] * momentum if settings["nesterov"] else momentum
    return start - settings["outer_lr"] * step, momentum


def shape(size: int) -> tuple[Vector, Vector]:
    """How steep the valley is in each direction, and where its ground lies."""
    return 1.0 + 0.5 * np.cos(np.arange(size)), np.sin(np.arange(size) * 1.7) * 3


def train(work: Work, x: Vector, sleep: float) -> Vector:
    t, (curve, goal) = work.recipe.args, shape(len(x))
    begin, work.steps = 0, t["steps"]
    if saved := work.resume():
        begin, x = saved.step, np.frombuffer(saved.read("x"), dtype="<f8")
    for step in range(begin, t["steps"]):
        noise = np.random.default_rng([t["seed"], t["slot"], t["round"], step]).standard_normal(len(x))
        x = x - t["lr"] * (curve * (x - goal) + noise)
        if sleep:
            work.host.sleep(sleep / t["steps"])
        now = np.ascontiguousarray(x).tobytes()
        work.between_steps(step + 1, lambda saver, now=now: saver.write("x", now))
    return x


def publish(work: Work, start: Vector, end: Vector, momentum: Vector) -> None:
    args = work.recipe.args
    how = args.get("publish", "weights")
    if how == "weights":
        write(work, weights=end, momentum=momentum)
    if how == "change":
        parts = np.array_split(start - end, args["shards"])
        write(work, **{f"change.{s}": part for s, part in enumerate(parts)})
    if how == "step":  # EDT: the member's own outer step
        weights, momentum = outer(start, momentum, start - end, args)
        write(work, weights=weights, momentum=momentum)


def write(work: Work, **vectors: Vector) -> None:
    for name, each in vectors.items():
        work.write(name, np.ascontiguousarray(each, dtype="<f8").tobytes())


def evaluate(x: Vector, settings: Mapping[str, Any]) -> dict[str, float]:
    curve, goal = shape(len(x))
    errors, batch = curve * (x - goal) ** 2, settings["batch"]
    total = 0.0
    for begin in range(0, len(errors), batch):
        total += float(np.sum(errors[begin : begin + batch]))
    loss = 0.5 * total / len(x)
    if "cliff" in settings and loss > settings["cliff"]:
        raise Failed("the loss is beyond the cliff")
    if not math.isfinite(loss):
        raise Failed("the loss is not finite")
    return {"loss": loss}
