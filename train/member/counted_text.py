"""Whether there is text enough for a run, found out before anything is made."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import cache, partial
from itertools import islice

from fleet.busy_notice import saying
from fleet.errors import UserError
from train import text_sources
from train.splits import SplitName
from train.token_budget import needed, tokenizer_name, too_short
from train.training_config import Dataset, TrainConfig

Tell = Callable[[str], object]
Counts = Mapping[SplitName, int]  # of tokens
_COUNTED, _MUCH = 100_000, 4_000_000  # documents and characters beyond which nobody waits for them to be counted
_TOKEN, _SHORT, _FEW = 6, 3, 1024  # characters, at most, that a token stands for on average; where there are so few
_WHAT = {"train": "training"}


def check_text(config: TrainConfig, tell: Tell | None = None) -> None:
    """Complain of all sources that are too short before anything is made of them."""
    refuse_short(config, counted(config, tell=tell))


def refuse_short(config: TrainConfig, counts: Iterable[tuple[Dataset, Counts, Counts]]) -> None:
    short = [too_short(config, number, part, got[part])
             for number, (_, got, least) in enumerate(counts) for part in got if got[part] < least[part]]  # fmt: skip
    if short:
        raise UserError("\n".join(short))


def counted(
    config: TrainConfig, whole: bool = False, tell: Tell | None = None
) -> Iterator[tuple[Dataset, Counts, Counts]]:
    """Of each source: the tokens that are there, up to what is needed or all of them, and those that are needed. What
    takes a while is not counted: a file that is long, or what is no file."""
    count = cache(partial(_counter, config))
    for number, source in enumerate(config.datasets):
        least, got = needed(config, number), dict[SplitName, int]()
        if _is_counted(source, least, config, whole):
            with saying(f"counting the tokens of {source.source}", tell) if tell else nullcontext():
                got = count()(number, dict.fromkeys(least, sys.maxsize) if whole else least)
        yield source, got, least


def _counter(config: TrainConfig) -> Callable[[int, Counts], dict[SplitName, int]]:
    """Of so many tokens of a source, at most. Whatever makes text tokens takes seconds to load."""
    from train.member.pretraining_round_zero import named_tokenizer, own_tokenizer, tokens_of

    named = tokenizer_name(config)
    open_one = cache(lambda: named_tokenizer(named, config.trust_remote_code) if named else own_tokenizer(config))

    def count(number: int, wanted: Counts) -> dict[SplitName, int]:
        got = dict.fromkeys(wanted, 0)
        for _, part, found in tokens_of(config, number, open_one, 0, wanted, got):
            got[part] += len(found)
        return got

    return count


def _is_counted(source: Dataset, least: Counts, config: TrainConfig, whole: bool) -> bool:
    """A file that is not long, and the built-in text; unless all is wanted, only where the run needs much of it."""
    built_in = text_sources.kind_of(source).of_python
    if not built_in and not source.source.endswith(text_sources.FILES):
        return False
    characters = dict.fromkeys(least, 0)
    for part, document in islice(text_sources.divided(source, config.held_out), _COUNTED):
        characters[part] += len(document)
    if not built_in and (whole or sum(characters.values()) > _MUCH):
        return sum(characters.values()) <= _MUCH
    token = _TOKEN if tokenizer_name(config) or config.vocab_size > _FEW else _SHORT
    return any(token * least[part] > characters[part] for part in least)


def in_words(counts: Iterable[tuple[Dataset, Counts, Counts]]) -> Iterator[str]:
    """How many tokens each source has, and how many the run needs of it."""
    for source, got, least in counts:
        if text_sources.kind_of(source).random:
            continue
        parts = [f"{got[part]:,} {_WHAT.get(part, part)} (needs {least[part]:,})" for part in got]
        needs = ", ".join(f"{count:,} {_WHAT.get(part, part)}" for part, count in least.items())
        said = ", ".join(parts) or f"not counted (a long text, or no file); the run needs {needs}"
        yield f"{source.source}: tokens: {said}"
