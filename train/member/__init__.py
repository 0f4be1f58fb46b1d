"""From a recipe to a member: the one place where merging meets training."""

from collections.abc import Callable, Mapping
from typing import Any

from fleet.config import Wrong
from fleet.work import Failed, Maker, Work
from train.config import TrainConfig
from train.loop import NotFinite
from train.member import children, prepare, replicas
from train.member.studio import Studio

KINDS: Mapping[str, Callable[[Studio, Work], Mapping[str, Any]]] = {
    **{"tokenizer": prepare.make_tokenizer, "tokens": prepare.make_tokens, "init": prepare.make_init},
    **{"warm": replicas.make_warm, "cut": replicas.cut_shard, "replica": replicas.make_replica},
    **{"shard": replicas.make_shard, "global": replicas.look_at_global},
    **{"child": children.make_child, "mean": children.look_at_mean},
}


def maker(config: TrainConfig) -> Maker:
    """What a worker makes members with; it keeps its model in memory from one recipe to the next."""
    studio = Studio(config)

    def make(work: Work) -> Mapping[str, Any]:
        try:
            return KINDS[work.recipe.merge["method"]](studio, work)
        except (NotFinite, Wrong) as verdict:
            raise Failed(str(verdict)) from None

    return make
