"""Round 0 of post-training: the given models in one form, the data sets as tokens."""

import json
from collections.abc import Mapping
from typing import Any

from fleet.config import Wrong
from fleet.work import Work
from merge.donors import Donor, Donors
from merge.planning import plan
from merge.vocabulary import different_words
from train.member.school import School, merged, place_of, said_of
from train.member.studio import named
from train.posttrain.config import PosttrainConfig
from train.posttrain.data import tokenised, written

Metrics = Mapping[str, Any]
ROWS = "rows"


def make_init(school: School, work: Work) -> Metrics:
    """A hub's model, a folder or a GGUF file as a member's files; as wide a vocabulary as the widest of all."""
    c, entry = school.config, work.recipe.merge["entry"]
    reference = c.initial_population[entry]
    with Donors() as donors:
        rows, notes = widest(c.initial_population, donors)
        dtype = c.dtype or dtype_of(donors[c.initial_population[0]])
        if entry:
            notes += check_alike(donors[c.initial_population[0]], donors[reference])
    recipe = {"merge_method": "passthrough", "models": [{"model": reference}], "out_dtype": dtype}
    if rows:
        recipe["tokenizer"] = {"source": reference, "pad_to_multiple_of": rows}
    merged(work, recipe, {}, school.how)
    return {"dtype": dtype, "notes": json.dumps(notes)}


def widest(references: tuple[str, ...], donors: Donors) -> tuple[int, list[str]]:
    """Rows of embeddings that all are given; 0 where all have equally many."""
    sizes = {donors[reference].vocabulary_size for reference in references}
    if len(sizes) < 2:
        return 0, []
    return max(sizes), [f"vocabularies of {', '.join(map(str, sorted(sizes)))} rows are all padded to {max(sizes)}"]


def dtype_of(donor: Donor) -> str:
    first = next(iter(donor.tensors.values()))
    return str(first.dtype).removeprefix("torch.")


def check_alike(first: Donor, other: Donor) -> list[str]:
    """What differs between two models is named: they are to have children."""
    inputs = [{"model": each.reference, "parameters": {"weight": 1}} for each in (first, other)]
    recipe = said_of({"merge_method": "linear", "models": inputs, "tokenizer": {"source": first.reference}})
    with Donors() as donors:
        notes = plan(recipe, donors).notes
    if different := different_words(first, other):
        some = ", ".join(map(repr, different[:3]))
        raise Wrong(
            f"{other.reference}: its tokens differ from those of {first.reference}: {len(different)} of them ({some}); "
            "members of one population share a vocabulary"
        )
    templates = [template_of(each) for each in (first, other)]
    if templates[0] and templates[1] and templates[0] != templates[1]:
        begin = next((n for n, (a, b) in enumerate(zip(*templates, strict=False)) if a != b), 0)
        parts = " and ".join(repr(each[begin : begin + 40]) for each in templates)
        raise Wrong(
            f"{other.reference}: its chat template differs from that of {first.reference}, first in {parts}; "
            "members of one population share a template: give both folders the same one"
        )
    if templates[0] and not templates[1]:
        notes = [*notes, f"{other.reference} has no chat template: that of the first model is used"]
    return list(notes)


def template_of(donor: Donor) -> str:
    if (file := donor.folder / "chat_template.jinja").is_file():
        return file.read_text()
    if (settings := donor.folder / "tokenizer_config.json").is_file():
        return str(json.loads(settings.read_text()).get("chat_template") or "")
    return ""


def make_data(school: School, work: Work) -> Metrics:
    """All rows of a data set that the run can make use of, with their masks."""
    from transformers import AutoTokenizer

    c, source = school.config, school.config.mutation_datasets[work.recipe.merge["source"]]
    tokenizer = AutoTokenizer.from_pretrained(place_of(named(work, "init-0")), trust_remote_code=c.trust_remote_code)
    made, cut, empty = tokenised(c, source, tokenizer)
    work.write(ROWS, written(made))
    return {"rows": len(made), "cut": cut, "left_out": empty}


def check_causal(donor: Donor, trust: bool) -> None:
    from train.model import described

    described(str(donor.folder), trust)


def check_crossover(c: PosttrainConfig) -> None:
    """Its method and parameters, on two copies of the first model."""
    from train.member.bred import crossed
    from train.posttrain import dna

    first = c.initial_population[0]
    with Donors() as donors:
        place = donors[first].folder
    if first.endswith(".gguf"):
        return
    recipe = crossed(c, ["one", "other"], dna.plain(c))
    try:
        with Donors({"one": place, "other": place}) as donors:
            plan(said_of(recipe), donors)
    except Wrong as error:
        raise Wrong(f"CROSSOVER: {error}") from None
