"""The configuration of post-training: all of its keys together, and what cannot work among them."""

from collections.abc import Iterator
from typing import Any

from pydantic import field_validator, model_validator

from fleet.run_config import FleetConfig
from train.fitness_config import FEW_ALONE
from train.parent_selection import RULES
from train.posttrain.posttrain_sections import (
    ES,
    GYM,
    LOSS,
    REWARD,
    BreedSection,
    FitnessSection,
    MutationSection,
    Objective,
)
from train.rl.rl_config import Answering, Es, Grpo

_NOT_OF_ES = (
    *("selection", "tournament_size", "archive_steps", "mates", "elitism", "crossover", "crossover_evolves"),
    *(
        "mutation_probability",
        "mutation_strength",
        "sft_epochs",
        "dpo_beta",
        "adapter",
        "gradient_accumulation",
        "lr_schedule",
    ),
    *("warmup_steps", "clip", "fitness_from", "fitness_questions"),
)  # keys that say nothing to it


class PosttrainConfig(MutationSection, FitnessSection, BreedSection, FleetConfig):
    """All of them together."""

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, values: Any) -> Any:
        """Names stand for objects with nothing but a name."""
        if not isinstance(values, dict):
            return values
        found = dict(values)
        if found.get("algorithm") == ES:
            found = {"mutation": ES, "fitness": REWARD, **found}
        for how in ("grpo", ES):
            if found.get("mutation") == how and found.get(how) is None:
                found[how] = {}
        if isinstance(fitness := found.get("fitness"), str):
            found["fitness"] = (fitness,)
        for key, name in (("fitness", "task"), ("mutation_datasets", "source")):
            if isinstance(found.get(key), (list, tuple)):
                found[key] = tuple({name: each} if isinstance(each, str) else each for each in found[key])
        return found

    @field_validator("crossover")
    @classmethod
    def _method(cls, crossover: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(crossover.get("method"), str):
            raise ValueError('{"method": "slerp", "t": 0.5}, with a method of the merge engine, is expected')
        return crossover

    @model_validator(mode="after")
    def _together(self) -> "PosttrainConfig":
        if found := next((what for there, what in self._problems() if there), ""):
            raise ValueError(found)
        return self

    def _problems(self) -> Iterator[tuple[object, str]]:
        """Each possible one, and whether it is there."""
        size, data, learns = self.population_size, self.mutation_datasets, self.mutation != "none"
        repeated = ", ".join({each.key: "" for each in self.fitness if self.fitness.count(each) > 1})
        rule = RULES.get(self.selection)
        twice = next((each for each in self.initial_population if self.initial_population.count(each) > 1), "")
        yield twice, f"INITIAL_POPULATION names {twice} twice: of one model, members differ by their genomes already"
        yield self.elitism >= size, f"ELITISM is {self.elitism}: it must be below POPULATION_SIZE, which is {size}"
        yield (
            self.selection == "pbt" and self.elitism,
            f"ELITISM is {self.elitism}: with SELECTION pbt everybody goes on learning; it must be 0",
        )
        yield (
            size == 1 and self.mutation != ES and self.selection != "pbt",
            f"POPULATION_SIZE is 1, and SELECTION {self.selection}: with pbt one member goes on by itself",
        )
        yield (
            self.archives and self.elitism,
            f"ELITISM is {self.elitism}: with SELECTION archive the fittest go on in any case; it must be 0",
        )
        yield self.quorum < 1, "QUORUM is below 1, but a generation is complete only with all of its members"
        yield repeated, f"FITNESS has {repeated} twice"
        yield not any(each.weight for each in self.fitness), "FITNESS: all weights are 0"
        yield (
            any(each.task == LOSS and each.weight < 0 for each in self.fitness),
            "FITNESS: loss counts as less is better already; give it a weight above 0",
        )
        yield from self._problems_of_es()
        yield from self._problems_of_rewards()
        yield (
            learns and not data,
            f"MUTATION is {self.mutation}, but MUTATION_DATASETS is empty: there is nothing to learn from",
        )
        yield data and not sum(each.weight for each in data), "MUTATION_DATASETS: all weights are 0"
        yield (
            not learns and data and not self.asks_loss,
            "MUTATION_DATASETS have no effect: MUTATION is none, and FITNESS asks for no loss",
        )
        yield (
            not learns and len({*self.initial_population}) < 2,
            "MUTATION is none, and INITIAL_POPULATION has one model: nothing would ever change",
        )
        yield (
            self.asks_loss and not data,
            "FITNESS asks for the loss on held-out rows of MUTATION_DATASETS, and there are none",
        )
        yield self.top_k > len(data), f"TOP_K is {self.top_k}, of {len(data)} MUTATION_DATASETS"
        yield from self._problems_of_few_questions()
        yield (
            self.mates != "selection" and self.selection in ("matching", "pbt"),
            f"MATES is {self.mates}, but SELECTION {self.selection} says who the parents are",
        )
        yield (
            rule and rule.several and len(self.fitness) < 2,
            f"SELECTION {self.selection} needs several objectives in FITNESS",
        )

    def _problems_of_es(self) -> Iterator[tuple[object, str]]:
        is_es, size = self.mutation == ES, self.population_size
        yield self.algorithm == ES and not is_es, f"MUTATION is {self.mutation}: with ALGORITHM es leave it out"
        yield is_es and self.algorithm not in ("", ES), f"MUTATION es is for ALGORITHM es, not {self.algorithm}"
        if not is_es:
            return
        fields = type(self).model_fields
        unused = [key for key in _NOT_OF_ES if getattr(self, key) != fields[key].default]
        yield unused, f"{', '.join(unused).upper()}: no effect with ALGORITHM es; leave it out"
        given = len(self.initial_population)
        yield given > 1, f"INITIAL_POPULATION has {given} models: ALGORITHM es goes on from one"
        yield size % 2, f"POPULATION_SIZE is {size}: with ALGORITHM es, members are pairs of opposites: {size + 1}"

    def _problems_of_rewards(self) -> Iterator[tuple[object, str]]:
        how, rewarded = self.mutation, any(each.task == REWARD for each in self.fitness)
        asks = how in ("grpo", ES)
        yield asks and self.asks_loss, f"FITNESS asks for the loss, but with MUTATION {how} rows are questions: reward"
        yield rewarded and not asks, "FITNESS asks for the reward, which only MUTATION grpo has"
        yield self.grpo and how != "grpo", f"GRPO has no effect: MUTATION is {how}"
        yield self.es and how != ES, f"ES has no effect: MUTATION is {how}"
        gym = next((each.source for each in self.mutation_datasets if each.source.startswith(GYM)), "")
        yield gym and not asks, f"{gym} asks questions, from which only MUTATION grpo learns"
        if self.answering:
            most, room = self.answering.max_tokens, self.seq_length
            too_long = f"{how.upper()}: max_tokens is {most}; with a question it must fit into SEQ_LENGTH, {room}"
            yield most >= room, too_long

    def _problems_of_few_questions(self) -> Iterator[tuple[object, str]]:
        how, races = self.fitness_from, self.fitness_from == "racing"
        yield (
            how != "all" and not self.tasks,
            f"FITNESS_FROM is {how}, which is about the questions of tasks, and FITNESS has none",
        )
        yield self.fitness_questions and how != "irt", f"FITNESS_QUESTIONS: {FEW_ALONE}"
        yield (
            races and self.compares_questions,
            "FITNESS_FROM is racing, but SELECTION or MATES compare what all members say to the same questions",
        )
        yield (
            races and self.selection == "pbt",
            "FITNESS_FROM is racing, but with SELECTION pbt nobody races another one",
        )
        yield (
            races and self.selection == "matching" and not self.elitism,
            "FITNESS_FROM is racing, but without ELITISM SELECTION matching knows nobody whom the others race",
        )

    @property
    def tasks(self) -> list[Objective]:
        """Of lm-eval."""
        return [each for each in self.fitness if each.of_lm_eval]

    @property
    def compares_questions(self) -> bool:
        """Parents are chosen by what they say to single questions."""
        return self.mates == "attraction" or self.selection in RULES and RULES[self.selection].marks

    @property
    def archives(self) -> bool:
        return self.selection in RULES and RULES[self.selection].archives

    @property
    def base_model(self) -> str:
        """Of CROSSOVER, where its method looks at what parents have changed."""
        return str(self.crossover.get("base_model", ""))

    @property
    def curves(self) -> dict[str, Any]:
        """The parameters of CROSSOVER's method."""
        return {key: value for key, value in self.crossover.items() if key not in ("method", "base_model")}

    @property
    def models(self) -> tuple[str, ...]:
        """All that are given: those that compete, and CROSSOVER's base model."""
        return tuple(dict.fromkeys(name for name in (*self.initial_population, self.base_model) if name))

    @property
    def travels_as_adapter(self) -> bool:
        """A member is what it has changed of the one model that is given."""
        return self.adapter is not None and self.mutation != "none" and len(self.models) == 1

    @property
    def asks_loss(self) -> bool:
        return any(each.task == LOSS for each in self.fitness)

    @property
    def asks_reward(self) -> bool:
        return any(each.task == REWARD for each in self.fitness)

    @property
    def answering(self) -> Answering | None:
        """Where its rows are questions."""
        return self.grpo or self.es

    @property
    def of_answers(self) -> Answering:
        assert self.answering is not None  # where its rows are questions
        return self.answering

    @property
    def of_es(self) -> Es:
        assert self.es is not None  # where ALGORITHM is es
        return self.es

    @property
    def of_grpo(self) -> Grpo:
        assert self.grpo is not None  # where MUTATION is grpo
        return self.grpo
