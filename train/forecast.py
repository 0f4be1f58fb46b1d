"""What a run comes to: tokens, memory, the disk's time beside that of training; and what an expert would change."""

import itertools
import math
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path

import torch

from fleet.idle_workers import idle
from fleet.plain import readable_bytes, several
from fleet.progress import duration
from fleet.run_config import UserError
from merge.wire import WIRES
from train.exchange_config import QUANTIZED_WIRES
from train.kernels import in_fixed_order
from train.learner import Learner
from train.member.counted_text import check_text, counted, in_words
from train.member.error_feedback import LOST_WIRE
from train.member.vectors import moments_of
from train.memory import Memory, memory_of
from train.model import built, layout_of, skeleton
from train.optimizers import WEIGHTS, layouts_of
from train.training_commands import check_settings, slow_start
from train.training_config import TrainConfig

FEW, MANY = 5, 200  # tokens a parameter: as a rule, 20 serve a model best, and more of them one that is used much
MOST_WORDS = 2 / 3  # of all parameters, for single words
# The disk's time beside that of training: from which on DISK_LANE is worth it; at most, where it is waited for; and
# where it is not: at 0.9, devices still train for 95% of the time (docs/exchange.md).
NOTICED, WAITED_FOR, HIDDEN = 0.1, 0.25, 0.9
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
        c, count, moments = self.config, self.sizes.parameters, self._moments
        if not c.shares_one_model:
            own, parents = _bytes(count, c.wire) * (2 if c.outer_momentum else 1) + moments, c.parents_of_a_child
            known = max(1 / c.mean_parts, 1 / self.here.workers)  # of a group's mean: what its reader made itself
            return (own * (1 + 1 / parents), own * (2 - known)) if c.mean_parts > 1 else (own, own * parents)
        change, lost = _bytes(count, c.wire), _bytes(count, LOST_WIRE) if c.feeds_back else 0.0
        weights, update = _bytes(count, "fp32"), _bytes(count, c.wire) if c.wire in QUANTIZED_WIRES else 0.0
        momentum = weights if c.outer_momentum else 0.0
        shard = (weights + momentum + update + lost + moments) * (1 + c.in_halves) / c.population_size
        model = update or weights  # each worker reads it once; who works for both halves, after each one's step
        if c.in_halves:
            model = 2 * model if self.turns > 1 else weights + update  # or has missed the other's, and reads it whole
        model *= min(1.0, self.here.workers / c.population_size)
        reads = model + change + lost + 2 * moments + (momentum + lost) / c.population_size
        looks = momentum / c.population_size  # at all of it
        return (change + lost + moments + shard) / c.fragments, reads / c.fragments + looks

    @property
    def _moments(self) -> float:
        each = moments_of(self.config, self.sizes.parameters, self.sizes.moments)
        return sum(_bytes(moment.count, moment.wire) for moment in each)

    @property
    def last_round(self) -> tuple[float, float]:
        """Seconds of training and of the disk, in the longest rounds, if nothing is done while the disk works."""
        disk = self.config.population_size * sum(self.moved) / self.here.disk
        return self.config.inner_steps * self.here.step * self.turns, disk

    @property
    def share(self) -> float:
        """The disk's time beside that of training."""
        train, disk = self.last_round
        return disk / train

    @property
    def most(self) -> float:
        """That this should be. With OVERLAP exchanges are there while all train, if somebody else carries them."""
        c = self.config
        lies_beside = c.comes_late or (c.in_halves and c.population_size >= 2 * self.here.workers)
        return HIDDEN if c.disk_lane and c.shares_one_model and lies_beside else WAITED_FOR

    @property
    def too_slow(self) -> bool:
        """By more than whole steps and sums are exact to."""
        return self.share > self.most * 1.001

    @property
    def memory(self) -> Memory:
        """Of a worker's device; what it exchanges is in main memory."""
        return memory_of(self.config.model_copy(update={"vocab_size": self.sizes.longest}))


def _with(f: Forecast, **keys: object) -> Forecast:
    return replace(f, config=f.config.model_copy(update=keys))


def _bytes(count: int, wire: str) -> float:
    entry = WIRES[wire].entry(count)
    return float(math.prod(entry.shape) * entry.dtype.itemsize)


# -- what is said ------------------------------------------------------------------------------------------------------


