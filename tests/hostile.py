"""A run's folder as somebody could leave it who may write there: hostile text wherever text can stand."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fleet import planning
from fleet.store import _opened, _sealed

TERMINAL = "\x1b[2J\x1b]0;title\x07\x9b31m\u202e\u2066\u200f\x7f\r\b\ud800[red]x[/red][link=http://evil.example]y"
WEB = (
    "<script>window.ran=1</script>", "\"><img src=x onerror=window.ran=1>", "' onmouseover=window.ran=1 x='",
    "</script><script>window.ran=1//", "</title></style></svg><iframe srcdoc='<script>parent.ran=1</script>'>",
    "]]><svg onload=window.ran=1>", "javascript:window.ran=1", "&lt;img src=x onerror=window.ran=1&gt;",
    "--><base href=http://evil.example>", "url(http://evil.example/x);}*{background:red",
)  # fmt: skip
# Words that a run is held together by: in their place other text is a damaged register, and that is told.
BONES = {"slot", "parents", "needs", "task", "role", "attempt", "files", "absent", "identity", "id", "algorithm",
         "format", "schema", "state"}  # fmt: skip


def registers_of(run: Path) -> list[Path]:
    """Of news such as that somebody plans, nobody reads more than the name."""
    there = [run / "run.json", *run.glob("launches/*"), *run.glob("rounds/*/*")]
    return sorted(file for file in there if file.name != planning.BEGUN)


def planted(run: Path, text: str) -> int:
    """Into every register that holds text, at every place; the number of places. What workers write for people, too."""
    count = 0
    registers = registers_of(run)
    for file in registers:
        value = _opened(file.read_bytes(), file.name)
        found = {key: _with(each, text, key) for key, each in value.items()}
        if "config" in found:
            found["config"] |= {text: text, "dataset": [text, {text: text}]}
        if "metrics" in found:
            found["metrics"] = {**value["metrics"], text: text, "name": text, "technique": text, "list": f'["{text}"]'}
        file.chmod(0o600)
        file.write_bytes(_sealed(found))
        count += file.read_bytes().count(json.dumps(text)[1:-1].encode())
    claim = next(file for file in registers if ".claim." in file.name)
    left = {"by": text, "machine": text, "launch": 1, "why": "failed", "error": text, "tail": [text, text]}
    claim.with_name(claim.name.replace(".claim.", ".left.")).write_bytes(_sealed(left))
    stop = run / "launches/00001.stop"
    if not stop.exists():
        stop.write_bytes(_sealed({"by": text, "why": text}))
    return count + 6 + for_people(run / "workers", text)


def _with(value: Any, text: str, key: str) -> Any:
    match value:
        case _ if key in BONES or (key == "why" and value in ("failed", "released")):
            return value
        case str():
            return value + text
        case dict():
            inside = {each: _with(inner, text, each) for each, inner in value.items()}
            return inside | ({text: text} if key in ("args", "genome") else {})
        case list():
            return [_with(each, text, key) for each in value]
    return value


def for_people(workers: Path, text: str) -> int:
    """Events, logs, supervisors and pulses, in files of such names, and in those that are there."""
    name = f"evil-0-{text.encode(errors='replace').decode().replace('/', '|')}"[:120]
    before = [*workers.glob("*.events")]
    kinds = ("started", "made", "failed", "waits", "stopped", "suspects", "voided", "leaves to others", "late", text)
    at = 1_700_000_000.0
    for what in kinds:
        line = {"at": at, "what": what, "id": text, "why": text, "machine": text, "launch": 1, text: text}
        for file in (*before, workers / f"{name}.events"):
            with file.open("a", errors="surrogatepass") as opened:
                opened.write(json.dumps(line) + "\n")
    seat = {"number": 0, "code": None, "said": text, "name": text, "pid": text}
    supervisor = {
        "machine": text,
        "launch": 1,
        "host": text,
        "boot": text,
        "at": at,
        "seats": [seat, {**seat, "code": 7}],
    }
    (workers / f"{name}.supervisor").write_text(json.dumps(supervisor))
    (workers / f"{name}.log").write_bytes(f"{text}\n".encode(errors="replace") * 9)
    (workers / f"{name}.pulse").write_bytes(text.encode(errors="replace"))
    return len(kinds)


def controls(said: str) -> set[str]:
    """What a terminal might obey, but for line ends."""
    return {each for each in said if not each.isprintable() and each != "\n"}


def texts(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where in a record there are words."""
    if isinstance(value, str):
        yield at
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from texts(inner, (*at, key))


def changed(value: Any, at: tuple[Any, ...], text: str) -> Any:
    """One word of a record is another."""
    if not at:
        return text
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = changed(value[at[0]], at[1:], text)
    return copy
