"""YAML as this project reads it: data only, no anchors, no tags, no key twice; bounded in size and in depth."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from fleet.errors import UserError

LIMIT = 1 << 20  # bytes
_DEEPEST = 32  # PyYAML takes a time that grows with the square of the depth
_LONGEST = 1000  # characters of a number


class BadYaml(UserError):
    """Text that is not the YAML we accept; says where and why."""


class _Loader(yaml.SafeLoader):
    """Looks at each event before anything is made of it."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        where = f"line {event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent) or event.anchor:
            raise BadYaml(f"{where}: anchors and aliases are not accepted; write the value where it is needed")
        if event.tag:
            raise BadYaml(f"{where}: the tag {event.tag} is not accepted; plain values only")
        if self.depth >= _DEEPEST:
            raise BadYaml(f"{where}: nested too deeply; {_DEEPEST} levels are accepted")
        self.depth += 1
        node: Any = super().compose_node(parent, index)
        self.depth -= 1
        if not node.tag.endswith((":str", ":map", ":seq")) and len(node.value) > _LONGEST:
            raise BadYaml(f"{where}: not YAML: a number of {len(node.value)} characters")
        return node


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key, _ in node.value:
        name = loader.construct_object(key)
        if not isinstance(name, str):
            raise BadYaml(f"line {key.start_mark.line + 1}: the key {name!r} is not text")
        if name in seen:
            raise BadYaml(f"line {key.start_mark.line + 1}: the key {name!r} stands there twice")
        seen.add(name)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def read(path: Path) -> str:
    """A file's text, if it is one that somebody wrote."""
    try:
        with path.open("rb") as file:
            data = file.read(LIMIT + 1)
    except OSError as error:
        raise BadYaml(f"cannot be read: {error.strerror}") from None
    if len(data) > LIMIT:
        raise BadYaml(f"longer than {LIMIT} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BadYaml(f"not UTF-8 at byte {error.start}") from None


def parse(text: str) -> Any:
    """The data; or where and why it is refused."""
    with _in_words():
        return yaml.load(text, Loader=_Loader)  # a SafeLoader


def parse_all(text: str) -> list[Any]:
    """The same of each document, where there are several with `---` between them."""
    with _in_words():
        return [each for each in yaml.load_all(text, Loader=_Loader) if each is not None]


@contextmanager
def _in_words() -> Iterator[None]:
    try:
        yield
    except BadYaml:
        raise
    except yaml.MarkedYAMLError as error:
        place = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise BadYaml(f"{place}not YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise BadYaml(f"not YAML: {' '.join(str(error).split())[:200]}") from None
    except (ValueError, OverflowError) as error:  # a date that does not exist, a number of thousands of digits
        raise BadYaml(f"not YAML: {error}") from None