def facts(f: Forecast) -> Iterator[tuple[str, str]]:
    c, s, (written, read) = f.config, f.sizes, f.moved
    yield "model", f"{s.parameters:,} parameters, {s.words / s.parameters:.0%} of them for single words"
    each = f"{f.tokens // c.population_size:,} of each slot; {f.per_parameter:.3g} a parameter"
    yield "tokens", f"{f.tokens:,} in all, {each}"
    yield from (("text", line) for line in in_words(counted(c, whole=True)))
    grows = f"{c.steps_in(1)} to " if c.steps_in(1) < c.inner_steps else ""
    yield "rounds", f"{c.max_generations}, of {grows}{c.inner_steps} steps; {c.total_steps:,} of a slot"
    always = f"{readable_bytes(f.memory.kept)} of them always"
    yield "memory", f"{readable_bytes(f.memory.total)} of a worker's device, {always}; in parts: python -m train.memory"
    there = f"{several(f.here.workers, 'worker')} for {several(c.population_size, 'slot')}"
    yield "machines", f"{there}; {f.busy:.0%} of them train at a time"
    yield "exchange", f"a slot writes {readable_bytes(written)} and reads {readable_bytes(read)} a round"
    train, disk = f.last_round
    yield "a round", f"{seconds(train)} of training, {seconds(disk)} of a disk of {readable_bytes(f.here.disk)}/s"
    whole = c.total_steps * f.here.step * f.turns
    yield "the run", f"{duration(whole)} of training, {duration(disk * c.max_generations)} of the disk"


