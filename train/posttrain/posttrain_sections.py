"""The keys of post-training: who competes, by what, how parents are merged, what their children learn."""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import field_validator, model_validator

from fleet.run_config import Section, Text, bound
from train.fitness_config import OF_FITNESS_FROM, OF_FITNESS_QUESTIONS, FitnessFrom
from train.parent_selection import RULES
from train.rl.rl_config import CORRECT, Es, Grpo
from train.training_config import OF_DETERMINISTIC, OF_PRECISION, Precision

if TYPE_CHECKING:
    Selection = str
else:
    Selection = Literal[*RULES, "matching", "pbt"]

SLERP = {
    "method": "slerp",
    "t": [
        {"filter": "self_attn", "value": [0, 0.5, 0.3, 0.7, 1]},
        {"filter": "mlp", "value": [1, 0.5, 0.7, 0.3, 0]},
        {"value": 0.5},
    ],
}
LOSS, REWARD = "loss", "reward"
GYM = "gym:"  # of the names of reasoning-gym's generators
ES = "es"  # evolution strategies: the algorithm, and what it does to its one model


class Objective(Section):
    """What members are compared by."""

    task: Text = bound(..., "A task of lm-eval; or loss or reward: on held-out rows of MUTATION_DATASETS.")
    metric: Text = bound("acc,none", "What counts of a task; of reward, which term: correct, if nothing is said.")
    weight: float = bound(
        1.0,
        "Its share of the fitness; negative where a task's metric is the better the lower. Of loss always above 0.",
        ge=-1e6,
        le=1e6,
    )

    @property
    def name(self) -> str:
        return self.task

    @property
    def key(self) -> str:
        return self.task if self.metric == "acc,none" or self.task == LOSS else f"{self.task}:{self.metric}"

    @property
    def term(self) -> str:
        """Of reward, by a checker that no genome touches."""
        return CORRECT if self.metric == "acc,none" else self.metric

    @property
    def of_lm_eval(self) -> bool:
        return self.task not in (LOSS, REWARD)


class DatasetSource(Section):
    """Rows to learn from: conversations, or text; preferences for MUTATION dpo, questions and answers for grpo."""

    source: Text = bound(
        ..., '"skill:..." (built in), a local .jsonl or .parquet file, or a hub dataset; of grpo also "gym:...".'
    )
    weight: float = bound(1.0, "Of the first members' genomes.", ge=0, le=1e6)
    name: str = bound("", "Hub: which configuration of the dataset.")
    split: Text = bound("train", "Hub: which split.")
    options: dict[str, Any] = bound({}, '"gym:...": how hard, as the generator of reasoning-gym calls it.')

    @property
    def is_file(self) -> bool:
        return self.source.endswith((".jsonl", ".parquet"))

    @model_validator(mode="after")
    def _of_the_hub(self) -> "DatasetSource":
        if self.options and not self.source.startswith(GYM):
            raise ValueError(f"{self.source} is no generator of reasoning-gym: it has no options")
        if self.is_file and (self.name or self.split != "train"):
            raise ValueError(f"{self.source} is a file: it has no name and no split")
        return self


