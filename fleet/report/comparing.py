"""Several runs on one page: how far each came with so many tokens, so much time, so many bytes. Pure."""

from collections.abc import Callable, Sequence

from fleet.plain import readable_bytes
from fleet.report import curves
from fleet.report.curves import NAMES, Where
from fleet.report.facts import MEASURES, Facts
from fleet.report.formatting import count, figure, lasting, moment, name, share, thinned
from fleet.report.page_parts import document, heading, plain_table, section, table, value_of
from fleet.report.svg import Axis, Point, Scale, plot

MOST = 8  # runs, as many as there are colours that one can tell apart
_HIGH = 300.0
_AVERAGED = "test"  # what averaged models are asked; members are by what selects them

Points = Sequence[Point]


def page(all: Sequence[Facts]) -> str:
    names = labels(all)
    pictures, left = list[str](), list[str]()
    for number, ((measure, asked), some) in enumerate(groups(all).items()):
        id = f"{measure}-{number}"
        if drawn := _curves(all, names, some, measure, id):
            title = NAMES[measure] + (f", questions: {name(asked, 80)}" if asked != _AVERAGED else "")
            pictures.append(section(id, title, drawn))
        else:
            left += [names[n] for n in some]
    left += [label for label, each in zip(names, all, strict=True) if not each.measure]
    why = f"<p>Not drawn, since nobody noted a measure with its time: {name(', '.join(left), 400)}.</p>" if left else ""
    parts = [section("runs", "The runs", _runs(all, names) + why), *pictures]
    parts.append(section("differences", "Differences in configuration", _differences(all, names)))
    written = f'<p class="where">written {moment(max(each.now for each in all))}</p>'
    head = heading("Runs side by side", ", ".join(names), written)
    return document(f"{len(all)} runs", f'{head}<main id="main">{"".join(parts)}</main>')


def groups(all: Sequence[Facts]) -> dict[tuple[str, str], list[int]]:
    """The runs that can be compared, by the measure and by what was asked: other questions make other scores."""
    found = dict[tuple[str, str], list[int]]()
    for n, each in enumerate(all):
        for measure in dict.fromkeys([each.measure, *["bits_per_byte"] * each.has("bits_per_byte")]):
            if measure:
                averaged = any(measure in it.averaged for it in each.rounds)
                asked = each.asked(measure)
                asked = _AVERAGED if averaged and asked in ("", "validation") else asked or _AVERAGED
                found.setdefault((measure, asked), []).append(n)
    return dict(sorted(found.items(), key=lambda pair: (MEASURES.index(pair[0][0]), pair[0][1] != _AVERAGED, pair[0])))


def labels(all: Sequence[Facts]) -> list[str]:
    """The folders' names, with as much of their paths as tells them apart."""
    paths = [each.folder.split("/") for each in all]
    for parts in range(1, max(map(len, paths)) + 1):
        found = ["/".join(path[-parts:]) for path in paths]
        if len({*found}) == len(found):
            return found
    return [f"{each.folder} ({n + 1})" for n, each in enumerate(all)]


def _runs(all: Sequence[Facts], names: Sequence[str]) -> str:
    columns = ["run", "method", "state", "last round", "best", "averaged", "tokens", "time", "machine time", "moved",
               "goodput"]  # fmt: skip
    rows = [
        [
            label, str(each.config.get("algorithm", "")), each.state, str(each.finished - 1) if each.finished else "–",
            figure(each.best[0] if each.best else None), figure(each.averaged),
            count(each.tokens) if each.tokens else "–", lasting(max(0.0, each.ended - each.began)),
            lasting(each.machine_seconds), readable_bytes(each.written + each.read), share(each.goodput),
        ]
        for label, each in zip(names, all, strict=True)
    ]  # fmt: skip
    return plain_table("The runs", columns, rows)


def _curves(all: Sequence[Facts], names: Sequence[str], some: Sequence[int], measure: str, group: str) -> str:
    size, unit = curves.in_time(max(all[n].ended - all[n].began for n in some))
    axes: list[tuple[str, str, Callable[[Facts], Where]]] = [
        ("tokens", "tokens", curves.by_tokens),
        ("time", f"{unit} since the start", lambda facts: curves.by_time(facts, size)),
        ("bytes", "MB read and written", lambda facts: curves.by_bytes(facts, 1e6)),
    ]
    better, pictures, rows = "Higher" if measure == "score" else "Lower", list[str](), list[list[str]]()
    for id, axis, where in axes:
        lines = {n: points(all[n], measure, where(all[n])) for n in some}
        if any(lines.values()):
            picture = _drawn(f"{group}-{id}", f"{NAMES[measure]} over {axis}", axis, lines, names)
            pictures.append(f"<figure><h3>Over {axis}</h3>{picture}</figure>")
            rows += [[names[n], axis, f"{x:,.6g}", figure(y)] for n in some for x, y in thinned(lines[n], 40)]
    if not pictures:
        return ""
    averaged = [any(measure in each.averaged for each in all[n].rounds) for n in some]
    drawn = {True: "the averaged model, on text that selected nobody", False: "the best member, by what selected it"}
    which = "".join(f"<li>{name(names[n], 80)}: {drawn[its]}</li>" for n, its in zip(some, averaged, strict=True))
    note = f'<p class="note">{better} is better. What is drawn:</p><ul class="key">{which}</ul>'
    return f'{note}<div class="pair">{"".join(pictures)}</div>' + table(
        f"{group}-table", "Curves", ["run", "over", "at", NAMES[measure]], rows
    )


def points(facts: Facts, measure: str, where: Where) -> Points:
    """Of the averaged model, or of the best member so far where a run has none."""
    curve = curves.curve_of(facts, measure, where)
    return curve.averaged or curve.best


def _drawn(id: str, title: str, axis: str, lines: dict[int, Points], names: Sequence[str]) -> str:
    every = [point for each in lines.values() for point in each]
    x = Axis(Scale.over([0.0, *(point[0] for point in every)]), axis)
    y = Axis(Scale.over([point[1] for point in every], 0.04), "")
    there = [(names[n], each, f"c{n}") for n, each in lines.items() if each]
    said = "; ".join(f"{name[:80]} ends at {figure(each[-1][1])}" for name, each, _ in there)
    return plot(id, title, f"{title}: {said}.", x, y, _HIGH, there)


def _differences(all: Sequence[Facts], names: Sequence[str]) -> str:
    settings = [{**each.config, **each.operational} for each in all]
    rows = {key: [value_of(each[key]) if key in each else "–" for each in settings]
            for key in dict.fromkeys(key for each in settings for key in each)}  # fmt: skip
    common = set.intersection(*({*each} for each in settings))
    columns = ["key", *(each[:60] for each in names)]
    shared = [[key.upper(), *row] for key, row in rows.items() if key in common and len({*row}) > 1]
    others = [[key.upper(), *row] for key, row in rows.items() if key not in common]
    said = plain_table("Differences in configuration", columns, shared, words=True) if shared else (
        "<p>None: every key that they share has the same value.</p>"
    )  # fmt: skip
    more = table("others-table", "Keys that not every method has", columns, others, words=True) if others else ""
    return said + more
