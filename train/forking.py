"""What pre-training takes along when a run goes on from another: its configuration, how its text goes on, and what
stands for members that only the new method or more slots would have."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fleet.fork import Carried
from fleet.history import History
from fleet.recipe import Recipe, kept_as
from fleet.run_config import UserError
from train import text_sources
from train.exchange_config import Forked
from train.learner import rate
from train.recipe_arguments import EvaluationArgs, ShardArgs, shards_in, token_files, training_inputs
from train.splits import SPLITS
from train.token_budget import needed, too_short, useful
from train.training_config import TrainConfig

_FIXED = {  # and what of a run stands and falls with it
    "initial_population": "the weights have its shape",
    "tokenizer": "the weights know its words",
    "vocab_size": "the weights know the tokenizer's words",
    "held_out": "what was learned from would be among what is evaluated",
    "inner_optimizer": "the moments that go on are those of the other one",
    "fragments": "the model was cut for so many in round 0",
    "shards": "the model was cut into so many in round 0",
    "stdlib_digest": "the built-in text of this Python is another: use the one that began the run",
}
_TEXT = ("source", "name", "split", "text_field", "separator")


def forked(old: TrainConfig, new: TrainConfig, history: History, round: int, first: Sequence[Recipe]) -> Carried:
    """`first` is what the new configuration would do in round 0."""
    _check(old, new, round)
    config = new.model_copy(update={"forked": (*old.forked, _point(old, new, history, round))})
    anew = [id for n, id in enumerate(token_files(new)) if _made_anew(old, config, history, n)]
    plans = {}
    if begun := _round_0(old, new, history, first):
        plans[0] = [*history.plan(0), *begun]
    if bridge := [*_bridge(old, new, history, round)]:
        _check_bridge(old, new, history, round, bridge)
        plans[round] = [*history.plan(round), *bridge]
    return Carried(config, plans, anew, [*_notes(old, config, round, anew)])


def _check(old: TrainConfig, new: TrainConfig, round: int) -> None:
    was, now = (_with_moments(config.bound()) for config in (old, new))
    if old.forked and round < old.forked[-1].round:
        raise UserError(f"--round {round}: this run began after round {old.forked[-1].round}: fork the one before it")
    for key, why in _FIXED.items():
        if was[key] != now[key] and not (key == "stdlib_digest" and not (was[key] and now[key])):
            raise UserError(f"{key.upper()} cannot change: {why}; leave it as it is, or start a new run")
    if old.keeps_moments != new.keeps_moments:
        raise UserError(
            f"INNER_OPTIMIZER_STATE is {new.inner_optimizer_state} and was {old.inner_optimizer_state}: the files of "
            "its members have moments, or have none; leave it as it was, or start a new run"
        )
    if bool(old.outer_momentum) != bool(new.outer_momentum):
        raise UserError(
            f"OUTER_MOMENTUM is {new.outer_momentum} and was {old.outer_momentum}: members have a momentum's file or "
            "none; leave it at 0, or above 0, as it was, or start a new run"
        )


def _with_moments(bound: Mapping[str, Any]) -> Mapping[str, Any]:
    """Muon's and Muon+'s are the same."""
    return {**bound, "inner_optimizer": str(bound["inner_optimizer"]).removesuffix("+")}


def _point(old: TrainConfig, new: TrainConfig, history: History, round: int) -> Forked:
    steps = old.steps_before(round + 1)
    metrics = (history[id].metrics for id in token_files(old))
    windows = [(each["train"] - 1) // old.seq_length for each in metrics]
    same = old.seq_length == new.seq_length and old.seed == new.seed
    goes_on = tuple(windows[n] if same and _same_text(old, new, n) else 0 for n in range(len(new.datasets)))
    return Forked(round=round, steps=steps, sequences=old.first_number(steps), windows=goes_on)


def _same_text(old: TrainConfig, new: TrainConfig, number: int) -> bool:
    if number >= len(old.datasets):
        return False
    return all(getattr(old.datasets[number], key) == getattr(new.datasets[number], key) for key in _TEXT)


def _made_anew(old: TrainConfig, new: TrainConfig, history: History, number: int) -> bool:
    """Whether its tokens are others, or more of them are there to be had and used; complains where there are not."""
    if not _same_text(old, new, number):
        return True
    got = history[token_files(new)[number]].metrics
    other = text_sources.size(new.datasets[number]) != got.get("size", 0)
    wanted, least, before = useful(new, number), needed(new, number), useful(old, number)
    more = False
    for part in SPLITS:
        if got[part] < before[part]:  # that was all its text
            if other:  # the file has grown; who prepares the fork counts whether it suffices
                more = True
            elif got[part] < least[part]:
                raise UserError(too_short(new, number, part, got[part]))
        else:
            more = more or got[part] < wanted[part]
    return more


def _round_0(old: TrainConfig, new: TrainConfig, history: History, first: Sequence[Recipe]) -> list[Recipe]:
    """Recipes that are new there: tokens of more sources, and how DiLoCo's model is cut."""
    there, cut = {recipe.slot for recipe in history.plan(0)}, shards_in(history.plan(0))
    found = [recipe for recipe in first if recipe.slot not in there and recipe.role != "given"]
    return [recipe for recipe in found if recipe.task != "cut" or not cut]


