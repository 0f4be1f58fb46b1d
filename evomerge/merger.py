"""One merge at a time: models in, a model's folder out. It needs no run."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from evomerge.config import STAGES, TECHNIQUES, Configuration, ModelReference, Technique
from evomerge.formula import Formula, Step, in_words, read
from evomerge.given_models import check_alike, resolved
from evomerge.model_builder import ModelBuilder
from evomerge.utils import EvoMergeException, expected, log
from evomerge.variation import Pool, combined
from fleet.errors import from_home


class AdvancedModelMerger:
    """Merges models as MERGE_SETTINGS say, into folders below OUT; by default beside the tournament's own folder.

    >>> AdvancedModelMerger(create_default_config()).merge()
    """

    def __init__(self, config: Configuration, out: Path | str = "") -> None:
        self.config, self.out = config, from_home(out or f"{config.out}-models")
        self.settings = config.merge_settings

    def merge(self, models: Sequence[ModelReference] = (), techniques: Sequence[Technique] = ()) -> ModelReference:
        """By MERGE_METHOD: weights, layers, or first the one and then the other. TECHNIQUES: one for each stage, by
        default the first of each that the settings allow."""
        ways = {"ps": self._ps_merge, "dfs": self._dfs_merge, "ps_dfs": self._ps_dfs_merge}
        return ways[self.settings.merge_method](models, techniques)

    def _ps_merge(self, models: Sequence[ModelReference] = (), techniques: Sequence[Technique] = ()) -> ModelReference:
        """Parameter space: weights are combined."""
        return self._merged(models, techniques, "first", "second")

    def _dfs_merge(
        self,
        models: Sequence[ModelReference] = (),
        techniques: Sequence[Technique] = (),
        path: Sequence[tuple[str, int, float]] = (),
    ) -> ModelReference:
        """Data flow space: a path through layers."""
        return self.merge_path(path, models) if path else self._merged(models, techniques, "third")

    def _ps_dfs_merge(
        self, models: Sequence[ModelReference] = (), techniques: Sequence[Technique] = ()
    ) -> ModelReference:
        return self._merged(models, techniques, "first", "second", "third")

    def _merged(
        self, models: Sequence[ModelReference], techniques: Sequence[Technique], *stages: str
    ) -> ModelReference:
        """By one technique for each of these stages."""
        if unknown := [each for each in techniques if each not in TECHNIQUES]:
            raise EvoMergeException(f"unknown technique {unknown[0]!r}; there are {', '.join(TECHNIQUES)}")
        allowed = techniques or self.settings.techniques
        used = [next((t for t in STAGES[s] if t in allowed), "") if s in stages else "" for s in STAGES]
        if not any(used):
            raise EvoMergeException(f"none of {', '.join(allowed)} belongs to this way of merging")

        def made(names: Sequence[str], layers: int) -> Formula:
            rng = np.random.default_rng([self.config.evolution_settings.seed, 1, 0])
            return combined(Pool(self.settings, names, layers), used, rng)

        return self.write(made, models)

    # -- for whoever makes formulas otherwise -------------------------------------------------------------------------

    def merge_path(
        self, path: Sequence[tuple[str, int, float]], models: Sequence[ModelReference] = ()
    ) -> ModelReference:
        """Through layers, each a model's name, a layer and the scale of what it adds."""
        steps = tuple(Step(model=name, layer=layer, scale=scale) for name, layer, scale in path)
        return self.write(lambda names, layers: Formula(path=steps, scaled=True), models)

    def write(
        self, make: Callable[[Sequence[str], int], Formula], models: Sequence[ModelReference] = ()
    ) -> ModelReference:
        """A formula made from the models' names and their number of layers, as a folder."""
        with expected():
            given = list(models or self.config.models)
            base = self.config.model_copy(update={"models": given}).base
            there = resolved([*given, *([base] if base else [])])
            check_alike(there)
            where = {model.name: model.path for model in there[: len(given)]}
            return self.built(make, where, there[-1].path if base else "")

    def built(
        self, make: Callable[[Sequence[str], int], Formula], models: Mapping[str, str], base: str, name: str = ""
    ) -> ModelReference:
        m = self.settings
        with expected(), ModelBuilder(models, base, dtype=m.dtype, trust=m.trust_remote_code) as builder:
            made = make([*models], builder.layers())
            called = name or in_words(made).replace("+", "-").replace(" ", "-")
            out = self._free(called)
            log.info("merging %s into %s", ", ".join(made.models), out)
            builder.write(made, out)
            return ModelReference(out.name, out.resolve())

    def _free(self, name: str) -> Path:
        """Nothing is ever replaced, and nothing leads out of the folder."""
        name = re.sub(r"[^\w.-]+", "-", name).strip("-.")[:60] or "model"
        places = [self.out / name, *(self.out / f"{name}-{n}" for n in range(2, 10_000))]
        return next(place for place in places if not place.exists())


def known(reference: ModelReference) -> tuple[Formula, dict[str, str], str]:
    """What a model was made of; one that was not merged here is made of itself."""
    (there,) = resolved([reference])
    return read(Path(there.path)) or (Formula(blend=there.name), {there.name: there.path}, "")
