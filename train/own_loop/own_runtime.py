"""What a worker makes members with where the user's loop trains: the same tasks as those of pre-training."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from fleet.plain import say
from fleet.tasks import Task, dispatcher
from fleet.work import CannotServe, InputMember, Maker, NotOnThisMachine, Work
from train.fixed_order import in_fixed_order
from train.member import exchange_tasks, vectors
from train.member.exchange_tasks import outer_of
from train.member.global_model import GlobalModel
from train.member.inner_loop import Metrics
from train.member.own_fragments import OwnFragments
from train.member.vectors import WEIGHTS, FillStart, Joining, Moment, file_of, outer_stems, parents_of
from train.own_loop import beside, loop_genome
from train.own_loop.beside import BUFFERS, KeptBeside
from train.own_loop.loop_genome import LoopGenome
from train.own_loop.own_model import OwnModel, finite
from train.own_loop.state_tree import first_difference
from train.own_loop.turn_taking import HandOver, OwnTurn
from train.own_loop_config import OwnLoopConfig
from train.recipe_arguments import FIRST, ChildArgs, EvaluationArgs, InitArgs, ShardArgs, Turn
from train.splits import EvalSplit
from train.vector_layout import VectorLayout
from train.verdicts import NotFinite, with_verdicts

MODEL = "model.json"  # of 0/init-0: what all processes have alike
_SAME = {"parameters": "parameter", "buffers": "buffer", "names": "tensor", "frozen": "what is frozen in"}
_ADVICE = "a smaller batch, or a model in narrower numbers, needs less"


class OwnLoopRuntime:
    def __init__(self, config: OwnLoopConfig, model: OwnModel, hands: HandOver) -> None:
        self.config, self.model, self.hands = config, model, hands
        self.outer, self.global_model, self.own = outer_of(config), GlobalModel(), OwnFragments()
        self.usual = loop_genome.usual(config)
        self._checked = self._moved = False  # as the run's; other than it began

    def layout(self, work: Work) -> VectorLayout:
        """Of the run's model, which is this process's, too."""
        self.check(work)
        return self.model.layout

    # -- training -----------------------------------------------------------------------------------------------------

    def train(
        self, work: Work, turn: Turn, start: Tensor, fill_start: FillStart, genome: LoopGenome
    ) -> tuple[Tensor, Metrics]:
        """Hand the model over to the user's loop until it has taken the turn's steps."""
        own = OwnTurn(turn.round, turn.slot, turn.steps, dict(genome.values), self.config.seed)
        if saved := work.resume():
            self._resume(saved, own)
        else:
            self._load_weights(start)
            self.inherit(work, turn, fill_start)

        def save(saver: Any) -> Mapping[str, Any]:
            vectors.save(saver, WEIGHTS, self.hands.ask("weights"))
            said, found = self._beside()
            for moment, vector in zip(said.moments, found.values(), strict=True):
                vectors.save(saver, moment.stem, vector)
            saver.write(beside.FILE, said.data())
            reported, total = finite(own.reported), _finite(own.total)
            return {"total": total, "losses": own.losses, "drawn": own.drawn, "reported": reported}

        work.steps = turn.steps
        for done in self.hands.train(own):
            if done < turn.steps:
                work.between_steps(done, save)
        self.hands.ask("check_finite")
        return self.hands.ask("weights"), self._told(turn, own)

    def _resume(self, saved: Any, own: OwnTurn) -> None:
        own.done, own.total = saved.step, saved.state["total"]
        own.drawn, own.reported = [*saved.state["drawn"]], dict(saved.state["reported"])
        own.number, own.losses = own.drawn[-1] if own.drawn else 0, saved.state["losses"]
        size = self.model.layout.size
        self._load_weights(vectors.read(lambda _, stem, room: vectors.load(saved, stem, room), [], WEIGHTS, size))
        self._load_beside(beside.read(saved.read(beside.FILE)), lambda stem, room: vectors.load(saved, stem, room))

    def _told(self, turn: Turn, own: OwnTurn) -> Metrics:
        metrics: Metrics = {**finite(own.reported)}
        if own.losses:
            metrics["train_loss"] = _finite(own.total) / turn.steps
        if isinstance(turn, ChildArgs) and not self.model.evaluates and own.losses:
            metrics.setdefault("loss", metrics["train_loss"])
        return metrics

    # -- what goes on beside the weights ------------------------------------------------------------------------------

    def inherit(self, work: Work, turn: Turn, fill_start: FillStart) -> None:
        """Vectors are the mean of the parents'; all else is the slot's own, or where it was absent the first one's."""
        parents = parents_of(work)
        averaged, before = beside.same_in(parents), work.inputs.get(turn.before)
        own = beside.first_of([before, *parents])
        self._load_beside(own if own.moments == averaged.moments else averaged, fill_start)

    def moments(self, work: Work) -> Iterator[tuple[Moment, Tensor]]:
        said, found = self._beside(forget=not self.config.keeps_moments)
        work.write(beside.FILE, said.data())
        yield from zip(said.moments, found.values(), strict=True)

    def exchanged(self, work: Work) -> list[tuple[str, int, str]]:
        """Of what a member goes on from: its stem, how many numbers, and the wire that they go through."""
        state = [(stem, work.inputs[FIRST].metrics["parameters"], self.config.wire) for stem in outer_stems(self.outer)]
        moments = beside.same_in(parents_of(work)).moments
        return state + [(moment.stem, moment.count, moment.wire) for moment in moments]

    def first_moments(self, parent: InputMember) -> Iterator[tuple[Moment, Tensor]]:
        for moment in beside.first_of([parent]).moments:
            yield moment, vectors.read(vectors.joined, [parent], moment.stem, moment.count)

    def averaged(self, old: InputMember, replicas: Sequence[InputMember]) -> tuple[Moment, ...]:
        return beside.same_in(replicas).moments

    def _beside(self, forget: bool = False) -> tuple[KeptBeside, dict[str, Tensor]]:
        plain, states = self.hands.ask("beside", forget)
        buffers = self.hands.ask("buffer_vector")
        said = beside.kept_beside(self.config, plain, buffers, states)
        return said, {key: buffers if key == BUFFERS else states[key.removeprefix("state-")] for key in said.keys}

    def _load_beside(self, said: KeptBeside, filled: Callable[[str, Tensor], None]) -> None:
        buffers, states = said.parted(filled)
        self.hands.ask("load_buffers", buffers)
        self.hands.ask("load_beside", said.plain, states)

    # -- genomes ------------------------------------------------------------------------------------------------------

    def inherited(self, turn: Turn, parents: Sequence[Mapping[str, Any]]) -> LoopGenome:
        return loop_genome.inherited(self.config, turn.slot, turn.round, parents)

    def fittest(self, parents: Sequence[Mapping[str, Any]]) -> LoopGenome:
        return loop_genome.fittest(self.config, parents)

    def advice(self, genome: LoopGenome) -> str:
        """To whoever's training diverges."""
        return "try a lower learning rate, or clip the gradient, in a run with another PROJECT_NAME"

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def evaluate(self, work: Work, weights: Tensor, on: EvalSplit) -> Metrics:
        """By the user's function, if there is one. A member has its own buffers; all together have their mean."""
        if not self.model.evaluates:
            return {}
        self._load_weights(weights)
        if joining := _JOINING.get(work.recipe.task):
            said, members = beside.first_of(parents_of(work)), parents_of(work)
            if self.model.of_two_modes:
                self._load_beside(said, partial(joining, members))
            self.hands.ask("load_buffers", beside.buffers_of(said, joining, members))
            self.hands.ask("load_counters", said.plain["counters"])
        self.hands.ask("seed", self.config.seed)
        return dict(self.hands.ask("evaluate"))

    # -- one model ----------------------------------------------------------------------------------------------------

    def begin(self, work: Work) -> Metrics:
        """The first model of all: this process's, as it came."""
        if self._moved:
            raise NotOnThisMachine("only a process that has not trained yet can make the first model: start one more")
        vectors.save_weights(work, self.hands.ask("weights"), self.model.layout)
        for moment, vector in self.moments(work):
            vectors.save(work, file_of(moment.stem), vector, moment.wire)
        work.write(MODEL, json.dumps(self.model.described, indent=1).encode())
        return {"parameters": self.model.layout.size, "moments": 0}

    def check(self, work: Work) -> None:
        """Whether this process has what the run began with."""
        if not self._checked:
            self.check_beside(json.loads(work.inputs[FIRST].read(MODEL)))

    def check_beside(self, theirs: Mapping[str, Any]) -> None:
        mine = self.model.described
        for what, named in _SAME.items():
            if name := unlike(mine[what], theirs[what]):
                here, there = (said(each[what].get(name)) for each in (mine, theirs))
                raise CannotServe(f"another model than the run's: {named} {name} is {here} here, and {there} there")
        if found := first_difference(mine["beside"], theirs["beside"]):
            raise CannotServe(f"what learns beside the model begins otherwise than in the run: {found} there")
        if name := unlike(mine["first"], theirs["first"]):
            say(f"Note: {name} begins with other numbers here than in the run, whose numbers count; a seed before the "
                "model is made (torch.manual_seed) lets a run be repeated.")  # fmt: skip
        self._checked = True

    def _load_weights(self, vector: Tensor) -> None:
        self._moved = True
        self.hands.ask("load_weights", vector)


