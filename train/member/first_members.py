"""Round 0 of post-training: the given models in one form, the data sets as tokens."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fleet.config import UserError
from fleet.plausible_words import check_words_in
from fleet.work import Work
from merge.donor import Donor
from merge.donors import Donors
from merge.merge_planning import plan
from merge.merging import template_of
from merge.methods import METHODS
from merge.vocabulary import different_words
from train.member import dna
from train.member.posttraining_runtime import PosttrainingRuntime, merged, said_of
from train.posttrain.example_rows import parted, tokenised, written
from train.posttrain.posttrain_config import PosttrainConfig
from train.training_recipes import FIRST, InitArgs, SourceArgs

Metrics = Mapping[str, Any]
ROWS = "rows"


def make_init(runtime: PosttrainingRuntime, work: Work, args: InitArgs) -> Metrics:
    """A hub's model, a folder or a GGUF file as a member's files; as wide a vocabulary as the widest of all."""
    c, entry = runtime.config, args.entry
    reference = c.models[entry]
    with Donors() as donors:
        rows, notes = widest(c.models, donors)
        dtype = c.dtype or dtype_of(donors[c.models[0]])
        template = common_template([donors[name] for name in c.models])
        own = template_of(donors[reference].folder)
        if entry:
            notes += check_alike(donors[c.models[0]], donors[reference])
    recipe: dict[str, Any] = {"merge_method": "passthrough", "models": [{"model": reference}], "out_dtype": dtype}
    if template and not own:
        recipe["chat_template"] = template
        notes.append(f"{reference} has no chat template: that of the others is used")
    if rows:
        recipe["tokenizer"] = {"source": reference, "pad_to_multiple_of": rows}
    merged(work, recipe, {}, runtime.how)
    return {"dtype": dtype, "notes": json.dumps(notes)}


def widest(references: tuple[str, ...], donors: Donors) -> tuple[int, list[str]]:
    """Rows of embeddings that all are given; 0 where all have equally many."""
    sizes = {donors[reference].vocabulary_size for reference in references}
    if len(sizes) < 2:
        return 0, []
    return max(sizes), [f"vocabularies of {', '.join(map(str, sorted(sizes)))} rows are all padded to {max(sizes)}"]


def dtype_of(donor: Donor) -> str:
    first = next(iter(donor.tensors.values()))
    return str(first.dtype if first.dtype != torch.float64 else torch.float32).removeprefix("torch.")


def check_alike(first: Donor, other: Donor) -> list[str]:
    """What differs between two models is named: they are to have children."""
    inputs = [{"model": each.reference, "parameters": {"weight": 1}} for each in (first, other)]
    recipe = said_of({"merge_method": "linear", "models": inputs, "tokenizer": {"source": first.reference}})
    with Donors() as donors:
        notes = plan(recipe, donors).notes
    if different := different_words(first, other):
        some = ", ".join(map(repr, different[:3]))
        raise UserError(
            f"{other.reference}: its tokens differ from those of {first.reference}: {len(different)} of them ({some}); "
            "members of one population share a vocabulary"
        )
    return list(notes)


def common_template(models: Sequence[Donor]) -> str:
    """The one that all have who have one."""
    there = {each.reference: found for each in models if (found := template_of(each.folder))}
    for name, found in there.items():
        first = next(iter(there))
        if found != there[first]:
            begin = next((n for n, (a, b) in enumerate(zip(there[first], found, strict=False)) if a != b), 0)
            parts = " and ".join(repr(each[begin : begin + 40]) for each in (there[first], found))
            raise UserError(
                f"{name}: its chat template differs from that of {first}, first in {parts}; "
                "members of one population share a template: give both folders the same one"
            )
    return next(iter(there.values()), "")


def make_data(runtime: PosttrainingRuntime, work: Work, args: SourceArgs) -> Metrics:
    """All rows of a data set that the run can make use of, with their masks."""
    from transformers import AutoTokenizer

    c, source = runtime.config, runtime.config.mutation_datasets[args.source]
    tokenizer = AutoTokenizer.from_pretrained(work.inputs[FIRST].folder, trust_remote_code=c.trust_remote_code)
    made = tokenised(c, source, tokenizer)
    kept, held = parted(c, source, made.kept)
    work.write(ROWS, written(kept, held))
    return {"rows": len(kept), "held": held, "cut": made.cut, "left_out": made.empty}


def check_learning(c: PosttrainConfig, first: Donor, template: str) -> None:
    """Whether the first rows of all data can be written and learned, and the adapter has a place."""
    from transformers import AutoTokenizer

    from train.adapters import places_of
    from train.model import described, without_numbers
    from train.posttrain.example_rows import check_first_rows

    check_words_in(first.folder)
    tokenizer = AutoTokenizer.from_pretrained(first.folder, trust_remote_code=c.trust_remote_code)
    tokenizer.chat_template = tokenizer.chat_template or template or None
    for source in c.mutation_datasets:
        check_first_rows(c, source, tokenizer)
    if c.adapter:
        config = described(str(first.folder), c.trust_remote_code)
        places_of(without_numbers(config, c.trust_remote_code), c.adapter)


def check_crossover(c: PosttrainConfig, donors: Donors) -> None:
    """Its method and parameters, on the first model and itself."""
    if c.crossover["method"] not in METHODS:
        raise UserError(f"CROSSOVER: there is no method {c.crossover['method']!r}; there are {', '.join(METHODS)}")
    first = c.initial_population[0]
    first = first if first.endswith(".gguf") else str(donors[first].folder)
    again = os.path.join(os.path.dirname(first), ".", os.path.basename(first))  # by another name
    try:
        plan(said_of(dna.crossed(c, [first, again], dna.plain(c), first)), donors)
    except UserError as error:
        raise UserError(f"CROSSOVER: {error}") from None
