"""Who did what when: a row for each worker's place, so that a slow one or a lost one is seen at once."""

import html
from collections.abc import Sequence

from fleet.plain import several
from fleet.report.curves import in_time
from fleet.report.facts import KINDS, Facts, WorkerRow
from fleet.report.formatting import clipped, lasting, moment, share, text
from fleet.report.svg import WIDE, Axis, Scale, chart, frame, percent, stretched, word

_ROW, _BAR = 34.0, 11.0  # pixels
_EXACT = 1200  # so many spans are drawn one by one, and say what they are
_COLUMNS = 700  # of longer runs
_ROWS = 200


def drawn(facts: Facts) -> str:
    rows = [*facts.rows][:_ROWS]
    scale = Scale.over([facts.began, max(facts.ended, facts.began + 1e-3)])
    high = _ROW * len(rows) + 6
    exact = sum(len(row.spans) for row in rows) <= _EXACT
    bars, words = list[str](), list[str]()
    for n, row in enumerate(rows):
        middle = n * _ROW + 26.0
        bars.append(_path("there", [(scale(each.begin), scale(each.end)) for each in row.sessions], middle))
        bars.append(_one_by_one(row, scale, middle) if exact else _in_columns(row, scale, middle))
        words += _words(row, scale, middle)
    size, unit = in_time(facts.ended - facts.began)
    x = Axis(Scale((scale.low - facts.began) / size, (scale.high - facts.began) / size), f"{unit} since the start")
    inside = frame(x, None, high) + stretched("".join(bars), high) + "".join(words)
    return chart("timeline", "Who did what when", said(facts), high + 42, inside, look="rows")


def key(facts: Facts) -> str:
    """What the colours mean, and how much of everybody's time each took."""
    spent = {kind: sum(row.spent(kind) for row in facts.rows) for kind in KINDS}
    total = facts.worker_seconds or 1.0
    shown = [
        f'<li><span class="swatch {kind}"></span>{KINDS[kind]} <b>{text(share(min(1.0, seconds / total)))}</b></li>'
        for kind, seconds in spent.items()
        if seconds
    ]
    unknown = 1.0 - sum(spent.values()) / total
    if unknown >= 0.005:
        shown.append(f'<li><span class="swatch there"></span>nothing was noted <b>{text(share(unknown))}</b></li>')
    lost = any(session.kind == "lost" for row in facts.rows for session in row.sessions)
    mark = '<li><span class="swatch cross">✕</span>lost: no sign of life after this</li>' if lost else ""
    return f'<ul class="key">{"".join(shown)}{mark}</ul>'


def said(facts: Facts) -> str:
    if not facts.rows:
        return "Nobody has worked on it yet."
    slow = min(facts.rows, key=lambda row: row.useful)
    lost = ", ".join(f"{row.machine} {row.name}" for row in facts.rows if any(s.kind == "lost" for s in row.sessions))
    machines = several(len({row.machine for row in facts.rows}), "machine")
    return (
        f"{several(len(facts.rows), 'place')} of workers on {machines}; the least useful share of time is "
        f"{share(slow.useful)}, of {clipped(slow.name, 60)}. Lost: {clipped(lost, 300) or 'none'}."
    )


def rows(facts: Facts) -> list[list[str]]:
    times = ("train", "evaluate", "merge", "wait")
    return [
        [row.machine, row.name, str(row.made), lasting(row.seconds), *(lasting(row.spent(kind)) for kind in times),
         share(row.useful), row.ending]
        for row in facts.rows[:_ROWS]
    ]  # fmt: skip


# -- bars --------------------------------------------------------------------------------------------------------------


def _one_by_one(row: WorkerRow, scale: Scale, y: float) -> str:
    return "".join(
        _path(each.kind, [(scale(each.begin), scale(each.end))], y,
              f"{KINDS[each.kind]} {each.id}, {lasting(each.end - each.begin)}")
        for each in row.spans
    )  # fmt: skip


def _in_columns(row: WorkerRow, scale: Scale, y: float) -> str:
    """In each narrow column what took most of it."""
    taken = [dict[str, float]() for _ in range(_COLUMNS)]
    for span in row.spans:
        begin, end = scale(span.begin) * _COLUMNS, scale(span.end) * _COLUMNS
        for n in range(int(begin), min(_COLUMNS, int(end) + 1)):
            inside = min(end, n + 1) - max(begin, n)
            taken[n][span.kind] = taken[n].get(span.kind, 0.0) + max(0.0, inside)
    most = [max(each, key=lambda kind: each[kind]) if each and sum(each.values()) > 0.05 else "" for each in taken]
    runs, first = dict[str, list[tuple[float, float]]](), 0
    for n in range(1, _COLUMNS + 1):
        if n == _COLUMNS or most[n] != most[first]:
            runs.setdefault(most[first], []).append((first / _COLUMNS, n / _COLUMNS))
            first = n
    return "".join(_path(kind, times, y, KINDS[kind]) for kind, times in runs.items() if kind)


def _path(kind: str, times: Sequence[tuple[float, float]], y: float, title: str = "") -> str:
    about = f"<title>{text(title, 1000)}</title>" if title else ""
    d = "".join(f"M{WIDE * a:.1f} {y:g}h{max(0.6, WIDE * (b - a)):.1f}" for a, b in times)
    return f'<path class="bar {kind}" stroke-width="{_BAR:g}" d="{d}">{about}</path>'


def _words(row: WorkerRow, scale: Scale, y: float) -> list[str]:
    """Above its bar: who it is, and how well its time was used; on it, where somebody was lost."""
    machine = clipped(row.machine, 12).strip()
    who = f"{machine} / {row.name}" if machine else row.name
    found = [
        word("0", y - 10, who, "who", 22),
        word("100%", y - 10, f"{share(row.useful)} useful, {row.made} made", "who end"),
    ]
    for each in row.sessions:
        if each.kind == "lost":
            about = (
                f"<title>{html.escape(clipped(f'{row.machine} {row.name}', 200))}: lost at {moment(each.end)}</title>"
            )
            found.append(f'<text class="mark middle" x="{percent(scale(each.end))}" y="{y + 5:g}">✕{about}</text>')
    return found
