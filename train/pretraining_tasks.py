"""What the tasks of pre-training are told by its strategies: EDT, DiLoCo, and round 0."""

from fleet.tasks import Args


class Turn(Args):
    """A slot's turn to train."""

    round: int
    slot: int
    steps: int
    before: str = ""  # the slot's own last member: its optimizer goes on, and whether it came to nothing is known


class ChildArgs(Turn):
    on: str


class ShardArgs(Args):
    """A range of the model; of which other member's, if not the first weights'."""

    shard: int
    old: str = ""


class TokensArgs(Args):
    source: int  # of DATASETS


class InitArgs(Args):
    entry: int  # of INITIAL_POPULATION


class LookArgs(Args):
    on: str
