"""What a worker of pre-training makes members with."""

from collections.abc import Mapping

from fleet.tasks import Task, making
from fleet.work import Maker
from train.config import TrainConfig
from train.loop import in_fixed_order
from train.member import children, prepare, replicas
from train.member.pretraining_runtime import PretrainingRuntime
from train.pretraining_tasks import ChildArgs, InitArgs, LookArgs, ShardArgs, TokensArgs, Turn
from train.verdicts import judging

_ADVICE = (
    "a smaller BATCH_SIZE with as much more GRADIENT_ACCUMULATION, a smaller SEQ_LENGTH or EVAL_BATCH_SIZE, or more "
    "DEVICES_PER_WORKER need less, in a run with another PROJECT_NAME"
)

TASKS: Mapping[str, Task[PretrainingRuntime]] = {
    "tokenizer": Task(prepare.make_tokenizer),
    "tokens": Task(prepare.make_tokens, TokensArgs),
    "init": Task(prepare.make_init, InitArgs),
    "cut": Task(replicas.cut_shard, ShardArgs),
    "replica": Task(replicas.make_replica, Turn),
    "shard": Task(replicas.make_shard, ShardArgs),
    "global": Task(replicas.look_at_global, LookArgs),
    "child": Task(children.make_child, ChildArgs),
    "mean": Task(children.look_at_mean, LookArgs),
}


def maker(config: TrainConfig) -> Maker:
    """What a worker makes members with; it keeps its model in memory from one recipe to the next."""
    in_fixed_order(config.threads)
    return judging(lambda: PretrainingRuntime(config), making(TASKS), _ADVICE)
