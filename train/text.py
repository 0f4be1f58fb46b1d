"""Where text comes from, and the rows of fine-tuning: the built-in one, local files, the hub."""

import contextlib
import hashlib
import json
import re
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fleet.config import UserError
from fleet.errors import first_line
from train.config import Dataset

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib"}
_TABLES = {"pydoc_data", "encodings"}  # a fifth of all, and no code that anybody wrote

ROW_FILES = (".jsonl", ".parquet")
CHAT = '{"messages": [{"role": "user", "content": "..."}, ...]}, {"prompt": ..., "completion": ...} or {"text": "..."}'
PAIR = '{"prompt": ..., "chosen": ..., "rejected": ...}, each a text or messages'
LONGEST = 1 << 26  # characters of a line, or of a document of several
_BLOCK = 1 << 20  # characters that are read at a time
_STRETCH = re.compile(r"(?s).{1,4096}(?:\n|\Z)|.{4096}")  # of a document: as many lines as have so many characters
_SHOWN = 200  # characters of a bad row

Row = Mapping[str, Any]
Message = Mapping[str, Any]
Check = Callable[[Any], Row]


@dataclass(frozen=True)
class TextSource:
    """A kind of source: its documents, always in the same order."""

    documents: Callable[[Dataset], Iterator[str]]
    random: bool = False  # tokens instead, to measure speed
    of_python: bool = False  # differs between its releases


def _fields(source: Dataset) -> Iterator[str]:
    there = raw(source.source, source.name, source.split, source.streaming)
    return (_field(row, source, where) for where, row in there)


SOURCES: Mapping[str, TextSource] = {  # by what names look like; the first that fits
    "stdlib": TextSource(lambda source: shuffled_stdlib(), of_python=True),
    "fake": TextSource(lambda source: iter(()), random=True),
    "*.txt": TextSource(lambda source: _plain(Path(source.source), source.separator)),
    "*": TextSource(_fields),  # of rows, in a file or on the hub
}
FILES = (*ROW_FILES, *(pattern[1:] for pattern in SOURCES if pattern.startswith("*.")))


def kind_of(source: Dataset) -> TextSource:
    return next(kind for pattern, kind in SOURCES.items() if fnmatchcase(source.source, pattern))


def is_one_document(source: Dataset) -> bool:
    """What is given as its documents are stretches of one, with nothing between them."""
    return source.source.endswith(".txt") and not source.separator


def documents(source: Dataset) -> Iterator[str]:
    return kind_of(source).documents(source)


def check(source: Dataset) -> None:
    """Complain before anything is trained: the file is not there, or its documents have no such field."""
    if not kind_of(source).random and next(documents(source), None) is None:
        raise UserError(f"dataset {source.source}: no documents in it")


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


