"""What the tasks of a merge search are told."""

from typing import Any

from fleet.tasks import Args


class MergeArgs(Args):
    recipe: dict[str, Any]  # of the merge engine


class ScoreArgs(MergeArgs):
    on: str
    rival: str = ""  # in a race: the candidate to be ahead of


class TwinArgs(Args):
    twin: str  # who has the same recipe
    on: str
