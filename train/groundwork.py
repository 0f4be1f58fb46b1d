"""Round 0 as recipes: what a run needs once, before anybody trains by himself."""

from fleet.recipe import Recipe
from train.config import TrainConfig


def ground(c: TrainConfig, one_start: bool = False) -> list[Recipe]:
    """The tokenizer, the sources' tokens, the first weights, and the steps that all share."""
    entries = 1 if one_start else len(c.initial_population)
    inits = [
        Recipe(f"init-{n}", ("0/tokenizer", *(["0/init-0"] if n else [])), {"method": "init", "entry": n})
        for n in range(entries)
    ]
    tokens = [
        Recipe(f"tokens-{n}", ("0/tokenizer",), {"method": "tokens", "source": n}) for n in range(len(c.datasets))
    ]
    warm = Recipe("warm", ("0/init-0", *token_files(c)), {"method": "warm"}, {"round": 0, "steps": c.warm_start_steps})
    return [
        Recipe("tokenizer", merge={"method": "tokenizer"}),
        *tokens,
        *inits,
        *([warm] if c.warm_start_steps else []),
    ]


def token_files(c: TrainConfig) -> list[str]:
    return [f"0/tokens-{n}" for n in range(len(c.datasets))]


def tools(c: TrainConfig) -> list[str]:
    """What every recipe that trains or evaluates needs: the model's shape, and text."""
    return ["0/init-0", *token_files(c)]


def first_weights(c: TrainConfig, slot: int = 0) -> str:
    """Where a slot begins: at the warm start, or at its own entry of INITIAL_POPULATION."""
    return "0/warm" if c.warm_start_steps else f"0/init-{slot % len(c.initial_population)}"


def last_of(c: TrainConfig, slot: str, round: int) -> str:
    """The slot's own last member, whose optimizer the next one goes on with; empty where nothing of it goes on."""
    if c.inner_optimizer_state == "reset" and not c.error_feedback:
        return ""
    if round > 1:
        return f"{round - 1}/{slot}"
    return "0/warm" if c.warm_start_steps else ""


def unique(*ids: str) -> tuple[str, ...]:
    """Each once, in the order given; none for an empty name."""
    return tuple(id for id in dict.fromkeys(ids) if id)