def _stdlib_files() -> list[tuple[str, Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = ((path.relative_to(root), path) for path in root.rglob("*.py"))
    return sorted((str(name), path) for name, path in found if not _LEFT_OUT & set(name.parts[:-1]))


def _plain(path: Path, separator: str) -> Iterator[str]:
    """What a separator divides; without one, stretches of the one document that the file is."""
    rest = ""
    for block in _blocks(path):
        *found, rest = (rest + block).split(separator) if separator else _STRETCH.findall(rest + block)
        yield from (each for each in found if each.strip())
        if len(rest) > LONGEST:
            raise UserError(f"{path}: a document longer than {LONGEST} characters, no {separator!r} in it")
    if rest.strip():
        yield rest


def _blocks(path: Path) -> Iterator[str]:
    with _in_one_line(path), path.open(encoding="utf-8") as file:
        yield from iter(lambda: file.read(_BLOCK), "")


@contextlib.contextmanager
def _in_one_line(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _field(row: Any, source: Dataset, where: str) -> str:
    if not isinstance(row, dict) or not isinstance(row.get(source.text_field), str):
        has = ", ".join(map(str, list(row)[:8])) if isinstance(row, dict) else type(row).__name__
        raise UserError(f"dataset {where}: no text in the field {source.text_field!r}; it has: {has}")
    found: str = row[source.text_field].encode(errors="replace").decode()  # half a character is none
    return found


# -- rows: each is checked before anything is learned from it ---------------------------------------------------------


def conversation(row: Any) -> Row:
    """A row of messages, of text, or of a prompt and its completion, and nothing else of it."""
    if isinstance(row, Mapping) and row.get("messages") is not None:
        if found := _messages(row["messages"]):
            return {"messages": found}
    elif isinstance(row, Mapping) and isinstance(row.get("text"), str):
        return {"text": _whole(row["text"])}
    elif isinstance(row, Mapping):
        fields = {key: _text_or_messages(row.get(key)) for key in ("prompt", "completion")}
        if None not in fields.values():
            return fields
    raise UserError(f"{CHAT} is expected")


def preference(row: Any) -> Row:
    """A row with a better and a worse answer, and nothing else of it."""
    if isinstance(row, Mapping):
        fields = {key: _text_or_messages(row.get(key)) for key in ("prompt", "chosen", "rejected")}
        if None not in fields.values():
            return fields
    raise UserError(f"{PAIR}, is expected")


def read(source: str, name: str = "", split: str = "train", check: Check = conversation) -> Iterator[Row]:
    """The rows of a local file or a hub dataset, always in the same order."""
    for where, row in raw(source, name, split):
        yield located(check, row, where)


def raw(source: str, name: str = "", split: str = "train", streaming: bool = True) -> Iterator[tuple[str, Any]]:
    """Rows as they are, and where they stand."""
    if source.endswith(".jsonl"):
        for number, line in lines(Path(source)):
            if not line.strip():
                continue
            where = f"{source}, line {number}"
            yield where, _parsed(line, where)
    else:
        found = _parquet(Path(source)) if source.endswith(ROW_FILES) else _hub(source, name, split, streaming)
        for number, row in enumerate(found, 1):
            yield f"{source}, row {number}", row


def located(use: Callable[[Any], Any], row: Any, where: str) -> Any:
    """What a function makes of a row; where it cannot, the error says which row and shows how it begins."""
    try:
        return use(row)
    except UserError as error:
        try:
            shown = json.dumps(row, ensure_ascii=False)
        except (TypeError, ValueError):
            shown = repr(row)
        raise UserError(f"{where}: {error}; the row is {shown[:_SHOWN]}") from None


# -- inside ------------------------------------------------------------------------------------------------------------


def _text_or_messages(value: Any) -> Any:
    return _whole(value) if isinstance(value, str) else _messages(value)


def _messages(value: Any) -> list[Message] | None:
    """Fields without a value go: tables have all fields in all rows."""
    if not isinstance(value, (list, tuple)) or not value:
        return None
    if not all(isinstance(each, Mapping) and _is_message(each) for each in value):
        return None
    return [
        {key: _whole(field) if isinstance(field, str) else field for key, field in each.items() if field is not None}
        for each in value
    ]


def _is_message(value: Message) -> bool:
    return isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _whole(text: str) -> str:
    return text.encode(errors="replace").decode()  # half a character is none


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Of a text file, with their numbers; one that no memory may have room for is an error."""
    with _in_one_line(path), path.open(encoding="utf-8") as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST), ""), 1):
            if len(line) == LONGEST:
                raise UserError(f"{path}, line {number}: longer than {LONGEST} characters")
            yield number, line


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: no JSON: {error}; the line is {line.strip()[:_SHOWN]}") from None


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow.parquet

    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(1024):
            yield from batch.to_pylist()
    except (OSError, ValueError) as error:  # Arrow's own errors are ValueErrors
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _hub(source: str, name: str, split: str, streaming: bool) -> Iterator[Row]:
    from datasets import load_dataset

    try:
        yield from load_dataset(source, name or None, split=split, streaming=streaming)
    except Exception as error:  # whatever a hub, a network and a loader can come up with
        ends = ", ".join(FILES)
        raise UserError(
            f"dataset {source}: cannot be loaded: {first_line(error)} (local files end in {ends})"
        ) from None
