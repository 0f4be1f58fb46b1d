"""How many tokens a run needs of each source, and what its tokenizer is made of: known before torch is loaded. Pure."""

import math

from train import text_sources
from train.splits import HELD_OUT, SplitName
from train.training_config import PRESETS, Dataset, TrainConfig


def tokenizer_name(config: TrainConfig) -> str:
    """Empty: one is made here."""
    first = config.initial_population[0]
    if config.tokenizer:
        return config.tokenizer
    return first if isinstance(first, str) and first not in PRESETS and not first.endswith(".json") else ""


def tokenizer_sources(config: TrainConfig) -> list[Dataset]:
    """What a tokenizer is made of, where none is named; the built-in text, where all else is random."""
    if tokenizer_name(config):
        return []
    return [each for each in config.datasets if not text_sources.kind_of(each).random] or [Dataset(source="stdlib")]


def needed(config: TrainConfig, number: int) -> dict[SplitName, int]:
    """Tokens that the run cannot do without, of one source."""
    train = math.ceil(_taken(config, number) / config.max_epochs)
    held = {part: held_count(config, number, part) for part in HELD_OUT}
    return {
        "train": train * config.seq_length + 1,
        **{part: windows * config.seq_length + 1 if windows else 0 for part, windows in held.items()},
    }


def _taken(config: TrainConfig, number: int) -> float:
    """Sequences that the run takes from one source, from where it began to."""
    share = config.datasets[number].weight / math.fsum(each.weight for each in config.datasets)
    return (config.sequences - origin_of(config, number)[0]) * share


def too_short(config: TrainConfig, number: int, part: SplitName, count: int) -> str:
    source, wanted = config.datasets[number], needed(config, number)[part]
    windows = (count - 1) // config.seq_length
    enough = f" to {math.ceil(_taken(config, number) / windows)}" if windows > 0 else ""
    what, help = {
        "train": ("training", f"train less, or raise MAX_EPOCHS{enough}"),
        "validation": ("validation", "raise HELD_OUT, or lower EVAL_SEQUENCES"),
        "test": ("test", "raise HELD_OUT, or lower TEST_SEQUENCES"),
    }[part]
    more = "add another source" if text_sources.kind_of(source).of_python else "give it more text"
    return (
        f"dataset {source.source}: {count:,} {what} tokens where the run needs {wanted:,}: {wanted - count:,} are "
        f"missing; {more}, {help}"
    )


def useful(config: TrainConfig, number: int) -> dict[SplitName, int]:
    """Tokens that the run can make use of: with so many no sequence comes twice, whatever genomes draw from it."""
    least, sequences = needed(config, number), config.sequences - origin_of(config, number)[0]
    return {**least, "train": max(least["train"], sequences * config.seq_length + 1)}


def held_count(config: TrainConfig, number: int, on: str) -> int:
    """Windows of one source's share; none of one that is only learned from."""
    sequences = config.test_sequences if on == "test" else config.eval_sequences
    source, evaluated = config.datasets[number], math.fsum(each.weight for each in config.datasets if each.evaluated)
    return math.ceil(sequences * source.weight / evaluated) if source.evaluated else 0


def origin_of(config: TrainConfig, number: int) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Of one source: `first` and `earlier` of its token file."""
    first, earlier = 0, list[tuple[int, int]]()
    for fork in config.forked:
        if windows := fork.windows[number] if number < len(fork.windows) else 0:
            earlier.append((fork.sequences - first, windows))
        else:
            first, earlier = fork.sequences, []
    return first, tuple(earlier)
