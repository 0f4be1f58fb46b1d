"""YAML as this project reads it: data only, no anchors, no tags, no key twice."""

from typing import Any

import yaml


class Bad(ValueError):
    """Text that is not the YAML we accept; says where and why."""


class _Loader(yaml.SafeLoader):
    """No key twice."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key, _ in node.value:
        name = loader.construct_object(key)  # type: ignore[no-untyped-call]
        if not isinstance(name, str):
            raise Bad(f"line {key.start_mark.line + 1}: the key {name!r} is not text")
        if name in seen:
            raise Bad(f"line {key.start_mark.line + 1}: the key {name!r} stands there twice")
        seen.add(name)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def parse(text: str) -> Any:
    """The data; or where and why it is refused."""
    try:
        for event in yaml.parse(text, Loader=_Loader):
            where = f"line {event.start_mark.line + 1}" if event.start_mark else "the file"
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                raise Bad(f"{where}: anchors and aliases are not accepted; write the value where it is needed")
            if getattr(event, "tag", None):
                raise Bad(f"{where}: the tag {event.tag} is not accepted; plain values only")
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except Bad:
        raise
    except yaml.MarkedYAMLError as error:
        place = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise Bad(f"{place}not YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise Bad(f"not YAML: {' '.join(str(error).split())[:200]}") from None
    except RecursionError:
        raise Bad("nested too deeply") from None
    except ValueError as error:  # a date that does not exist, a number of thousands of digits
        raise Bad(f"not YAML: {error}") from None
