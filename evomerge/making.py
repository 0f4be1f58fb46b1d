"""Formulas made into models: in memory, where they are looked at, or in folders."""

import hashlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from evomerge import formula as formulas
from evomerge.formula import Formula
from evomerge.techniques import MERGED, recipes
from merge import live
from merge.donors import Donor, Donors
from merge.engine import How
from merge.live import Live
from merge.merging import merge
from merge.planning import Plan, plan
from merge.recipe import Merge, merge_of
from merge.staged import Staged, over_all

_NOISY = "with-noise"


class Workshop:
    """Models that stay open, and what is made of them."""

    def __init__(
        self, models: Mapping[str, str], base: str, *, threads: int = 0, dtype: str = "", trust: bool = False
    ) -> None:
        self.models, self.base, self.dtype, self.trust = dict(models), base, dtype, trust
        self.donors, self.threads = Donors(), threads
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self._live: tuple[str, Live] | None = None

    def __enter__(self) -> "Workshop":
        return self

    def __exit__(self, *error: object) -> None:
        self.donors.stack.close()

    def layers(self) -> int:
        """Of each model; paths go through all of them."""
        return self.donors[next(iter(self.models.values()))].layers or 0

    def planned(self, formula: Formula) -> tuple[Merge, Plan, Donors]:
        """What the merge engine is to do; or why these models cannot be merged."""
        stages = recipes(formula, self.models, self.base, self.dtype)
        if formula.noise:
            stages = {**{("with-noise-of" if name == MERGED else name): each for name, each in stages.items()}}
            stages[MERGED] = {"merge_method": "passthrough", "models": [{"model": _NOISY}]}
        text = text_of(stages)
        said = {name: merge_of(each, text) for name, each in stages.items()}
        donors = _Noisy(said, self.donors, How(threads=self.threads, seed=formula.seed), formula)
        return said[MERGED], plan(said[MERGED], donors), donors

    def write(self, formula: Formula, out: Path) -> None:
        """As a Hugging Face folder that knows what it was made of."""
        said, _, donors = self.planned(formula)
        how = How(threads=self.threads, seed=formula.seed)
        beside = {formulas.FILE: formulas.text_of(formula, self.models, self.base)}
        merge(said, out, how=how, donors=donors, beside=beside)

    def model(self, formula: Formula) -> Live:
        """In memory; the next one takes its place."""
        said, made, _ = self.planned(formula)
        key = live.key_of(made)
        if self._live is None or self._live[0] != key:
            self._live = None  # first out, then in: there may be no room for both
            self._live = key, live.furnished(said, made, self.device, self.trust)
        found = self._live[1]
        if found.places is None:
            return self._loaded(formula, found)
        found.fill(made, How(threads=self.threads, seed=formula.seed))
        return found

    def _loaded(self, formula: Formula, known: Live) -> Live:
        """From a folder, where weights lie otherwise in memory than in files."""
        from transformers import AutoModelForCausalLM

        with tempfile.TemporaryDirectory(prefix="evomerge-") as place:
            self.write(formula, Path(place) / "model")
            model = AutoModelForCausalLM.from_pretrained(
                Path(place) / "model", dtype="auto", trust_remote_code=self.trust
            )
        return replace(known, model=model.to(self.device).eval())


class _Noisy(Staged):
    """Stages, and the last of them with noise."""

    def __init__(self, said: Mapping[str, Merge], models: Donors, how: How, formula: Formula) -> None:
        super().__init__(said, models, how)
        self.formula = formula

    def _opened(self, reference: str) -> Donor:
        if reference != _NOISY:
            return super()._opened(reference)
        donor = over_all(self["with-noise-of"], self._noise)
        return Donor(reference, donor.folder, donor.config, donor.tensors)

    def _noise(self, name: str, tensor: Tensor) -> Tensor:
        """In parts of the tensor's own spread; what is all the same stays so."""
        generator = torch.Generator().manual_seed(hash_of(self.formula.seed, name))
        spread = float(tensor.std()) if tensor.numel() > 1 else 0.0
        return tensor + self.formula.noise * spread * torch.randn(tensor.shape, generator=generator)


def hash_of(seed: int, name: str) -> int:

    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little") >> 1


def text_of(stages: Mapping[str, Mapping[str, Any]]) -> str:
    """As YAML, a document for each stage: what people read, and mergekit-multi."""
    if len(stages) == 1:
        return yaml.safe_dump(_plain(stages[MERGED]), sort_keys=False, allow_unicode=True)
    documents = [{"name": name, **_plain(each)} for name, each in stages.items()]
    return "---\n".join(yaml.safe_dump(each, sort_keys=False, allow_unicode=True) for each in documents)


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """No two places that are the same object: YAML would write anchors."""
    found: dict[str, Any] = json.loads(json.dumps(value))
    return found
