"""The page: its parts one below the other, each with a heading, a picture and a table behind it. Pure."""

import json

from fleet.plain import readable_bytes, several
from fleet.report import curves, family, timeline
from fleet.report.curves import NAMES
from fleet.report.facts import Facts, Failure
from fleet.report.formatting import count, figure, lasting, moment, name, share, text
from fleet.report.page_parts import Part, document, framed, heading, lines_of, plain_table, pre, table, value_of
from fleet.report.rewards import rewards_part

_MEANS = {
    "score": "Higher is better: members are chosen by it.",
    "loss": "Lower is better: nats a token, on text that nobody learns from.",
    "bits_per_byte": "Lower is better: the same loss a byte of the text, comparable between tokenizers.",
    "train_loss": "Lower is better: nats a token, the mean of a member's steps on the text that it learns from.",
}

_LEARNED_FROM = {  # what a training loss is where members learn from something else than text
    "grpo": "What the steps minimize: by rewards, so it may be below 0, and says nothing of how good a member is.",
    "dpo": "Lower is better: of a pair of answers, 0.69 where nothing is preferred more than the parents did.",
}

_BAND = "The band reaches from the lowest to the highest member of a round"
_AVERAGED = "; the averaged model is the mean of its members' weights, evaluated by itself on text that selected nobody"
_FAILURES = 10  # that are shown in full


def page(facts: Facts, live: bool = False) -> str:
    state = f'<p class="state" id="state" role="status">{name(facts.state, 500)}</p>'
    when = f"{'as of' if live else 'written'} {moment(facts.now)}"
    head = heading("Run report", facts.name, f'{state}<p class="where">{name(facts.folder, 500)} · {when}</p>')
    return document(facts.name, framed(head, sections(facts)), live)


def sections(facts: Facts) -> list[Part]:
    return [
        ("summary", "At a glance", _summary(facts)),
        ("fitness", "Fitness" if facts.measure == "score" else "Loss", _fitness(facts)),
        ("rewards", "Rewards", rewards_part(facts.rewards, facts.answers)),
        ("workers", "Who did what when", _workers(facts)),
        ("family", "Family tree", _family(facts)),
        ("genome", "The genome's history", family.genome_part(facts.genomes)),
        ("failures", "Failures and troubles", _failures(facts)),
        ("configuration", "Configuration", _configuration(facts)),
    ]


# -- parts of it -------------------------------------------------------------------------------------------------------


def _summary(facts: Facts) -> str:
    best, averaged = facts.best, facts.averaged
    measure = NAMES.get(facts.measure, "").lower()
    open = len(facts.rounds) - facts.finished
    going = f"{open} more planned or begun" if open else ""
    cards = [
        ("Best member", figure(best[0]), _on((f"{best[1]}, {measure}", facts.questions))) if best else None,
        ("Averaged model", figure(averaged), _on((measure, facts.averaged_on))) if averaged is not None else None,
        ("Last finished round", count(facts.finished - 1), going or _asked(facts)) if facts.finished else None,
        ("Tokens", count(facts.tokens), "trained on") if facts.tokens else None,
        ("Time", lasting(max(0.0, facts.ended - facts.began)), f"since {moment(facts.began)}") if facts.began else None,
        ("Machine time", lasting(facts.machine_seconds), _machines(facts)) if facts.rows else None,
        ("Moved", readable_bytes(facts.written + facts.read),
         f"{readable_bytes(facts.written)} written, {readable_bytes(facts.read)} read") if facts.rows else None,
        ("Goodput", share(facts.goodput), "of the workers' time made what counts") if facts.rows else None,
        ("At work", share(facts.shares[0]),
         "of their time; {:.0%} for the disk, {:.0%} for others".format(*facts.shares[1:])) if facts.shares else None,
    ]  # fmt: skip
    shown = "".join(
        f"<div><dt>{title}</dt><dd><b>{value}</b><span>{name(more, 80)}</span></dd></div>"
        for title, value, more in filter(None, cards)
    )
    empty = "" if facts.rounds else "<p>Nothing is planned yet: no worker has begun.</p>"
    return f'<dl class="cards">{shown}</dl>{empty}'


