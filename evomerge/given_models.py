"""The models that are given: where they are, and whether they can be merged at all, by what their folders say."""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from evomerge.config import BUILTIN, ModelReference
from fleet.busy_notice import loading
from fleet.errors import absolute
from fleet.plain import say
from fleet.run_config import UserError, whole
from fleet.untrusted_model import check_words_in
from merge.donor import Donor, refuse_adapter
from merge.donors import Donors, located
from merge.merging import TOKENIZER_FILES
from merge.vocabulary import different_words

_SHAPE = (
    *("hidden_size", "n_embd", "intermediate_size", "num_hidden_layers", "n_layer", "num_attention_heads", "n_head"),
    *("num_key_value_heads", "head_dim", "vocab_size"),
)
tell = partial(say, file=sys.stderr)  # beside results
_ALIKE = "Only models of one architecture and one shape can be merged: as a rule, fine-tunes of the same base"


def resolved(models: Sequence[ModelReference], beside: Path | None = None) -> list[ModelReference]:
    """Default models are trained if nobody has; local paths become whole ones."""
    made: Mapping[str, Path] = {}
    for model in models:
        if not model.builtin and not model.path.endswith(".gguf"):
            refuse_adapter(located(model.path))  # what is not there is said before anything is trained
    if any(model.builtin for model in models):
        place = _home()
        with loading("what trains them", tell):
            from evomerge import specialists

        if beside:  # other machines work on the run, and see what is beside it
            if (known := specialists.home_in(place)).is_dir():
                shutil.copytree(known, specialists.home_in(beside / "specialists"), dirs_exist_ok=True)
            place = beside / "specialists"
        made = specialists.made(place, tell=tell)
        if unknown := [model.path for model in models if model.builtin and model.builtin not in made]:
            listed = ", ".join(BUILTIN + each for each in made)
            raise UserError(f"there is no default model {unknown[0]!r}; there are {listed}")
    places = [str(made[model.builtin]) if model.builtin else whole(model.path, Path()) for model in models]
    return [ModelReference(model.name, place) for model, place in zip(models, places, strict=True)]


def _home() -> Path:
    """Where default models lie, from one tournament to the next."""
    home = os.environ.get("EVOMERGE_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "evomerge"
    try:
        return absolute(Path(home))
    except UserError as error:
        why = str(error).rstrip(".")
        raise UserError(f"{why}; set EVOMERGE_HOME to a folder where the small models are to be") from None


def check_alike(models: Sequence[ModelReference]) -> None:
    with Donors() as donors:
        there = [(model.name, donors[model.path]) for model in models]
        for name, donor in there:
            check_tokenizer(name, donor.folder)
        first, donor = there[0]
        for name, other in there[1:]:
            if what := difference(first, donor, name, other):
                raise UserError(f"{what}. {_ALIKE}{_advice(there)}.")


def check_causal(models: Sequence[ModelReference], trust: bool = False) -> None:
    """What has to predict text, or to answer, must be made for it."""
    from train.model import described

    for model in models:
        if model.path.endswith(".gguf"):
            continue
        try:
            described(str(located(model.path)), trust)
        except UserError as error:
            alone = "AdvancedModelMerger merges such models, too, but they cannot compete here"
            raise UserError(f"{error}; {alone}" if "causal" in str(error) else str(error)) from None


def difference(first: str, one: Donor, second: str, other: Donor) -> str:
    kinds = [_kind(each.config) for each in (one, other)]
    if kinds[0] != kinds[1]:
        return f"{first} is a {kinds[0]}, {second} a {kinds[1]}"
    for key in _SHAPE:
        mine, theirs = one.config.get(key), other.config.get(key)
        if None not in (mine, theirs) and mine != theirs:  # older files say less of the same model
            return f"{key} is {mine} in {first}, {theirs} in {second}"
    if words := different_words(one, other):
        some = ", ".join(map(repr, words[:3]))
        return f"{first} and {second} have different tokens ({len(words)} of them, as {some})"
    return ""


def _kind(config: Mapping[str, Any]) -> str:
    """Its architecture, whatever head it was saved with."""
    return str(config.get("model_type") or (config.get("architectures") or ["model of no known kind"])[0])


def _advice(there: Sequence[tuple[str, Donor]]) -> str:
    """Which of these fit together."""
    groups: list[list[tuple[str, Donor]]] = []
    for name, donor in there:
        fitting = next((group for group in groups if not difference("", group[0][1], "", donor)), None)
        if fitting is None:
            groups.append([(name, donor)])
        else:
            fitting.append((name, donor))
    if several := [" with ".join(name for name, _ in group) for group in groups if len(group) > 1]:
        return f". Of these, {', or '.join(several)} could be merged"
    wanted = " or ".join(dict.fromkeys(f"another {_kind(donor.config)}" for _, donor in there))
    return f"; merge each of them with {wanted} instead, made from the same base"


def check_tokenizer(name: str, folder: Path) -> None:
    if not any((folder / file).is_file() for file in (*TOKENIZER_FILES[:2], "vocab.json", "vocab.txt")):
        raise UserError(f"{name}: there is no tokenizer in {folder} (tokenizer.json or tokenizer.model); save it there")
    check_words_in(folder)
