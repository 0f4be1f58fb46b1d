"""Round 0 as recipes: what a run needs once, before anybody trains by himself."""

from collections.abc import Sequence

from fleet.recipe import Recipe
from train.config import TrainConfig
from train.pretraining_tasks import InitArgs, TokensArgs

TOKENIZER, FIRST = "0/tokenizer", "0/init-0"


def round_zero(c: TrainConfig, one_start: bool = False) -> list[Recipe]:
    """The tokenizer, the sources' tokens, the first weights."""
    entries = 1 if one_start else len(c.initial_population)
    return [
        Recipe("tokenizer", "tokenizer", role="tool"),
        *map(_tokens, range(len(c.datasets))),
        *map(_init, range(entries)),
    ]


def _tokens(source: int) -> Recipe:
    return Recipe(f"tokens-{source}", "tokens", (), (TOKENIZER,), "tool", TokensArgs(source=source).plain())


def _init(entry: int) -> Recipe:
    """All have the first one's shape."""
    needs = (TOKENIZER, FIRST) if entry else (TOKENIZER,)
    return Recipe(f"init-{entry}", "init", (), needs, "given", InitArgs(entry=entry).plain())


def token_files(c: TrainConfig) -> list[str]:
    return [f"0/tokens-{n}" for n in range(len(c.datasets))]


def tools(c: TrainConfig) -> list[str]:
    """What every recipe that trains or evaluates needs: the model's shape, and text."""
    return [FIRST, *token_files(c)]


def first_weights(c: TrainConfig, slot: int = 0) -> str:
    """Where a slot begins: at its entry of INITIAL_POPULATION."""
    return f"0/init-{slot % len(c.initial_population)}"


def last_of(slot: str, round: int) -> str:
    """The slot's own last member: the next one goes on with its optimizer, and knows whether it came to nothing."""
    return f"{round - 1}/{slot}" if round > 1 else ""


def unique(*ids: str, but: Sequence[str] = ()) -> tuple[str, ...]:
    """Each once, in the order given; none for an empty name, and none of `but`."""
    return tuple(id for id in dict.fromkeys(ids) if id and id not in but)


def shards_in(round_zero: Sequence[Recipe]) -> int:
    """DiLoCo: in how many ranges round 0 has cut the model, and so the run goes on."""
    return sum(recipe.task == "cut" for recipe in round_zero)