def _on(figure: tuple[str, str]) -> str:
    """With the text that it is of, where that has a name: figures of different texts stand side by side."""
    what, questions = figure
    return f"{what} ({questions})" if questions else what


def _asked(facts: Facts) -> str:
    most = facts.config.get("max_generations")
    if not isinstance(most, int):
        return ""
    return f"of {most}" if facts.finished - 1 <= most else f"{most} were asked for, and the last one sums up"


def _machines(facts: Facts) -> str:
    machines = len({row.machine for row in facts.rows})
    return f"{several(machines, 'machine')}, {several(len(facts.rows), 'place')} of workers"


def _fitness(facts: Facts) -> str:
    parts, (size, unit) = [_unfinished(facts)], curves.in_time(facts.ended - facts.began)
    for measure in dict.fromkeys([facts.measure, "bits_per_byte", "train_loss"]):
        lines = donors(facts, measure)
        over_rounds = curves.curve_of(facts, measure, curves.by_round) if measure else None
        if not over_rounds or not over_rounds.places:
            continue
        title = NAMES[measure]
        if len({*over_rounds.places}) == 1:
            only = f'<p class="note">{_means(facts, measure)}</p>{curves.once(over_rounds, lines)}'
            parts.append(f"<h3>{title}</h3>{only}")
            continue
        pair = [curves.drawn(f"{measure}-rounds", f"{title} over rounds", over_rounds, "round", True, lines)]
        over_time = curves.curve_of(facts, measure, curves.by_time(facts, size))
        if len({*over_time.places}) > 1:
            axis = f"{unit} since the start"
            pair.append(curves.drawn(f"{measure}-time", f"{title} over time", over_time, axis, False, lines))
        pictures = "".join(f"<figure>{each}</figure>" for each in pair)
        averaged = [("averaged", facts.averaged_on)] * bool(over_rounds.averaged)
        band = f"{_BAND}{_AVERAGED * bool(averaged)}."
        note = f'<p class="note">{_means(facts, measure)} {band}</p>'
        columns = ["round", *map(_on, [*averaged, ("best", facts.asked(measure))]), "mean", "lowest", "highest"]
        parts.append(
            f'<h3>{title}</h3>{note}<div class="pair">{pictures}</div>'
            + table(f"{measure}-table", f"{title} by round", columns, curves.rows(facts, measure, bool(averaged)))
        )
    return "".join(parts) + _held(facts)


def _means(facts: Facts, measure: str) -> str:
    how = str(facts.config.get("mutation", "")) if measure == "train_loss" else ""
    return _LEARNED_FROM.get(how, _MEANS[measure])


def _unfinished(facts: Facts) -> str:
    """What is not drawn yet."""
    key = facts.questions, facts.measure
    found = [
        f"round {each.number}: {each.finished} of {each.slots} finished, best {figure(each.members[key].best(key[1]))}"
        for each in facts.rounds if not each.complete and key in each.members
    ]  # fmt: skip
    return f'<p class="note">Not drawn before it is complete: {text("; ".join(found))}.</p>' if found else ""


def donors(facts: Facts, measure: str) -> dict[str, float]:
    """Given models that were asked the same, the best few; by the ends of their paths, if these differ."""
    asked = facts.asked(measure)
    there = {d.name: d.value for d in facts.donors if (d.measure, d.questions) == (measure, asked)}
    short = {each.rstrip("/").rpartition("/")[2]: value for each, value in there.items()}
    there = short if len(short) == len(there) else there
    best = sorted(there, key=lambda each: there[each], reverse=measure == "score")
    return {each: there[each] for each in best[:6]}