def advice(f: Forecast) -> Iterator[str]:
    """What an expert would change, and to what; nothing where all is well."""
    c = f.config
    if few := idle(f.here.workers, c.population_size):
        yield few
    if not c.shares_one_model and not c.draws_parents and 1 < c.population_size == c.parents_of_a_child:
        group = next((size for size in range(c.population_size // 2, 1, -1) if c.population_size % size == 0), 0)
        instead = f"GROUP_SIZE {group}" if group else 'ALGORITHM "diloco"'
        yield f"all are everybody's parents, which is DiLoCo at twice the bytes: {instead}"
    if short := refused(c):
        yield f"it would be refused: {short}"
    if f.share > NOTICED and not c.disk_lane:
        beside = "which hides a part of that and changes no results"
        yield f"{_takes(f)}: DISK_LANE true writes and reads ahead while workers train, {beside}"
        f = _with(f, disk_lane=True)
    told, f = _cheaper(f)  # what else is said is of a run that follows this
    yield from told
    yield from _tokens(f, " instead" if f.config.max_generations != c.max_generations else "")
    if f.sizes.words > f.sizes.parameters * MOST_WORDS:
        yield f"{f.sizes.words / f.sizes.parameters:.0%} of the model stand for single words: a smaller VOCAB_SIZE"
    if slow := slow_start(f.config):
        yield slow


def _tokens(f: Forecast, instead: str) -> Iterator[str]:
    """Where a parameter has few of them, or many."""
    c = f.config
    if f.per_parameter < FEW:
        longer = c.max_generations + math.ceil((FEW / f.per_parameter - 1) * c.total_steps / c.inner_steps)
        few = f"{f.per_parameter:.2g} tokens a parameter are few (20 are usual); MAX_GENERATIONS {longer}{instead} has"
        short = refused(c.model_copy(update={"max_generations": longer}))
        yield f"{few} {FEW}, and takes more text or MAX_EPOCHS" if short else f"{few} {FEW}"
    if f.per_parameter > MANY:
        yield f"{f.per_parameter:.0f} tokens a parameter are many: a larger model makes more of them"


def refused(config: TrainConfig) -> str:
    """Why the run would be, by its settings or for too little text; what a hub has, nobody counts."""
    try:
        check_settings(config)
        check_text(config)
    except UserError as error:
        return str(error)
    return ""


def _takes(f: Forecast) -> str:
    return f"the disk takes {f.share:.0%} of a round's training"


def _cheaper(f: Forecast) -> tuple[list[str], Forecast]:
    """Fewer bytes first, then fewer rounds: in words, and what comes of it."""
    slow, told = f, list[str]()
    for key, value in (("wire_dtype", ""), ("inner_optimizer_state", "narrow")):
        fewer = _with(f, **{key: value})
        forgets = key == "inner_optimizer_state" and not f.config.keeps_moments
        if not forgets and f.too_slow and sum(fewer.moved) < sum(f.moved):
            told.append(f'{key.upper()} "{value or fewer.config.wire}"')
            f = fewer
    c, lines = f.config, list[str]()
    steps, begun = math.ceil(c.inner_steps * f.share / f.most), c.forked[-1].round if c.forked else 0
    if f.too_slow and 2 * steps > c.total_steps - c.steps_before(begun + 1):
        told.append("a faster disk, a smaller model or a longer run: this one's rounds cannot be long enough")
    elif f.too_slow:
        f = _longer(f, steps)
        told.append(f"{_rounds(f)} (longer rounds cost some quality)")
    elif told and c.steps_in(1) * 4 < c.inner_steps:
        f = _longer(f, c.inner_steps)
        lines = [f"the first rounds are shorter still: {_rounds(f)}"]
    return [f"{_takes(slow)}: {', and '.join(told)}", *lines] if told else [], f


def _longer(f: Forecast, steps: int) -> Forecast:
    """With rounds of so many steps, and as many tokens as whole rounds can have. They grow from a quarter of that; in
    a run that is too short to come to their length so, all are as long."""
    c, begun = f.config, f.config.forked[-1].round if f.config.forked else 0
    first = min(steps, max(c.first_inner_steps, math.ceil(steps / 4)))
    grown = c.model_copy(update={"inner_steps": steps, "first_inner_steps": first})
    need = next(round for round in itertools.count(begun + 1) if grown.steps_in(round) == steps)
    left = c.total_steps - grown.steps_before(need + 1)
    if left > -steps / 2:
        return replace(f, config=grown.model_copy(update={"max_generations": need + max(0, round(left / steps))}))
    left = c.total_steps - c.steps_before(begun + 1)
    rounds = max(1, left // steps)
    steps = math.ceil(left / rounds)
    return _with(f, inner_steps=steps, first_inner_steps=steps, max_generations=begun + rounds)


def _rounds(f: Forecast) -> str:
    c = f.config
    grow = f"with FIRST_INNER_STEPS {c.first_inner_steps} and MAX_GENERATIONS {c.max_generations}"
    return f"INNER_STEPS {c.inner_steps} {grow}, for as many tokens"


def seconds(value: float) -> str:
    return f"{value:.2g} s" if value < 60 else duration(value)


# -- what is looked up and measured ------------------------------------------------------------------------------------


def sizes_of(config: TrainConfig) -> Sizes:
    from train.member.pretraining_round_zero import named_tokenizer
    from train.token_budget import tokenizer_name

    name = tokenizer_name(config)
    vocabulary = len(named_tokenizer(name, config.trust_remote_code)) if name else config.vocab_size
    layout = layout_of(skeleton(config.initial_population[0], vocabulary, config.trust_remote_code))
    tables = [shape for shape in list(layout.shapes.values())[layout.within :] if len(shape) > 1]
    words, longest = sum(map(math.prod, tables)), max(shape[0] for shape in tables)
    moments = sum(each.size for kind, each in layouts_of(layout, config).items() if kind != WEIGHTS)
    return Sizes(layout.size, words, moments, longest)


def timed(config: TrainConfig, vocabulary: int) -> float:
    """Seconds of a step on this machine's device, on tokens without a meaning."""
    in_fixed_order(config.threads, config.deterministic, config.precision)
    learner = Learner(built(config.initial_population[0], vocabulary, 1, config.trust_remote_code), config)
    windows = torch.randint(vocabulary, (config.batch_size, config.seq_length + 1))
    batches, ends = repeat([windows] * config.gradient_accumulation, _FIRST + _TIMED), list[float]()
    for _ in learner.train(batches, repeat(0.0)):
        learner.summed_loss()  # waits for the device
        ends.append(time.perf_counter())
    return (ends[-1] - ends[_FIRST - 1]) / _TIMED


def disk_speed(folder: Path) -> float:
    """Bytes a second that are safely on it."""
    there = next(each for each in (folder, *folder.parents) if each.is_dir())
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            began = time.perf_counter()
            file.write(os.urandom(1 << 20) * (_PROBE >> 20))
            file.flush()
            os.fsync(file.fileno())
            return _PROBE / (time.perf_counter() - began)
    except OSError as error:
        raise UserError(f"{there}: cannot be tried: {error.strerror}; say how fast it is, --disk 110") from None
