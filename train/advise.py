"""What a run comes to before it is begun: tokens, memory, the disk's time beside that of training; and what to change.

    python -m train.advise evolution.json
    python -m train.advise configs/150m.json --workers 8 --disk 110 --step 0.9

Nothing is made but a small file that tells how fast the disk is, and is gone at once.
"""

import math
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from cyclopts import Parameter
from rich.table import Table

from fleet import machines
from fleet.config import UserError, load, whole
from fleet.console import console
from fleet.plain import say
from fleet.progress import duration
from fleet.reading import command
from fleet.start import named
from merge.wire import WIRES
from train.config import TrainConfig
from train.loop import Learner, best_device, in_fixed_order
from train.member.vectors import MOMENTS_WIRE
from train.model import built, layout_of, skeleton
from train.optimizers import layouts_of

MOST_MEASURED = 300_000_000  # parameters of a model whose step is timed here unasked
FEW, MANY = 5, 200  # tokens a parameter: as a rule, 20 serve a model best, and more of them one that is used much
MOST_WORDS = 2 / 3  # of all parameters, for single words
_PROBE = 32 << 20  # bytes
_FIRST, _TIMED = 2, 5  # steps


@dataclass(frozen=True)
class Sizes:
    """Of what travels, in numbers."""

    parameters: int
    words: int  # of embeddings and heads
    moments: int
    longest: int  # the vocabulary


@dataclass(frozen=True)
class Circumstances:
    """What the configuration does not say."""

    workers: int
    step: float  # seconds
    disk: float  # bytes a second, of all together


@dataclass(frozen=True)
class Forecast:
    config: TrainConfig
    sizes: Sizes
    here: Circumstances

    @property
    def tokens(self) -> int:
        return self.config.sequences * self.config.seq_length

    @property
    def per_parameter(self) -> float:
        return self.tokens / self.sizes.parameters

    @property
    def turns(self) -> int:
        """Slots that one worker has to train one after the other in a round."""
        return math.ceil(self.config.population_size / self.here.workers)

    @property
    def busy(self) -> float:
        """The share of the workers that have something to train."""
        return self.config.population_size / (self.here.workers * self.turns)

    @property
    def moved(self) -> tuple[float, float]:
        """Bytes that a slot writes and reads in a round; EDT's evaluations of the averaged model are left out."""
        c, s = self.config, self.sizes
        if c.algorithm == "edt":
            own = _bytes(s.parameters, c.wire_dtype) * (2 if c.outer_momentum else 1) + self._moments
            return own, own * c.parents_of_a_child
        kept = _bytes(s.parameters, "fp32") * (2 if c.outer_momentum else 1) / c.population_size
        change, shards = _bytes(s.parameters, c.wire_dtype) + self._moments, _bytes(s.parameters, "fp32")
        shard = kept + self._moments / c.population_size
        return change + shard, shards + self._moments + change + kept + shards / c.population_size

    @property
    def _moments(self) -> float:
        return _bytes(self.sizes.moments, MOMENTS_WIRE) if self.config.keeps_moments else 0.0

    @property
    def training(self) -> float:
        """Seconds of the whole run."""
        return self.config.total_steps * self.here.step * self.turns

    @property
    def waiting(self) -> float:
        """Seconds of the disk, if nothing is done meanwhile."""
        return self.config.max_generations * self.config.population_size * sum(self.moved) / self.here.disk

    @property
    def last_round(self) -> tuple[float, float]:
        """Seconds of training and of the disk, in the longest rounds."""
        disk = self.waiting / self.config.max_generations
        return self.config.inner_steps * self.here.step * self.turns, disk

    @property
    def memory(self) -> float:
        """Bytes of one worker: weights, gradients, moments, two more models while it exchanges; logits of a batch."""
        c, s = self.config, self.sizes
        logits = 3 * c.batch_size * c.seq_length * s.longest
        return 4.0 * (4 * s.parameters + s.moments + logits)


def _bytes(count: int, wire: str) -> float:
    entry = WIRES[wire].entry(count)
    return float(math.prod(entry.shape) * entry.dtype.itemsize)


