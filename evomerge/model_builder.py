"""Formulas made into models: in memory, where they are evaluated, or in folders."""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evomerge import formula as formulas
from evomerge.config import TournamentConfig
from evomerge.formula import Formula, in_words, makeup
from evomerge.techniques import MERGED, Recipes, recipes
from fleet import lm_eval_command
from fleet.run_config import UserError
from fleet.scratch import passing
from merge.donor import Donor
from merge.donors import Donors
from merge.engine import MergeOptions
from merge.live_models import LiveModel, LiveModels, Staged, over_all
from merge.merge_planning import Plan, plan_merge
from merge.merge_recipe import MergeRecipe, alone, merge_of, text_of
from merge.merging import merge
from merge.tensor_names import takes_scales_out

_CLEAN, _NOISY, BASE = "without-noise", "with-noise", "(base)"
_OF_STAGES = re.compile(rf"(model )*(merged|blend|mean-of-all|stage-\d+|{_CLEAN}|{_NOISY}|{re.escape(BASE)})")


class ModelBuilder:
    """Models that stay open, and what is made of them."""

    def __init__(
        self, models: Mapping[str, str], base: str, *, threads: int = 0, dtype: str = "", trust: bool = False
    ) -> None:
        self.models, self.base, self.dtype = dict(models), base, dtype
        self.called = {name: _called(name) for name in models}
        places = {self.called[name]: path for name, path in models.items()}
        self.donors, self.threads = Donors({**places, **({BASE: base} if base else {})}), threads
        self.live = LiveModels("cuda" if torch.cuda.is_available() else "cpu", trust)

    def __enter__(self) -> "ModelBuilder":
        return self

    def __exit__(self, *error: object) -> None:
        self.donors.stack.close()

    def layers(self) -> int:
        """Of each model; paths go through all of them."""
        first = next(iter(self.models))
        if (count := self.donors[self.called[first]].layers) is None:
            raise UserError(f"{first}: its config.json does not say how many layers it has")
        return count

    def context(self) -> int | None:
        """The shortest of all models: everybody reads the same pieces of text."""
        sizes = [self.donors[name].config.get("max_position_embeddings") for name in self.called.values()]
        return min((size for size in sizes if isinstance(size, int)), default=None)

    @cached_property
    def _scales_are_lost(self) -> bool:
        """Whether norms would take the scales of steps out again."""
        return any(map(takes_scales_out, self.donors[next(iter(self.called.values()))].tensors))

    def planned(self, formula: Formula) -> tuple[MergeRecipe, Plan, Donors]:
        """What the merge engine is to do; or why these models cannot be merged."""
        if unknown := [name for name in formula.models if name not in self.models]:
            raise UserError(f"there is no model {unknown[0]!r} here; there are {', '.join(self.models)}")
        formula = formula.unscaled() if self._scales_are_lost else formula
        text = in_documents(self._stages(formula, self.models, self.base))
        stages = self._stages(formula, self.called, BASE if self.base else "")
        said = {name: merge_of(each, text) for name, each in stages.items()}
        donors = _Noisy(said, self.donors, self._how(formula), formula)
        return said[MERGED], plan_merge(said[MERGED], donors), donors

    def _stages(self, formula: Formula, models: Mapping[str, str], base: str) -> Recipes:
        """With models by their names, on which random drops depend; or by where they are, for people."""
        stages = recipes(formula, models, base, self.dtype)
        if formula.noise:
            stages = {(_CLEAN if name == MERGED else name): each for name, each in stages.items()}
            stages[MERGED] = alone(_NOISY)
        return stages

    def write(self, formula: Formula, out: Path) -> None:
        """As a Hugging Face folder that knows what it was made of."""
        said, _, donors = self.planned(formula)
        about = formulas.text_of(formula, self.models, self.base)
        beside = {formulas.FILE: about, "README.md": card(formula, self.models, said.text, out)}
        merge(said, out, how=self._how(formula), donors=donors, beside=beside)

    def model(self, formula: Formula, leave: Callable[[], None] = lambda: None) -> LiveModel:
        """In memory; the next one takes its place, which whoever else holds it is asked to leave."""
        said, plan, _ = self.planned(formula)
        found = self.live.shaped(said, plan, leave)
        if found.places is not None:
            found.fill(plan, self._how(formula))
            return found
        with passing("evomerge") as place:  # weights lie otherwise in memory than in files
            self.write(formula, place / "model")
            return replace(found, model=self.live.loaded(place / "model"))

    def _how(self, formula: Formula) -> MergeOptions:
        return MergeOptions(threads=self.threads, seed=formula.seed)


def _called(name: str) -> str:
    """In recipes, where another name is needed for a model that has one of a stage's."""
    return f"model {name}" if _OF_STAGES.fullmatch(name) else name


def card(formula: Formula, models: Mapping[str, str], recipe: str, out: Path) -> str:
    """README.md, with the fields that the hub reads."""
    shares = [f"- `{models[name]}`: {share:.0%}" for name, share in makeup(formula).items()]
    front = "---\nlibrary_name: transformers\ntags:\n- merge\n---\n"
    title = f"# A merge of {len(shares)} models\n\nBy {in_words(formula)}. How much of each is in it:\n\n"
    stages = f"\n\nStage by stage:\n\n```yaml\n{recipe.rstrip()}\n```\n\n"
    return front + title + "\n".join(shares) + stages + lm_eval_command.section(out) + "\n"


def builder(c: TournamentConfig) -> ModelBuilder:
    """Of a tournament's models."""
    m, models = c.merge_settings, {model.name: model.path for model in c.models}
    base = m.base_model.path if m.base_model else ""
    return ModelBuilder(models, base, threads=c.threads, dtype=m.dtype, trust=m.trust_remote_code)


class _Noisy(Staged):
    """Stages, and the last of them with noise."""

    def __init__(self, said: Mapping[str, MergeRecipe], models: Donors, how: MergeOptions, formula: Formula) -> None:
        super().__init__(said, models, how)
        self.formula = formula

    def _opened(self, reference: str) -> Donor:
        if reference != _NOISY:
            return super()._opened(reference)
        return replace(over_all(self[_CLEAN], self._noise), reference=reference)

    def _noise(self, name: str, tensor: Tensor) -> Tensor:
        """In parts of the tensor's own spread; what is all the same stays so."""
        seed = hashlib.sha256(f"{self.formula.seed} {name}".encode()).digest()[:8]
        generator = torch.Generator().manual_seed(int.from_bytes(seed, "little") >> 1)
        spread = float(tensor.std()) if tensor.numel() > 1 else 0.0
        return tensor + self.formula.noise * spread * torch.randn(tensor.shape, generator=generator)


def in_documents(stages: Mapping[str, Mapping[str, Any]]) -> str:
    """A document for each stage: what people read, and mergekit-multi."""
    named = {name: {"name": name} if len(stages) > 1 else {} for name in stages}
    return "---\n".join(text_of({**named[name], **each}) for name, each in stages.items())
