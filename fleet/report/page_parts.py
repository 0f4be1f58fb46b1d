"""What every page is built of: its frame, its sections, its tables. Pure."""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fleet.report.formatting import name, text

HERE = Path(__file__).parent
STYLE, SCRIPT = (HERE / "page.css").read_text(encoding="utf-8"), (HERE / "page.js").read_text(encoding="utf-8")
_NUMBER = re.compile(r"[<-]?[0-9][0-9.,]*(e[+-]?[0-9]+)?( ?(%|[A-Za-z]{1,3}))?|-?inf|nan")


def document(title: str, inside: str, live: bool = False) -> str:
    """One file that needs no other; whoever opens it runs no script but ours."""
    again = '<noscript><meta http-equiv="refresh" content="10"></noscript>' if live else ""
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy(live)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
        f"<title>{text(title, 100)} – run report</title>{again}<style>{STYLE}</style></head>"
        f"<body{' data-live' * live}>{inside}<script>{SCRIPT}</script></body></html>\n"
    )


def policy(live: bool = False) -> str:
    connect = "; connect-src 'self'" if live else ""
    return (
        f"default-src 'none'; style-src '{_hash(STYLE)}'; script-src '{_hash(SCRIPT)}'{connect}; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(what: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(what.encode()).digest()).decode()}"


Part = tuple[str, str, str]  # id, title, what stands in it


def framed(head: str, shown: Sequence[Part]) -> str:
    """Below the head those of its parts in which something stands, and a list of them to go to."""
    shown = [each for each in shown if each[2]]
    links = "".join(f'<li><a href="#{id}">{title}</a></li>' for id, title, _ in shown)
    main = "".join(section(*each) for each in shown)
    return (
        f'<a class="skip" href="#main">Skip to the content</a>{head}'
        f'<nav id="parts" aria-label="Parts of this page"><ul>{links}</ul></nav><main id="main">{main}</main>'
    )


def heading(over: str, title: str, below: str) -> str:
    return f'<header><p class="over">{over}</p><h1>{name(title, 200)}</h1>{below}</header>'


def section(id: str, title: str, inside: str) -> str:
    return f'<section id="{id}" aria-labelledby="{id}-h"><h2 id="{id}-h">{title}</h2>{inside}</section>'


def lines_of(given: str, most: int = 400) -> str:
    lines = given.splitlines()
    return "\n".join(text(line, 2000) for line in lines[:most]) + ("\n…" if len(lines) > most else "")


def pre(lines: str) -> str:
    return f'<pre tabindex="0">{lines}</pre>'


# -- tables ------------------------------------------------------------------------------------------------------------


def table(id: str, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], words: bool = False) -> str:
    """Behind a summary line, so that it is there for whoever wants numbers."""
    inside = plain_table(title, columns, [*rows], words)
    return f'<details id="{id}"><summary>{title} as a table</summary>{inside}</details>'


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], words: bool = False) -> str:
    """Of words, or with numbers at their right."""
    looks = ["" if words or not _numbers(cells) else ' class="n"' for cells in zip(*rows, strict=True)]
    looks = looks or [""] * len(columns)
    head = "".join(f'<th scope="col"{look}>{name(each, 120)}</th>' for each, look in zip(columns, looks, strict=True))
    lines = "".join(
        f"<tr>{''.join(f'<td{look}>{name(value, 400)}</td>' for value, look in zip(row, looks, strict=True))}</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(title)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def _numbers(cells: Sequence[str]) -> bool:
    """Does a whole column hold numbers, with their units, and nothing else?"""
    return any(cells) and all(cell in ("", "–") or _NUMBER.fullmatch(cell) for cell in cells)


def value_of(value: Any) -> str:
    """A key's value as people read it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