# -- what is said ------------------------------------------------------------------------------------------------------


def facts(f: Forecast) -> Iterator[tuple[str, str]]:
    c, s, (written, read) = f.config, f.sizes, f.moved
    yield "model", f"{s.parameters:,} parameters, {s.words / s.parameters:.0%} of them for single words"
    each = f"{f.tokens // c.population_size:,} of each slot; {f.per_parameter:.3g} a parameter"
    yield "tokens", f"{f.tokens:,} in all, {each}"
    yield "rounds", f"{c.max_generations}, of {c.steps_in(1)} to {c.inner_steps} steps; {c.total_steps:,} of a slot"
    yield "memory", f"about {_size(f.memory)} of a worker, and what the layers remember of a batch"
    yield "machines", f"{f.here.workers} workers for {c.population_size} slots; {f.busy:.0%} of them train at a time"
    yield "exchange", f"a slot writes {_size(written)} and reads {_size(read)} a round"
    train, disk = f.last_round
    yield "a round", f"{_seconds(train)} of training, {_seconds(disk)} of a disk of {_size(f.here.disk)}/s"
    yield "the run", f"{duration(f.training)} of training, {duration(f.waiting)} of the disk"


def advice(f: Forecast) -> Iterator[str]:
    """What an expert would change, and to what; nothing where all is well."""
    c = f.config
    if f.here.workers > c.population_size:
        yield f"{f.here.workers - c.population_size} workers have nothing to do: POPULATION_SIZE {f.here.workers}"
    elif f.busy < 1:
        fits = math.ceil(c.population_size / f.here.workers) * f.here.workers
        yield f"{1 - f.busy:.0%} of the workers wait for the last ones of each round: POPULATION_SIZE {fits}"
    if c.algorithm == "edt" and not c.selects_by_fitness and 1 < c.population_size == c.parents_of_a_child:
        group = next((size for size in range(c.population_size // 2, 1, -1) if c.population_size % size == 0), 0)
        instead = f"GROUP_SIZE {group}" if group else 'ALGORITHM "diloco"'
        yield f"all are everybody's parents, which is DiLoCo at twice the bytes: {instead}"
    train, disk = f.last_round
    if disk > train / 4:
        yield from _cheaper(c, disk / train)
    if f.per_parameter < FEW:
        longer = c.max_generations + math.ceil((FEW / f.per_parameter - 1) * c.total_steps / c.inner_steps)
        yield f"{f.per_parameter:.2g} tokens a parameter are few, 20 are usual: MAX_GENERATIONS {longer} has {FEW}"
    if f.per_parameter > MANY:
        yield f"{f.per_parameter:.0f} tokens a parameter are many: a larger model makes more of them"
    if f.sizes.words > f.sizes.parameters * MOST_WORDS:
        yield f"{f.sizes.words / f.sizes.parameters:.0%} of the model stand for single words: a smaller VOCAB_SIZE"
    if c.warmup_steps > c.total_steps / 10:
        yield f"the rate rises for {c.warmup_steps} of {c.total_steps} steps: WARMUP_STEPS {c.total_steps // 20}"


def _cheaper(c: TrainConfig, share: float) -> Iterator[str]:
    """Of a round's training, the disk's time is this share: fewer bytes first, then fewer rounds."""
    said = f"the disk takes {share:.0%} of a round's training"
    if c.wire_dtype in ("fp32", "bf16"):
        said, share = f'{said}: WIRE_DTYPE "int8"', share / 2
    if share > 0.25:
        steps = math.ceil(c.inner_steps * share / 0.25)
        said = f"{said}{', and' if 'int8' in said else ':'} INNER_STEPS {steps} (longer rounds cost some quality)"
    yield said
    if c.steps_in(1) * 4 < c.inner_steps:
        yield f"the first rounds are shorter still: FIRST_INNER_STEPS {math.ceil(c.inner_steps / 4)}"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value < 60 else duration(value)


# -- what is looked up and measured ------------------------------------------------------------------------------------


def sizes_of(config: TrainConfig) -> Sizes:
    from train.member.prepare import named_tokenizer, tokenizer_name

    name = tokenizer_name(config)
    vocabulary = len(named_tokenizer(name, config.trust_remote_code)) if name else config.vocab_size
    model = skeleton(config.initial_population[0], vocabulary, config.trust_remote_code)
    layout = layout_of(model)
    tables = [shape for shape in list(layout.shapes.values())[layout.within :] if len(shape) > 1]
    kinds = layouts_of(layout, config)
    moments = sum(kinds[kind].size for kind in ("average", "square"))
    return Sizes(layout.size, sum(map(math.prod, tables)), moments, max(shape[0] for shape in tables))


def timed(config: TrainConfig, vocabulary: int) -> float:
    """Seconds of a step on this machine's device, on tokens without a meaning."""
    in_fixed_order(config.threads)
    learner = Learner(built(config.initial_population[0], vocabulary, 1, config.trust_remote_code), config)
    windows = torch.randint(vocabulary, (config.batch_size, config.seq_length + 1))
    began, parts = 0.0, [windows] * config.gradient_accumulation
    learner.begin()
    for step in range(_FIRST + _TIMED):
        if step == _FIRST:
            learner.summed_loss()  # waits for the device
            began = time.perf_counter()
        learner.step(parts, 0.0)
    learner.summed_loss()
    return (time.perf_counter() - began) / _TIMED


def disk_speed(folder: Path) -> float:
    """Bytes a second that are safely on it."""
    there = next(each for each in (folder, *folder.parents) if each.is_dir())
    with tempfile.TemporaryFile(dir=there) as file:
        began = time.perf_counter()
        file.write(os.urandom(1 << 20) * (_PROBE >> 20))
        file.flush()
        os.fsync(file.fileno())
        return _PROBE / (time.perf_counter() - began)


def advise(
    config: Path = Path("evolution.json"),
    *,
    workers: Annotated[int, Parameter(help="How many; those of --machines, or NUM_MACHINES, by default.")] = 0,
    machines_file: Annotated[Path | None, Parameter(name="--machines", help="The machines of the run.")] = None,
    step: Annotated[float, Parameter(help="Seconds of a step there; measured here by default.")] = 0.0,
    disk: Annotated[float, Parameter(help="MB/s of the shared disk; measured at BASE_DIR by default.")] = 0.0,
) -> None:
    """Say what a run of pre-training comes to, and what to change, without beginning it.

    For example: python -m train.advise configs/150m.json --workers 8 --disk 110 --step 0.9

    Nothing is made but a small file that tells how fast the disk is, and is gone at once.
    """
    where = config.absolute().parent
    c = load(config, TrainConfig)
    c = c.model_copy(update={"algorithm": named(config) or "edt"})
    if c.algorithm not in ("edt", "diloco"):
        raise UserError(f"{config}: advice is there for edt and diloco, not for {c.algorithm}")
    models = (whole(each, where) if isinstance(each, str) else each for each in c.initial_population)
    c = c.model_copy(update={"initial_population": tuple(models), "tokenizer": whole(c.tokenizer, where)})
    if machines_file and not workers:
        workers = sum(
            len(each.devices) // (each.devices_per_worker or c.devices_per_worker) or each.workers
            for each in machines.load(machines_file)
        )
    sizes = sizes_of(c)
    if not step and sizes.parameters > MOST_MEASURED and best_device().type == "cpu":
        raise UserError(f"{sizes.parameters:,} parameters are too many to try here: say what a step takes, --step 0.9")
    here = Circumstances(
        workers or c.num_machines,
        step or timed(c, sizes.longest),
        disk * 1e6 or disk_speed((where / c.base_dir).resolve()),
    )
    show(Forecast(c, sizes, here))


def show(forecast: Forecast) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, words in facts(forecast):
        table.add_row(name, words)
    console().print(table)
    found = [*advice(forecast)]
    say("", *(f"- {line}" for line in found) if found else ("Nothing to change.",), sep="\n")


if __name__ == "__main__":
    command("train.advise", advise)
