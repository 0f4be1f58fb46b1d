"""Fitness over rounds, time, tokens and bytes: lines for the averaged model and the best, a band for all members."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from fleet.report.facts import Facts, Round, Spread
from fleet.report.formatting import figure, text, thinned
from fleet.report.svg import Axis, Line, Point, Scale, band, line, plot

POINTS = 400  # of a line at most
_HIGH = 260.0  # pixels

NAMES = {
    "score": "Score",
    "loss": "Loss on held-out text",
    "bits_per_byte": "Bits per byte of held-out text",
    "train_loss": "Training loss",
}

Where = Callable[[Round, bool], float | None]  # the place on an axis of a round's members, or of its averaged model


@dataclass(frozen=True)
class Stage:
    """A round's members, or those of some rounds."""

    at: float
    spread: Spread
    best: float  # so far


@dataclass(frozen=True)
class Curve:
    """One measure along an axis."""

    measure: str
    stages: Sequence[Stage]
    averaged: Sequence[Point]  # the averaged model

    @property
    def places(self) -> list[float]:
        return [*(each.at for each in self.stages), *(at for at, _ in self.averaged)]

    @property
    def best(self) -> list[Point]:
        return [(each.at, each.best) for each in self.stages]

    @property
    def lines(self) -> list[Line]:
        """The last one lies on top."""
        mean = [(each.at, each.spread.mean) for each in self.stages]
        named = [("mean", mean, "mean"), ("best so far", self.best, "best"), ("averaged", self.averaged, "averaged")]
        return [each for each in named if each[1]]


def curve_of(facts: Facts, measure: str, where: Where) -> Curve:
    key = facts.asked(measure), measure
    rounds = [each for each in facts.rounds if each.complete]  # half of a round is none
    at = [(where(each, False), each.members[key]) for each in rounds if key in each.members]
    there = sorted(((x, spread) for x, spread in at if x is not None), key=lambda pair: pair[0])
    better = max if measure == "score" else min
    so_far = accumulate((spread.best(measure) for _, spread in there), better)
    stages = [Stage(x, spread, best) for (x, spread), best in zip(there, so_far, strict=True)]
    averaged = ((where(each, True), each.averaged[measure]) for each in rounds if measure in each.averaged)
    return Curve(measure, merged(stages), thinned(sorted((x, y) for x, y in averaged if x is not None), POINTS))


def merged(stages: Sequence[Stage]) -> list[Stage]:
    """Of many rounds, some together: the lowest and the highest of them stay seen."""
    size = max(1, -(-len(stages) // POINTS))
    groups = (stages[n : n + size] for n in range(0, len(stages), size))
    return [Stage(group[-1].at, _joined([each.spread for each in group]), group[-1].best) for group in groups]


def _joined(spreads: Sequence[Spread]) -> Spread:
    mean = sum(each.mean for each in spreads) / len(spreads)
    return Spread(min(e.low for e in spreads), mean, max(e.high for e in spreads), max(e.count for e in spreads))


# -- axes --------------------------------------------------------------------------------------------------------------


def by_round(each: Round, averaged: bool) -> float:
    return float(each.number)


def in_time(seconds: float) -> tuple[float, str]:
    """A unit that makes small numbers of so long a time."""
    units = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))
    return next((each for each in units if seconds >= 2 * each[0]), (1.0, "seconds"))


def by_time(facts: Facts, size: float) -> Where:
    """Since the first worker started."""
    return lambda each, averaged: (at - facts.began) / size if (at := _moment(each, averaged)) else None


def by_tokens(facts: Facts) -> Where:
    upto = dict(zip((each.number for each in facts.rounds), accumulate(e.tokens for e in facts.rounds), strict=True))
    return lambda each, averaged: upto[each.number] if facts.tokens else None


def by_bytes(facts: Facts, size: float) -> Where:
    def where(each: Round, averaged: bool) -> float | None:
        before = bisect_right(facts.moved, _moment(each, averaged), key=lambda pair: pair[0])
        return facts.moved[before - 1][1] / size if before else None

    return where


def _moment(each: Round, averaged: bool) -> float:
    return each.averaged_at if averaged else each.at


# -- drawn -------------------------------------------------------------------------------------------------------------


def drawn(id: str, title: str, curve: Curve, axis: str, integers: bool, donors: Mapping[str, float]) -> str:
    """`donors` are values to compare with, by name."""
    x, y = Axis(Scale.over(curve.places), axis, integers), Axis(_fair(curve, [*donors.values()]), "")
    behind = ""
    if any(each.spread.count > 1 for each in curve.stages):
        upper = [(x.scale(each.at), y.scale(each.spread.high)) for each in curve.stages]
        lower = [(x.scale(each.at), y.scale(each.spread.low)) for each in curve.stages]
        behind = band(upper, lower, _HIGH, "members")
    for value in donors.values():
        behind += line([(0.0, y.scale(value)), (1.0, y.scale(value))], _HIGH, "donor")
    labels = [(y.scale(value), name, "donor") for name, value in donors.items()]
    return plot(id, title, said(curve, title, donors), x, y, _HIGH, curve.lines, behind, labels)


def _fair(curve: Curve, others: Sequence[float]) -> Scale:
    """A start that is far off everything later may leave the picture; what is best never does."""
    values = [value for each in curve.stages for value in (each.spread.low, each.spread.high)]
    averaged = [value for _, value in curve.averaged]
    later = [*values[len(values) // 10 :], *averaged[len(averaged) // 10 :]]
    return Scale.fair([*values, *averaged], later, [*others, *(value for _, value in curve.best[-1:])])


def said(curve: Curve, title: str, donors: Mapping[str, float]) -> str:
    """In words."""
    parts = [f"{name} from {figure(points[0][1])} to {figure(points[-1][1])}" for name, points, _ in curve.lines]
    parts += [f"{name[:80]} at {figure(value)}" for name, value in donors.items()]
    return f"{title}: {'; '.join(parts)}."


def once(curve: Curve, donors: Mapping[str, float]) -> str:
    """The numbers themselves, where there is but one round and so nothing to draw."""
    parts = [f"averaged {figure(value)}" for _, value in curve.averaged]
    for spread in (each.spread for each in curve.stages):
        several = f", mean {figure(spread.mean)}, lowest {figure(spread.low)}, highest {figure(spread.high)}"
        parts.append(f"best {figure(spread.best(curve.measure))}{several if spread.count > 1 else ''}")
    parts += [f"{text(name, 80)} {figure(value)}" for name, value in donors.items()]
    return f"<p>Measured in round {curve.places[0]:.0f} alone: {'; '.join(parts)}.</p>"


def rows(facts: Facts, measure: str, averaged: bool, most: int = 200) -> list[list[str]]:
    key = facts.asked(measure), measure
    found = [(each.number, each.averaged.get(measure), each.members.get(key)) for each in facts.rounds]
    return [
        [str(number), *[figure(whole)] * averaged,
         *map(figure, (s.best(measure), s.mean, s.low, s.high) if s else (None,) * 4)]
        for number, whole, s in thinned([each for each in found if each[1:] != (None, None)], most)
    ]  # fmt: skip
