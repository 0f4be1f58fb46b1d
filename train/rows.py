"""Where the rows of fine-tuning come from: local files, the hub. Each is checked before anything is learned from it."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fleet.config import UserError
from fleet.errors import first_line

FILES = (".jsonl", ".parquet")
CHAT = '{"messages": [{"role": "user", "content": "..."}, ...]} or {"text": "..."}'
PAIR = '{"prompt": ..., "chosen": ..., "rejected": ...}, each a text or messages'
LONGEST = 1 << 26  # characters of a line, or of a document of several
_SHOWN = 200  # characters of a bad row

Row = Mapping[str, Any]
Message = Mapping[str, Any]
Check = Callable[[Any], Row]


def conversation(row: Any) -> Row:
    """A row of messages or of text, and nothing else of it."""
    if isinstance(row, Mapping) and row.get("messages") is not None:
        if found := _messages(row["messages"]):
            return {"messages": found}
    elif isinstance(row, Mapping) and isinstance(row.get("text"), str):
        return {"text": _whole(row["text"])}
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
        found = _parquet(Path(source)) if source.endswith(FILES) else _hub(source, name, split, streaming)
        for number, row in enumerate(found, 1):
            yield f"{source}, row {number}", row


def is_local(source: str) -> bool:
    return source.endswith(FILES)


def checked(rows: Iterable[Any], name: str, check: Check = conversation) -> Iterator[Row]:
    """Rows from anywhere."""
    for number, row in enumerate(rows, 1):
        yield located(check, row, f"{name}, row {number}")


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
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST), ""), 1):
                if len(line) == LONGEST:
                    raise UserError(f"{path}, line {number}: longer than {LONGEST} characters")
                yield number, line
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


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
        ends = ", ".join((*FILES, ".txt"))
        raise UserError(
            f"dataset {source}: cannot be loaded: {first_line(error)} (local files end in {ends})"
        ) from None
