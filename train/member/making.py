"""What a worker of pre-training makes members with."""

from collections.abc import Callable, Mapping
from typing import Any

from fleet.work import Maker, Work
from train.config import TrainConfig
from train.loop import in_fixed_order
from train.member import children, prepare, replicas
from train.member.pretraining_runtime import PretrainingRuntime
from train.verdicts import judging

_ADVICE = (
    "a smaller BATCH_SIZE with as much more GRADIENT_ACCUMULATION, a smaller SEQ_LENGTH or EVAL_BATCH_SIZE, or more "
    "DEVICES_PER_WORKER need less, in a run with another PROJECT_NAME"
)

KINDS: Mapping[str, Callable[[PretrainingRuntime, Work], Mapping[str, Any]]] = {
    **{"tokenizer": prepare.make_tokenizer, "tokens": prepare.make_tokens, "init": prepare.make_init},
    **{"cut": replicas.cut_shard, "replica": replicas.make_replica, "shard": replicas.make_shard},
    **{"global": replicas.look_at_global},
    **{"child": children.make_child, "mean": children.look_at_mean},
}


def maker(config: TrainConfig) -> Maker:
    """What a worker makes members with; it keeps its model in memory from one recipe to the next."""
    in_fixed_order(config.threads)

    def make(runtime: PretrainingRuntime, work: Work) -> Mapping[str, Any]:
        return KINDS[work.recipe.merge["method"]](runtime, work)

    return judging(lambda: PretrainingRuntime(config), make, _ADVICE)
