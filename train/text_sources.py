"""Where text comes from, and the rows of fine-tuning: the built-in one, local files, the hub."""

import contextlib
import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from fleet.errors import first_line, from_home
from fleet.run_config import UserError
from train.splits import Split, SplitName, part_of, part_of_chunk
from train.training_config import Dataset

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib"}
_TABLES = {"pydoc_data", "encodings"}  # a fifth of all, and no code that anybody wrote

ROW_FILES = (".jsonl", ".parquet")
CHAT = '{"messages": [{"role": "user", "content": "..."}, ...]}, {"prompt": ..., "completion": ...} or {"text": "..."}'
PAIR = '{"prompt": ..., "chosen": ..., "rejected": ...}, each a text or messages'
LONGEST = 1 << 26  # characters of a line, or of a document of several
_BLOCK = 1 << 20  # characters that are read at a time
_CHUNK = re.compile(r"(?s).{1,8192}(?:\n|\Z)|.{8192}")  # of a document: as many lines as have so many characters
GAP = 1024  # characters at each end of a held-out chunk that nobody is asked: what lies beside them is learned from
_SHOWN = 200  # characters of a bad row
_OF_ALL = ("source", "weight", "evaluated")  # what can be said of every source

Row = Mapping[str, Any]
PlacedRow = tuple[str, Row]  # and before it where it stands, as errors name it
Message = Mapping[str, Any]
Check = Callable[[Any], Row]


@dataclass(frozen=True)
class SourceKind:
    """A kind of source: its documents, always in the same order."""

    documents: Callable[[Dataset], Iterator[str]]
    random: bool = False  # tokens instead, to measure speed
    of_python: bool = False  # differs between its releases
    keys: tuple[str, ...] = ()  # of a source in DATASETS, that say something of such a one; others but `_OF_ALL` do not


def _fields(source: Dataset) -> Iterator[str]:
    there = raw(source.source, source.name, source.split, source.streaming)
    return (_field(row, source, where) for where, row in there)


SOURCE_KINDS: Mapping[str, SourceKind] = {  # by what names look like; the first that fits
    "stdlib": SourceKind(lambda source: shuffled_stdlib(), of_python=True),
    "fake": SourceKind(lambda source: iter(()), random=True),
    "*.txt": SourceKind(lambda source: _plain(Path(source.source), source.separator), keys=("separator",)),
    **{f"*{end}": SourceKind(_fields, keys=("text_field",)) for end in ROW_FILES},
    "*": SourceKind(_fields, keys=("text_field", "name", "split", "streaming")),  # of the hub
}
FILES = tuple(pattern[1:] for pattern in SOURCE_KINDS if pattern.startswith("*."))


def kind_of(source: Dataset) -> SourceKind:
    return next(kind for pattern, kind in SOURCE_KINDS.items() if fnmatchcase(source.source, pattern))


def is_one_document(source: Dataset) -> bool:
    """What is given as its documents are chunks of one, with nothing between them."""
    return source.source.endswith(".txt") and not source.separator


def documents(source: Dataset) -> Iterator[str]:
    return kind_of(source).documents(source)


def divided(source: Dataset, held_out: float) -> Iterator[tuple[SplitName, str]]:
    """Its documents, each with the part that it belongs to."""
    if not is_one_document(source):
        yield from ((part_of(each, Split.halved(held_out)), each) for each in documents(source))
        return
    for number, chunk in enumerate(documents(source)):
        part = part_of_chunk(number, held_out)
        yield part, chunk if part == "train" else chunk[GAP:-GAP]


def size(source: Dataset) -> int:
    """Of a file, in bytes; of what is none, nothing."""
    return Path(source.source).stat().st_size if source.source.endswith(FILES) else 0


def check(source: Dataset) -> None:
    """Complain before anything is trained: the file is not there, or its documents have no such field."""
    if not kind_of(source).random and next(documents(source), None) is None:
        raise UserError(f"dataset {source.source}: no documents in it")


def check_keys(source: Dataset) -> None:
    """Complain of what is given and changes nothing."""
    keys = kind_of(source).keys
    given = [key for key, field in Dataset.model_fields.items() if getattr(source, key) != field.default]
    if idle := [key for key in given if key not in (*_OF_ALL, *keys)]:
        there = f"; it may have: {', '.join(keys)}" if keys else ""
        raise UserError(f"dataset {source.source}: {idle[0]} changes nothing of such a source: leave it out{there}")


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


@cache
def _stdlib_files() -> list[tuple[str, Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = ((path.relative_to(root), path) for path in root.rglob("*.py"))
    return sorted((str(name), path) for name, path in found if not _LEFT_OUT & set(name.parts[:-1]))


def _plain(path: Path, separator: str) -> Iterator[str]:
    """What a separator divides; without one, chunks of the one document that the file is."""
    rest = ""
    for block in _blocks(path):
        *found, rest = (rest + block).split(separator) if separator else _CHUNK.findall(rest + block)
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
    from_home(path)  # complains of a name that cannot be
    try:
        yield
    except UnicodeDecodeError as error:
        recoded = "iconv -f latin1 -t utf-8 recodes Latin-1"
        raise UserError(f"{path}: no UTF-8: {error.reason} at byte {error.start}; {recoded}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


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


def prompt_of(row: Mapping[str, Any]) -> Any:
    """What is asked: a text, or messages; None where there is neither."""
    return _text_or_messages(row.get("prompt"))


def opening(row: Row) -> str:
    """What a conversation is known by: the first thing that its user says; of a text, all of it."""
    begin = row.get("messages", row.get("prompt", row.get("text")))
    if isinstance(begin, str):
        return begin
    return next((each["content"] for each in begin if each["role"] == "user"), all_of(row))


def all_of(row: Row) -> str:
    return json.dumps(row, sort_keys=True, default=str)


def read(source: str, name: str = "", split: str = "train", check: Check = conversation) -> Iterator[PlacedRow]:
    """The rows of a local file or a hub dataset, always in the same order."""
    return checked(raw(source, name, split), check)


def checked(rows: Iterable[tuple[str, Any]], check: Check) -> Iterator[PlacedRow]:
    return ((where, located(check, row, where)) for where, row in rows)


def placed(rows: Iterable[Any], name: str) -> Iterator[tuple[str, Any]]:
    """Rows that are known by their numbers."""
    return ((f"{name}, row {number}", row) for number, row in enumerate(rows, 1))


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
        yield from placed(found, source)


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

    ends = ", ".join(FILES)
    if os.path.isfile(source):
        raise UserError(f"dataset {source}: how a file is read follows from its name, which must end in one of {ends}")
    try:
        yield from load_dataset(source, name or None, split=split, streaming=streaming)
    except Exception as error:  # whatever a hub, a network and a loader can come up with
        raise UserError(
            f"dataset {source}: cannot be loaded: {first_line(error)} (local files end in {ends})"
        ) from None
