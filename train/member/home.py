"""What stays with a slot from round to round: its optimizer's moments, and what it has learned of those fragments of
the model whose turn has not come. The worker that has made the slot's last replica has it in memory; in files it stands
every HOME_EVERY rounds, and from there whoever takes the slot over goes on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fleet.payload import Files
from fleet.recipe import place
from fleet.work import InputMember, Work
from train.member import vectors
from train.member.vectors import file_of
from train.training_recipes import ReplicaArgs

LEARNED = "learned"  # the stem of what was learned and not yet exchanged
LEARNED_WIRE = "int8"
Kept = dict[str, Tensor]  # by their stems


@dataclass(frozen=True)
class Found:
    """A slot's state as its next replica finds it."""

    kept: Kept = field(default_factory=dict)
    source: InputMember | None = None  # where the rest stands
    lost: int = 0  # rounds of which nothing is left

    def learned(self, size: int) -> Tensor | None:
        """Not yet exchanged; what was published before the last round has been exchanged since, or is out of date."""
        if LEARNED in self.kept:
            return self.kept[LEARNED]
        if self.lost or self.source is None or file_of(LEARNED) not in self.source.files:
            return None
        return vectors.read(vectors.joined, [self.source], LEARNED, size)

    def begun(self, stem: str, into: Tensor) -> None:
        """The optimizer's moments; nothing, where there are none."""
        if stem in self.kept:
            into.copy_(self.kept[stem])
        elif self.source and file_of(stem) in self.source.files:
            vectors.load(self.source, file_of(stem), into)
        else:
            into.zero_()


class Home:
    """Of all slots that this worker has worked for."""

    def __init__(self) -> None:
        self._kept = dict[int, tuple[Files, Kept]]()  # by slots: after which files of its replica, what is kept

    def find(self, work: Work, turn: ReplicaArgs) -> Found:
        before, round = work.inputs.get(turn.before), place(work.id)[0]
        files, kept = self._kept.get(turn.slot, ({}, {}))
        if before and files == before.files:
            return Found(kept)
        if before and turn.home == turn.before:
            return Found(source=before)
        source = work.inputs.get(turn.home)
        since = place(source.member.origin)[0] if source else 0
        return Found(source=source, lost=max(0, round - 1 - since))

    def keep(self, work: Work, turn: ReplicaArgs, state: Mapping[str, tuple[Tensor, str]]) -> None:
        """Of each stem a vector and its wire; where it is published, this worker, too, goes on from what arrives."""
        kept = Kept()
        for stem, (vector, wire) in state.items():
            if turn.publishes:
                vectors.save(work, file_of(stem), vector, wire)
            kept[stem] = vectors.arrived(vector, wire) if turn.publishes else vector.clone()
        self._kept[turn.slot] = work.writer.known, kept
