"""What the tasks of post-training are told by EDT-EvoMerge."""

from fleet.tasks import Args


class GivenArgs(Args):
    """A model to begin with."""

    entry: int
    name: str


class DataArgs(Args):
    """A data set as tokens."""

    source: int
    name: str


class Questioned(Args):
    """Which questions are answered."""

    on: str
    generation: int = 0  # which draws its own


class BredArgs(Questioned):
    slot: int
    technique: str
    base: str = ""  # what the merge counts changes from, where that is none of the parents
    how: str = ""  # it learns; or it stays what its parents made it
