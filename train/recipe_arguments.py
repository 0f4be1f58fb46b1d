"""The arguments of training's recipes, a record for each task; and the recipes of round 0: what a run needs once,
before anybody trains."""

from collections.abc import Sequence

from fleet.recipe import Recipe
from fleet.tasks import Args
from train.exchange_config import ExchangeConfig
from train.splits import EvalSplit

TOKENIZER, FIRST = "0/tokenizer", "0/init-0"
OFF_DEVICE = frozenset({"cut", "shard", "half", "mean-part", "gathered"})  # tasks that only read, add and write


class InitArgs(Args):
    """A model to begin with."""

    entry: int  # of INITIAL_POPULATION
    name: str = ""


class SourceArgs(Args):
    """A data set as tokens."""

    source: int  # of DATASETS or MUTATION_DATASETS
    name: str = ""


class EvaluationArgs(Args):
    """What a model is evaluated on."""

    on: EvalSplit
    generation: int = 0  # of post-training, which draws its own questions
    rival: str = ""  # in a race: the member whose score has to be beaten
    calibration: str = ""  # the member that knows what answers say of each question, so that few are asked (irt)
    earlier: str = ""  # the member that has asked it few of them already


class Turn(Args):
    """A slot's turn to train."""

    round: int
    slot: int
    steps: int
    before: str = ""  # the slot's last member: its optimizer goes on, and it says whether its training came to nothing


class ChildArgs(Turn):
    """A child of pre-training (EDT)."""

    on: EvalSplit
    # the first so many of the recipe's `needs` are the parts of its parents' mean; 0: it averages its parents itself
    parts: int = 0


class ShardArgs(Args):
    """One of the ranges that a model is cut into: a shard of the global model (DiLoCo), or a part of a group's mean."""

    shard: int  # the range's number
    old: str = ""  # a shard's predecessor, whose weights the outer step changes; the first shards and means have none


class RolloutArgs(Args):
    """A policy's own answers, from which its child learns."""

    generation: int
    slot: int
    base: str = ""  # as in the child's own arguments


class PerturbationArgs(Args):
    """Of evolution strategies: a round's model, perturbed in two opposite directions."""

    generation: int
    pair: int
    base: str  # the model whose weights were published last
    since: str = ""  # the member whose log has the rewards of the rounds since then


class StepArgs(Args):
    """The log of rewards since the weights were published, one round longer."""

    pairs: int  # the recipe's first so many `needs` have this round's rewards
    since: str = ""  # the member whose log has those before


class PublishArgs(EvaluationArgs):
    """A round's model as files; the rest as in StepArgs and PerturbationArgs."""

    pairs: int
    base: str
    since: str = ""


class PosttrainChildArgs(EvaluationArgs):
    """A child of post-training."""

    slot: int
    technique: str
    base: str = ""  # the model that the merge counts changes from, where that is not one of the parents
    learns_by: str = ""  # sft, dpo, grpo; empty: it stays what its parents made it
    own_rollouts_id: str = ""  # grpo: the member with its policy's own answers
    others_rollouts_ids: list[str] = []  # and those with other policies' answers, which it learns from, too


def round_zero(c: ExchangeConfig, one_start: bool = False) -> list[Recipe]:
    """The tokenizer, the sources' tokens, the first weights: of several models, all have the first one's shape."""
    entries = range(1 if one_start else c.first_models)
    words = (TOKENIZER,) if c.text_sources else ()
    inits = [(InitArgs(entry=n).plain(), (*words, FIRST) if n else words) for n in entries]
    tokens = [SourceArgs(source=n).plain() for n in range(c.text_sources)]
    return [
        *(Recipe("tokenizer", "tokenizer", role="tool") for _ in words),
        *(Recipe(f"tokens-{n}", "tokens", (), words, "tool", args) for n, args in enumerate(tokens)),
        *(Recipe(f"init-{n}", "init", (), needs, "given", args) for n, (args, needs) in enumerate(inits)),
    ]


def token_files(c: ExchangeConfig) -> list[str]:
    return [f"0/tokens-{n}" for n in range(c.text_sources)]


def training_inputs(c: ExchangeConfig) -> list[str]:
    """What every recipe that trains or evaluates needs: the model's shape, and text."""
    return [FIRST, *token_files(c)]


def first_weights(c: ExchangeConfig, slot: int = 0) -> str:
    """Where a slot begins: at its entry of INITIAL_POPULATION."""
    return f"0/init-{slot % c.first_models}"


def last_of(slot: str, round: int) -> str:
    """The slot's own last member: the next one goes on with its optimizer, and knows whether it came to nothing."""
    return f"{round - 1}/{slot}" if round > 1 else ""


def unique(*ids: str, but: Sequence[str] = ()) -> tuple[str, ...]:
    """The ids, each once and in the order given; without empty ones, and without those in `but`."""
    return tuple(id for id in dict.fromkeys(ids) if id and id not in but)


def shards_in(round_zero: Sequence[Recipe]) -> int:
    """DiLoCo: in how many ranges round 0 has cut the model, and so the run goes on."""
    return sum(recipe.task == "cut" for recipe in round_zero)
