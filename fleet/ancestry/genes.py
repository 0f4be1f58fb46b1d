"""How a run's genomes changed: what each gene was in each round, over the members that lived then. Pure."""

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fleet.ancestry.tree import Node, Tree, finite, natural
from fleet.recipe import round_and_slot

Value = float | str
_PATH = re.compile(r"(?:^|(?<=\.))/.+", re.DOTALL)  # in a gene's name: an absolute one, such as that of data


@dataclass(frozen=True)
class GeneHistory:
    """A number in each round; None where no living member had it."""

    name: str
    means: Sequence[float | None]
    spreads: Sequence[float | None]  # standard deviations
    values: Sequence[float]  # of all members


@dataclass(frozen=True)
class Trait:
    """What is not a number: how many members of each round had which value."""

    name: str
    values: Sequence[str]  # the commonest first
    shares: Sequence[Sequence[float]]  # of each value in each round


@dataclass(frozen=True)
class Genes:
    rounds: Sequence[int]
    genes: Sequence[GeneHistory]
    traits: Sequence[Trait]


def genes_of(tree: Tree) -> Genes:
    living = _living(_with_technique([node for node in tree.nodes.values() if node.genome and not node.failed]))
    rounds = sorted(living)
    flat = _unrolled({node.id: dict(_flat("", node.genome)) for members in living.values() for node in members})
    names = sorted({name for genome in flat.values() for name in genome}, key=natural)
    told = {name: [[flat[node.id].get(name) for node in living[round]] for round in rounds] for name in names}
    numbers = {name: found for name, each in told.items() if (found := _numbers(each)) is not None}
    short = _with_short_paths(names)
    genes = [_gene(short[name], found) for name, found in numbers.items()]
    return Genes(rounds, genes, [_trait(short[name], told[name]) for name in names if name not in numbers])


def _with_technique(nodes: Sequence[Node]) -> list[Node]:
    """How a member was made is a gene, too, where there are several ways."""
    several = len({node.technique for node in nodes if node.technique}) > 1
    return [
        replace(node, genome={"technique": node.technique, **node.genome}) if several and node.technique else node
        for node in nodes
    ]


def _living(nodes: Sequence[Node]) -> dict[int, list[Node]]:
    found = dict[int, list[Node]]()
    for node in nodes:
        for round in {node.round, *(round_and_slot(id)[0] for id in node.also)}:
            found.setdefault(round, []).append(node)
    return found


def _flat(outer: str, value: Any) -> Iterator[tuple[str, Value | list[float]]]:
    """Nested keys joined with dots."""
    match value:
        case bool() | str():
            yield outer, str(value)
        case int() | float() if finite(value) is not None:
            yield outer, float(value)
        case Mapping():
            for key, inner in value.items():
                yield from _flat(f"{outer}.{key}" if outer else str(key), inner)
        case list() if all(finite(each) is not None for each in value):
            yield outer, [float(each) for each in value]
        case list():
            for number, inner in enumerate(value):
                if isinstance(inner, Mapping):
                    yield from _flat(f"{outer}.{inner.get('filter') or number}", _value_of(inner))


def _value_of(item: Mapping[str, Any]) -> Any:
    """A merge's parameters are lists of what holds for which weights: {"filter": "mlp", "value": 0.5}."""
    said = {key: each for key, each in item.items() if key != "filter"}
    return said["value"] if said.keys() == {"value"} else said


def _unrolled(genomes: Mapping[str, Mapping[str, Value | list[float]]]) -> dict[str, dict[str, Value]]:
    """A list is as many genes as there are numbers in it; one whose length changes is none."""
    lengths = dict[str, set[int]]()
    for genome in genomes.values():
        for name, value in genome.items():
            lengths.setdefault(name, set()).add(len(value) if isinstance(value, list) else -1)
    found = dict[str, dict[str, Value]]()
    for id, genome in genomes.items():
        lists = {name: value for name, value in genome.items() if isinstance(value, list) and len(lengths[name]) == 1}
        found[id] = {name: value for name, value in genome.items() if not isinstance(value, list)}
        found[id] |= {f"{name}.{number}": each for name, value in lists.items() for number, each in enumerate(value)}
    return found


def _with_short_paths(names: Sequence[str]) -> dict[str, str]:
    """Of each path as much of its end as tells it from all others."""
    short = dict[str, str]()
    for parts in range(1, max((name.count("/") for name in names), default=0) + 2):
        ends = {name: _with_end(name, parts) for name in names}
        shared = Counter(ends.values())
        short |= {name: end for name, end in ends.items() if shared[end] == 1 and name not in short}
    return short


def _with_end(name: str, parts: int) -> str:
    path = _PATH.search(name)
    return name[: path.start()] + "/".join(path[0].split("/")[-parts:]) if path else name


def _numbers(rounds: Sequence[Sequence[Value | None]]) -> list[list[float]] | None:
    """The numbers of each round, if there is nothing else."""
    found = [[value for value in values if isinstance(value, float)] for values in rounds]
    texts = any(isinstance(value, str) for values in rounds for value in values)
    return None if texts else found


def _gene(name: str, rounds: Sequence[Sequence[float]]) -> GeneHistory:
    means = [math.fsum(values) / len(values) if values else None for values in rounds]
    spreads = [statistics.pstdev(values) if values else None for values in rounds]
    return GeneHistory(name, means, spreads, [value for values in rounds for value in values])


def _trait(name: str, rounds: Sequence[Sequence[Value | None]]) -> Trait:
    counted = [Counter(f"{value:g}" if isinstance(value, float) else value for value in values if value is not None)
               for values in rounds]  # fmt: skip
    total = sum(counted, Counter[str]())
    values = sorted(total, key=lambda value: (-total[value], value))
    shares = [[count[value] / max(1, count.total()) for count in counted] for value in values]
    return Trait(name, values, shares)
