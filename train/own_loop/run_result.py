"""What a run with the user's loop has come to: weights of a member, or of all together, and what belongs to them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from fleet.history import History
from fleet.recipe import Member, name, round_and_slot
from fleet.run_config import UserError
from train.kept_rounds import files_of
from train.member import vectors
from train.member.exchange_tasks import outer_of
from train.member.vectors import FillStart
from train.own_loop import beside
from train.own_loop.beside import KeptBeside
from train.own_loop.turn_taking import HandOver
from train.own_loop_config import OwnLoopConfig
from train.parent_selection import unfitness
from train.recipe_arguments import FIRST

_SHARDS = "shard"


@dataclass(frozen=True)
class RunResult:
    members: tuple[Member, ...]
    weights: Tensor
    buffers: Tensor
    said: KeptBeside
    fill_start: FillStart

    def measured(self, history: History) -> list[Member]:
        """Whose metrics say how good it is: all together, where the run has looked at them, or each member."""
        ids = tuple(member.id for member in self.members)
        there = history.round(round_and_slot(ids[0])[0])
        looks = [each for each in there if each and each.recipe.role == "summary" and each.recipe.parents == ids]
        return looks or [*self.members]

    def into(self, hands: HandOver, of_two_modes: bool) -> None:
        """The user's model, which holds it from then on."""
        hands.ask("load_weights", self.weights)
        if of_two_modes:
            hands.ask("load_beside", self.said.plain, self.said.parted(self.fill_start)[1])
            hands.ask("show")
        hands.ask("load_buffers", self.buffers)
        hands.ask("load_counters", self.said.plain["counters"])


def result_of(history: History, c: OwnLoopConfig, what: str = "", round: int = 0) -> RunResult:
    """`average`, `best`, or a slot of a round, by default of the last one; by default the best where fitness selects,
    and else all together."""
    round = round or last_of(history)
    if not (there := members_of(history, round)):
        raise UserError(f"round {round} has no finished member; the last that has is {last_of(history)}")
    if what in ("", "best") and (what or c.draws_parents) and not c.shares_one_model:
        there = [min(there, key=lambda each: (unfitness(each.metrics), each.id))]
    elif what not in ("", "average", "best"):
        there = [one for one in there if one.id == name(round, what)]
        if not there:
            raise UserError(f"{name(round, what)} is no member whose weights could be had")
    return _together(history, c, there)


def last_of(history: History) -> int:
    """The last finished round of which somebody came."""
    rounds = (round for round in range(history.first_open - 1, 0, -1) if members_of(history, round))
    if found := next(rounds, 0):
        return found
    raise UserError("no round is finished yet; there is nothing to have")


def members_of(history: History, round: int) -> list[Member]:
    """Of DiLoCo: the shards of the global model."""
    there = [each for each in history.plan(round) if each.role == "member"]
    shards = [each for each in there if each.task == _SHARDS]
    return [member for each in shards or there if (member := history[name(round, each.slot)])]


def _together(history: History, c: OwnLoopConfig, members: Sequence[Member]) -> RunResult:
    files = [files_of(history, member.id) for member in members]
    size = files_of(history, FIRST).metrics["parameters"]
    join = vectors.joined if c.shares_one_model else vectors.mean
    weights, said = vectors.without_lookahead(outer_of(c), join, files, size), beside.first_of(files)
    return RunResult(tuple(members), weights, beside.buffers_of(said, join, files), said, partial(join, files))
