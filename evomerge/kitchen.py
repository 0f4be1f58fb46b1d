"""A worker's memory: the models, what they are asked, and the model that takes on one formula after the other."""

from collections.abc import Mapping
from typing import Any

import torch

from evomerge import fitness
from evomerge.checking import check_alike, check_causal
from evomerge.config import TournamentConfig
from evomerge.fitness import Jury
from evomerge.formula import Blend, Formula
from evomerge.making import Workshop
from fleet.config import Wrong
from merge.live import Live


class Kitchen:
    def __init__(self, config: TournamentConfig) -> None:
        torch.set_num_threads(config.threads)
        self.config, self.m = config, config.merge_settings
        models = {model.name: model.path for model in config.models}
        base = self.m.base_model.path if self.m.base_model else ""
        self.workshop = Workshop(
            models, base, threads=config.threads, dtype=self.m.dtype, trust=self.m.trust_remote_code
        )
        self.digest = fitness.digest(config.evaluation_settings)
        self._tasks: dict[str, Any] | None = None
        self._jury: tuple[str, Jury] | None = None

    def check(self) -> Mapping[str, Any]:
        """Whether these models can be merged and asked; how many layers they have."""
        references = [*self.config.models, *([self.m.base_model] if self.m.base_model else [])]
        check_alike(references)
        check_causal(references)
        layers = self.workshop.layers()
        if not layers:
            raise Wrong(f"{self.config.models[0].path}: its config.json does not say how many layers it has")
        names = tuple(model.name for model in self.config.models)
        even = Formula(blend=Blend(technique="linear", of=names, shares=((1.0,),) * len(names)))
        self.workshop.planned(even)
        self._asked(self.workshop.model(Formula(blend=names[0])))
        return {"layers": layers}

    def scored(self, formula: Formula, on: str) -> Mapping[str, Any]:
        live = self.workshop.model(formula)
        return self._asked(live).sat(live.model, on)

    def _asked(self, live: Live) -> Jury:
        """Models of one tokenizer share what they are asked."""
        if self._jury is None or self._jury[0] != live.words:
            seed, e = self.config.evolution_settings.seed, self.config.evaluation_settings
            if self._tasks is None:
                self._tasks = fitness.load_tasks(e, seed)
            longest = getattr(live.model.config, "max_position_embeddings", None)
            self._jury = live.words, Jury(e, seed, live.tokenizer, longest, self._tasks)
        return self._jury[1]