def _bridge(old: TrainConfig, new: TrainConfig, history: History, round: int) -> Iterator[Recipe]:
    """Of the last round that is carried over: what the next one looks for there by name."""
    slot, before = ("replica-" if each.shares_one_model else "m" for each in (new, old))
    there = [recipe.slot for recipe in history.plan(round)]
    members = [each for each in there if re.fullmatch(rf"{before}[0-9]+", each)][: old.population_size]
    if new.shares_one_model and not old.shares_one_model:
        parents = tuple(f"{round}/{each}" for each in members)
        cut = shards_in(history.plan(0)) or new.shard_count
        for s in range(cut):
            yield Recipe(
                f"shard-{s}", "gathered", parents, tuple(training_inputs(new)), args=ShardArgs(shard=s).plain()
            )
    elif old.shares_one_model and not new.shares_one_model:
        shards = tuple(f"{round}/{each}" for each in there if re.fullmatch("shard-[0-9]+", each))
        yield Recipe("m0", "whole", shards, tuple(training_inputs(new)), args=EvaluationArgs(on="validation").plain())
        members = ["m0"]
    known = {*there, *(["m0"] if members == ["m0"] else [])}
    for k in range(new.population_size):
        if f"{slot}{k}" not in known:
            yield kept_as(f"{slot}{k}", f"{round}/{members[k % len(members)]}")


def _check_bridge(old: TrainConfig, new: TrainConfig, history: History, round: int, bridge: Sequence[Recipe]) -> None:
    """A round has one bridge, there; the way back is the run on its other side."""
    if {recipe.slot for recipe in bridge} & {recipe.slot for recipe in history.plan(round)}:
        raise UserError(
            f"--round {round}: this run has gone from {new.algorithm} to {old.algorithm} at this very round; fork the "
            "run that it goes on from, or a later round of this one"
        )


def _notes(old: TrainConfig, new: TrainConfig, round: int, anew: Sequence[str]) -> Iterator[str]:
    """What a person may not expect, a line each."""
    was, now, steps = old.population_size, new.population_size, old.steps_before(round + 1)
    if new.shares_one_model and not old.shares_one_model:
        yield f"DiLoCo's model begins as the mean of the {was} members of round {round}, with the mean of their moments"
        yield "genomes end here: DiLoCo has none"
    elif old.shares_one_model and not new.shares_one_model:
        yield f"all members begin as DiLoCo's model of round {round}; only mutation parts them, LR_SPREAD is of round 1"
    elif now > was:
        yield f"slots {was} to {now - 1} begin as copies of slots 0 to {was - 1}, in turn"
    elif now < was:
        yield f"slots {now} to {was - 1} end here; what they have learned since they last met others goes with them"
    last, following = rate(old, steps - 1), rate(new, steps)
    if new.lr_schedule != "constant" or new.lr != old.lr:
        yield f"the learning rate was {last:.3g} at the end of round {round} and is {following:.3g} from the next on"
    for id in anew:
        number = int(id.rpartition("-")[2])
        source, known = new.datasets[number].source, _same_text(old, new, number)
        goes_on = "the same text first; what was seen does not come again before the rest"
        more, other = f"more of {source} becomes tokens, {goes_on}", f"{source} is another source: it begins anew"
        yield more if known else other
    for number, windows in enumerate(new.forked[-1].windows):
        if not windows and number < len(old.datasets) and _same_text(old, new, number):
            key = "SEQ_LENGTH" if old.seq_length != new.seq_length else "SEED"
            yield f"{key} is another: {new.datasets[number].source} is read in another order, what was seen among it"
    for key in ("eval_sequences", "test_sequences"):
        if getattr(new, key) != getattr(old, key):
            yield f"{key.upper()} is another: losses before and after are of other text"
