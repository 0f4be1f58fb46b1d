"""Where text comes from: the built-in one, local files, the hub."""

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fleet.config import UserError
from train import rows
from train.config import Dataset

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib"}
_TABLES = {"pydoc_data", "encodings"}  # a fifth of all, and no code that anybody wrote
FILES = (*rows.FILES, ".txt")


def documents(source: Dataset) -> Iterator[str]:
    """The documents of a source, always in the same order."""
    if source.source == "stdlib":
        return shuffled_stdlib()
    if source.source.endswith(".txt"):
        return _plain(Path(source.source))
    there = rows.raw(source.source, source.name, source.split, source.streaming)
    return (_field(row, source, where) for where, row in there)


def stdlib() -> Iterator[str]:
    """The source text of the running Python's own standard library: real text that is on every machine."""
    for _, path in _stdlib_files():
        yield path.read_text(encoding="utf-8", errors="replace")


def shuffled_stdlib() -> Iterator[str]:
    """What people wrote of it, in an order in which any part is like the whole: by names, the first half is mostly abc,
    asyncio and distutils."""
    files = ((name, path) for name, path in _stdlib_files() if not _TABLES & {*Path(name).parts})
    for _, path in sorted(files, key=lambda each: hashlib.sha256(each[0].encode()).digest()):
        yield path.read_text(encoding="utf-8", errors="replace")


def stdlib_digest() -> str:
    """Differs between releases of Python."""
    digest = hashlib.sha256()
    for name, path in _stdlib_files():
        data = path.read_bytes()
        digest.update(f"{name}\n{len(data)}\n".encode() + data)
    return digest.hexdigest()[:16]


def check(source: Dataset) -> None:
    """Complain before anything is trained: the file is not there, or its documents have no such field."""
    if source.source in ("stdlib", "fake"):
        return
    try:
        next(documents(source))
    except StopIteration:
        raise UserError(f"dataset {source.source}: no documents in it") from None


def _stdlib_files() -> list[tuple[str, Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = ((path.relative_to(root), path) for path in root.rglob("*.py"))
    return sorted((str(name), path) for name, path in found if not _LEFT_OUT & set(name.parts[:-1]))


def _plain(path: Path) -> Iterator[str]:
    """Documents of a plain text file are separated by empty lines."""
    kept: list[str] = []
    size = 0
    for number, line in rows.lines(path):
        if line.strip():
            kept.append(line)
            size += len(line)
            if size > rows.LONGEST:
                raise UserError(
                    f"{path}, line {number}: a document longer than {rows.LONGEST} characters, no empty line in it"
                )
        elif kept:
            yield "".join(kept)
            kept, size = [], 0
    if kept:
        yield "".join(kept)


def _field(row: Any, source: Dataset, where: str) -> str:
    if not isinstance(row, dict) or not isinstance(row.get(source.text_field), str):
        has = ", ".join(map(str, list(row)[:8])) if isinstance(row, dict) else type(row).__name__
        raise UserError(f"dataset {where}: no text in the field {source.text_field!r}; it has: {has}")
    found: str = row[source.text_field].encode(errors="replace").decode()  # half a character is none
    return found
