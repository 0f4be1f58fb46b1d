"""Round 0 of post-training: the given models in one form, the data sets as tokens."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fleet.run_config import UserError
from fleet.work import Work
from merge.donor import Donor
from merge.donors import Donors
from merge.live_models import tokenizer_in
from merge.merge_planning import plan_merge
from merge.merging import template_of
from merge.methods import METHODS
from merge.vocabulary import different_words
from train.adapters import places_of
from train.member import posttraining_genome
from train.member.posttraining_runtime import PosttrainingRuntime, ends_in, merged, said_of
from train.model import described, looks_up_positions, without_numbers
from train.posttrain.example_rows import check_first_rows, made_rows
from train.posttrain.posttrain_config import PosttrainConfig
from train.recipe_arguments import FIRST, InitArgs, SourceArgs
from train.rl.answering import ends_of
from train.rl.question_rows import check_first_questions, made_questions

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
        notes += check_alike(donors[c.models[0]], donors[reference]) if entry else []
        own = template_of(donors[reference].folder)
    recipe: dict[str, Any] = {"merge_method": "passthrough", "models": [{"model": reference}], "out_dtype": dtype}
    if template and not own:
        recipe["chat_template"] = template
        notes.append(f"{reference} has no chat template: that of the others is used")
    if rows:
        recipe["tokenizer"] = {"source": reference, "pad_to_multiple_of": rows}
    merged(work, recipe, {}, runtime.merge_options)
    return {"dtype": dtype, "notes": json.dumps(notes)}


def widest(references: tuple[str, ...], donors: Donors) -> tuple[int, list[str]]:
    """Rows of embeddings that all are given; 0 where all have equally many."""
    sizes = sorted({donors[reference].vocabulary_size for reference in references})
    several = [f"vocabularies of {', '.join(map(str, sizes))} rows are all padded to {sizes[-1]}"]
    return (sizes[-1], several) if len(sizes) > 1 else (0, [])


def dtype_of(donor: Donor) -> str:
    first = next(iter(donor.tensors.values()))
    return str(first.dtype if first.dtype != torch.float64 else torch.float32).removeprefix("torch.")


def check_alike(first: Donor, other: Donor) -> list[str]:
    """What differs between two models is named: they are to have children."""
    inputs = [{"model": each.reference, "parameters": {"weight": 1}} for each in (first, other)]
    recipe = said_of({"merge_method": "linear", "models": inputs, "tokenizer": {"source": first.reference}})
    with Donors() as donors:
        notes = plan_merge(recipe, donors).notes
    if different := different_words(first, other):
        some = ", ".join(map(repr, different[:3]))
        raise UserError(
            f"{other.reference}: its tokens differ from those of {first.reference}: {len(different)} of them ({some}); "
            "members of one population share a vocabulary"
        )
    return list(notes)


def common_template(models: Sequence[Donor]) -> str:
    """The one that all have who have one."""
    there = [(each.reference, found) for each in models if (found := template_of(each.folder))]
    first, wanted = next(iter(there), ("", ""))
    for name, found in there:
        if found != wanted:
            begin = next((n for n, (a, b) in enumerate(zip(wanted, found, strict=False)) if a != b), 0)
            parts = " and ".join(repr(each[begin : begin + 40]) for each in (wanted, found))
            raise UserError(
                f"{name}: its chat template differs from that of {first}, first in {parts}; "
                "members of one population share a template: give both folders the same one"
            )
    return wanted


def make_data(runtime: PosttrainingRuntime, work: Work, args: SourceArgs) -> Metrics:
    """All rows of a data set that the run can make use of, with their masks."""
    c, source = runtime.config, runtime.config.mutation_datasets[args.source]
    tokenizer = tokenizer_in(work.inputs[FIRST].folder, FIRST, c.trust_remote_code)
    if c.answering:
        told, file = made_questions(c, source, tokenizer)
        work.write(ROWS, file)
        return told
    made, parts, file = made_rows(c, source, tokenizer)
    work.write(ROWS, file)
    return {"rows": len(made.kept), "held": len(parts) - parts.count("train"), "cut": made.cut, "left_out": made.empty}


def check_learning(c: PosttrainConfig, first: Donor, template: str) -> None:
    """Whether the first rows of all data can be written and learned, and the adapter has a place."""
    tokenizer = tokenizer_in(first.folder, first.reference, c.trust_remote_code)
    tokenizer.chat_template = tokenizer.chat_template or template or None
    config = described(str(first.folder), c.trust_remote_code)
    for source in c.mutation_datasets:
        (check_first_questions if c.answering else check_first_rows)(c, source, tokenizer)
    if c.answering:
        ends_of(tokenizer, config, ends_in(first.folder))  # answers must be able to end
    if c.mutation_datasets:
        check_positions(c, first.reference, config)
    if c.adapter:
        places_of(without_numbers(config, c.trust_remote_code), c.adapter)


def check_positions(c: PosttrainConfig, called: str, config: Any) -> None:
    """Rows must not be longer than it can read. With RoPE it reads on, though worse: its own answers should not be."""
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(most, int) or c.seq_length <= most:
        return
    if c.answering or looks_up_positions(without_numbers(config, c.trust_remote_code), most):
        raise UserError(f"SEQ_LENGTH is {c.seq_length}, but {called} has {most} positions")


def check_crossover(c: PosttrainConfig, donors: Donors) -> None:
    """Its method and parameters, on the first model and itself."""
    if c.crossover["method"] not in METHODS:
        raise UserError(f"CROSSOVER: there is no method {c.crossover['method']!r}; there are {', '.join(METHODS)}")
    first = c.initial_population[0]
    first = first if first.endswith(".gguf") else str(donors[first].folder)
    again = os.path.join(os.path.dirname(first), ".", os.path.basename(first))  # by another name
    try:
        plan_merge(
            said_of(posttraining_genome.crossed(c, [first, again], posttraining_genome.unmutated(c), first)), donors
        )
    except UserError as error:
        raise UserError(f"CROSSOVER: {error}") from None