_JOINING: Mapping[str, Joining] = {"mean": vectors.mean, "global": vectors.joined}


def own_maker(config: OwnLoopConfig, runtime: OwnLoopRuntime) -> Maker:
    in_fixed_order(config.threads, config.deterministic)
    return with_verdicts(lambda: runtime, dispatcher(TASKS), _ADVICE)


def make_own_child(runtime: OwnLoopRuntime, work: Work, turn: ChildArgs) -> Metrics:
    metrics, c = exchange_tasks.make_child(runtime, work, turn), runtime.config
    if (c.draws_parents or c.genes) and not {"loss", "fitness", "diverged"} & metrics.keys():
        raise CannotServe(
            f"nothing says who is fit, which {f'SELECTION {c.selects}' if c.draws_parents else 'GENES'} goes by: "
            "hand over evaluate=, give run.step the loss, or run.report(fitness=...) before a round's last step"
        )
    return metrics


def cut_first(runtime: OwnLoopRuntime, work: Work, args: ShardArgs) -> Metrics:
    return _carried(work, exchange_tasks.cut_shard(runtime, work, args))


def make_own_shard(runtime: OwnLoopRuntime, work: Work, args: ShardArgs) -> Metrics:
    metrics = exchange_tasks.make_shard(runtime, work, args)
    return metrics if work.early else _carried(work, metrics)


