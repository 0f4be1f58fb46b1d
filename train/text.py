"""Where text comes from: the built-in one, local files, the hub."""

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fleet.config import Wrong
from train.config import Dataset

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib"}
FILES = (".jsonl", ".parquet", ".txt")


def documents(source: Dataset) -> Iterator[str]:
    """The documents of a source, always in the same order."""
    if source.source == "stdlib":
        return stdlib()
    if source.source.endswith(FILES):
        return _local(source)
    return _hub(source)


def stdlib() -> Iterator[str]:
    """The source text of the running Python's own standard library: real text that is on every machine."""
    for _, path in _stdlib_files():
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
        raise Wrong(f"dataset {source.source}: no documents in it") from None


def _stdlib_files() -> list[tuple[str, Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = ((path.relative_to(root), path) for path in root.rglob("*.py"))
    return sorted((str(name), path) for name, path in found if not _LEFT_OUT & set(name.parts[:-1]))


def _local(source: Dataset) -> Iterator[str]:
    path = Path(source.source)
    try:
        if path.suffix == ".txt":
            with path.open(encoding="utf-8") as file:
                yield from _paragraphs(file)
        elif path.suffix == ".jsonl":
            with path.open(encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield _field(json.loads(line), source, f"line {number}")
        else:
            for batch in _parquet(path):
                yield from (_field(row, source, "a row") for row in batch)
    except Wrong:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise Wrong(f"dataset {path}: {getattr(error, 'strerror', None) or error}") from None


def _paragraphs(lines: Any) -> Iterator[str]:
    """Documents of a plain text file are separated by empty lines."""
    kept: list[str] = []
    for line in lines:
        if line.strip():
            kept.append(line)
        elif kept:
            yield "".join(kept)
            kept = []
    if kept:
        yield "".join(kept)


def _parquet(path: Path) -> Iterator[list[dict[str, Any]]]:
    import pyarrow.parquet

    for batch in pyarrow.parquet.ParquetFile(path).iter_batches(1024):
        yield batch.to_pylist()


def _hub(source: Dataset) -> Iterator[str]:
    from datasets import load_dataset

    try:
        rows = load_dataset(source.source, source.name or None, split=source.split, streaming=source.streaming)
        for row in rows:
            yield _field(row, source, "a row")
    except Wrong:
        raise
    except Exception as error:  # whatever a hub, a network and a loader can come up with
        line = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise Wrong(
            f"dataset {source.source}: cannot be loaded: {line} (local files end in {', '.join(FILES)})"
        ) from None


def _field(row: Any, source: Dataset, where: str) -> str:
    if not isinstance(row, dict) or not isinstance(row.get(source.text_field), str):
        has = ", ".join(map(str, list(row)[:8])) if isinstance(row, dict) else type(row).__name__
        raise Wrong(f"dataset {source.source}, {where}: no text in the field {source.text_field!r}; it has: {has}")
    return row[source.text_field].encode(errors="replace").decode()  # half a character is none