def _held(facts: Facts) -> str:
    """What members came to on other questions than those that chose them."""
    found = [
        [str(each.number), asked, each.leader[asked, measure], figure(spread.best(measure)), figure(spread.mean),
         str(spread.count)]
        for each in facts.rounds for (asked, measure), spread in each.members.items()
        if asked not in ("", facts.questions) and measure == facts.measure
    ]  # fmt: skip
    found += [["", d.questions, f"{d.name} (given)", figure(d.value), "", ""] for d in facts.donors
              if d.measure == facts.measure and d.questions != facts.questions]  # fmt: skip
    columns = ["round", "questions", "best", "its value", "mean", "members"]
    return f"<h3>Other questions</h3>{plain_table('Other questions', columns, found[-50:])}" if found else ""


def _workers(facts: Facts) -> str:
    if not facts.rows:
        return ""
    more = f"<p>And {len(facts.rows) - 200} more places.</p>" if len(facts.rows) > 200 else ""
    columns = ["machine", "worker", "made", "there", "training", "evaluating", "merging", "waiting", "useful", "now"]
    return (
        timeline.key(facts) + zoom("timeline") + f"<figure>{timeline.drawn(facts)}</figure>{more}"
        + table("workers-table", "Workers", columns, timeline.rows(facts))
    )  # fmt: skip


def zoom(id: str) -> str:
    """Shown by the script, which alone can do it."""
    return (
        f'<p class="zoom" data-for="{id}-s" hidden><button type="button" data-by="2">Zoom in</button>'
        '<button type="button" data-by="0.5">Zoom out</button></p>'
    )


def _family(facts: Facts) -> str:
    bred = any(node.parents for node in facts.tree.nodes.values())
    return family.tree_part(facts.tree, facts.tree_from) if bred else ""


def _failures(facts: Facts) -> str:
    """The last ones in full, the newest first; all others in a table."""
    if not facts.failures:
        return "<p>None.</p>" if facts.rows else ""
    newest = [*reversed(facts.failures)]
    shown = sorted(newest, key=lambda each: not each.tail)[:_FAILURES]
    rest = [[each.id, each.worker, each.machine, moment(each.at), each.why] for each in newest if each not in shown]
    items = "".join(_failure(n, each) for n, each in enumerate(shown))
    columns = ["what", "worker", "machine", "when", "why"]
    more = table("failures-table", f"{len(rest)} more", columns, rest, words=True) if rest else ""
    return f'<ol class="failures">{items}</ol>{more}'


def _failure(number: int, each: Failure) -> str:
    tail = "\n".join(text(line, 2000) for line in each.tail)
    log = f'<details id="log-{number}"><summary>End of its log</summary>{pre(tail)}</details>' if tail else ""
    who = f"{name(each.worker, 100)} on {name(each.machine, 100)}" if each.worker else ""
    said = ", ".join(filter(None, [who, moment(each.at) if each.at else ""]))
    return f"<li><p><b>{name(each.id, 80)}</b> {said}</p><p>{name(each.why, 1000)}</p>{log}</li>"


def _configuration(facts: Facts) -> str:
    rows = [[key.upper(), value_of(value), "yes"] for key, value in facts.config.items()]
    rows += [[key.upper(), value_of(value), "no"] for key, value in facts.operational.items()]
    both = {key.upper(): value for key, value in {**facts.config, **facts.operational}.items()}
    file = json.dumps(both, indent=2, ensure_ascii=False)
    command = pre(text(facts.command, 2000)) if facts.command else ""
    say = "The command of the last launch:" if command else "Give this configuration to the method's script:"
    last = table("last-table", "The last finished round", ["member", "metrics"], [[*each] for each in facts.last])
    return (
        f'<h3>To repeat it</h3><p>{say}</p>{command}<details id="file"><summary>The configuration as a file</summary>'
        f"{pre(lines_of(file))}</details>"
        + table("config-table", "Every key", ["key", "value", "changes results"], rows, words=True) + last
    )  # fmt: skip