class Adapter(Section):
    """What is put beside which weights."""

    r: int = bound(64, "Its rank.", ge=1, le=4096)
    alpha: float = bound(16.0, "Its scale: it counts alpha / r times.", gt=0, le=1e6)
    targets: Literal["all-linear"] | tuple[Text, ...] = bound(
        "all-linear", "All linear layers but the head, or those with one of these parts in their names."
    )
    four_bits: bool = bound(False, "Keep the model's own weights in 4 bits while it learns; on a CUDA device only.")

    @field_validator("targets", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value


class BreedSection(Section):
    """Who competes, and who has children with whom."""

    initial_population: tuple[Text, ...] = bound(
        ..., "Hub ids, local folders or .gguf files to begin with.", min_length=1, max_length=256, strict=False
    )
    trust_remote_code: bool = bound(False, "Let models and tokenizers of the hub run code of their own.")
    population_size: int = bound(6, "Members of a generation; of es, perturbations.", ge=1, le=4096)
    max_generations: int = bound(5, "Generations.", ge=1, le=90_000)
    selection: Selection = bound(
        "rank",
        "Who the parents are; matching: everybody equally often; pbt: each its own, and the worst copy the best.",
    )
    tournament_size: int = bound(
        2, "SELECTION tournament, pareto and niches: so many compete to be a parent.", ge=1, le=4096
    )
    archive_steps: int = bound(
        3,
        "SELECTION archive: the fittest member of each cell stays and is a parent; a cell is one of so many steps of "
        "each objective, between the worst and the best of the first generation.",
        ge=2,
        le=100,
    )
    mates: Literal["selection", "attraction"] = bound(
        "selection",
        "Who the second parent is. attraction: the likelier, the more it solves of what the first does not, above all "
        "of what few solve.",
    )
    elitism: int = bound(1, "So many of the best go on unchanged.", ge=0, le=4095)
    crossover: dict[str, Any] = bound(SLERP, "A method of the merge engine with its parameters, as in recipes.")
    crossover_evolves: bool = bound(False, "Curves of CROSSOVER are genes, too.")


class FitnessSection(Section):
    """By what members compete."""

    fitness: tuple[Objective, ...] = bound(
        (Objective(task=LOSS),), '"loss", or tasks of lm-eval: names, or objects.', min_length=1, strict=False
    )
    task_path: tuple[Text, ...] = bound((), "Folders with tasks of one's own.", strict=False)
    allow_benchmark_tasks: bool = bound(False, "Let lm-eval's own tasks be the target: public test sets.")
    num_fewshot: int | None = bound(None, "Examples in prompts.", ge=0)
    questions: int = bound(
        64,
        "Of each task (or a data set's held-out rows), drawn for each generation from all that are for validation; a "
        "task's, of irt, once.",
        ge=2,
        le=10**6,
    )
    fitness_from: FitnessFrom = bound("all", OF_FITNESS_FROM)
    fitness_questions: int = bound(0, OF_FITNESS_QUESTIONS, ge=0, le=10**6)
    holdout: float = bound(0.5, "The share of questions that only the end asks.", gt=0, lt=1)


class MutationSection(Section):
    """What children learn, and how."""

    tasks_digest: str = bound("", "Of FITNESS's questions; found out by whoever starts the run.")
    verifier_digest: str = bound("", "Of GRPO's verifier; found out by whoever starts the run.")
    mutation: Literal["sft", "dpo", "grpo", "es", "none"] = bound(
        "sft", "How a child is trained on its data; es is for ALGORITHM es, which says so by itself."
    )
    mutation_datasets: tuple[DatasetSource, ...] = bound(
        (), "Data that genomes choose from; each a name or an object.", strict=False
    )
    mutation_probability: float = bound(0.5, "The share of children whose genes are mutated.", ge=0, le=1)
    mutation_strength: float = bound(0.5, "How far: the deviation of a factor's logarithm.", ge=0, le=10)
    top_k: int = bound(0, "Learn from so many data sets of the greatest weights; 0: from all, in proportion.", ge=0)
    sft_examples: int = bound(
        1000, "Rows that a child learns from; of grpo, its own questions; of es, a round's.", ge=1, le=10**9
    )
    sft_epochs: float = bound(1.0, "How often; of grpo, from each answer.", gt=0, le=1000)
    dpo_beta: float = bound(0.1, "MUTATION dpo: how far it may go from where it began.", gt=0, le=100)
    grpo: Grpo | None = bound(None, "MUTATION grpo: a child learns from rewards of its own answers.")
    es: Es | None = bound(None, "ALGORITHM es: how a round's perturbations are made and rewarded.")
    adapter: Adapter | None = bound(None, "LoRA instead of all weights; of one given model, members are adapters, too.")
    batch_size: int = bound(
        8, "Rows of a micro-batch, each of SEQ_LENGTH tokens; of questions, as many tokens at a time.", ge=1, le=65536
    )
    gradient_accumulation: int = bound(1, "Micro-batches of one step, BATCH_SIZE rows each.", ge=1, le=65536)
    seq_length: int = bound(512, "Tokens of a row, in which several examples may stand.", ge=8, le=10**6)
    lr: float = bound(1e-4, "The highest learning rate; of es, every round's.", gt=0, le=10)
    lr_schedule: Literal["cosine", "constant", "linear"] = bound(
        "cosine", "How the rate falls: cosine: to a tenth; linear: to nothing; constant: not at all."
    )
    warmup_steps: int = bound(10, "Steps of linear warm-up; half of all steps at most.", ge=0, le=10**8)
    weight_decay: float = bound(0.0, "Weight decay of matrices; of es, towards the given model.", ge=0, le=10)
    clip: float = bound(1.0, "The largest norm of a step's gradient; 0 does not clip.", ge=0, le=1e6)
    precision: Precision = bound("auto", OF_PRECISION)
    deterministic: bool = bound(True, OF_DETERMINISTIC)
    dtype: Literal["", "float32", "bfloat16", "float16"] = bound(
        "", "Of members' files; empty: the first model's own, of es float32."
    )