def _carried(work: Work, metrics: Metrics) -> Metrics:
    """For slots whose own last member is absent."""
    source = next(each for each in work.inputs.values() if beside.FILE in each.files)
    work.write(beside.FILE, source.read(beside.FILE))
    return metrics


def unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The first name that stands for something else, or is missing."""
    return next((name for name in {**one, **other} if one.get(name) != other.get(name)), "")


def said(value: Any) -> str:
    """A kind of numbers and a shape; or a digest."""
    return "missing" if value is None else " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _finite(total: Any) -> float:
    if not math.isfinite(value := float(total)):
        raise NotFinite(f"the loss became {value}")
    return value


TASKS: Mapping[str, Task[OwnLoopRuntime]] = {
    "init": Task(lambda runtime, work, args: runtime.begin(work), InitArgs),
    "cut": Task(cut_first, ShardArgs),
    "replica": Task(exchange_tasks.make_replica, Turn),
    "shard": Task(make_own_shard, ShardArgs, early=True),
    "half": Task(make_own_shard, ShardArgs, early=True),
    "global": Task(exchange_tasks.evaluate_global, EvaluationArgs),
    "child": Task(make_own_child, ChildArgs),
    "mean-part": Task(exchange_tasks.make_mean_part, ShardArgs),  # makes a range of a group's mean
    "mean": Task(exchange_tasks.evaluate_mean, EvaluationArgs),  # evaluates the mean of a generation
}
