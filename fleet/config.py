"""The configuration that people edit: read strictly, checked with messages that say what to do, then frozen.

Each room describes its keys in a class of its own below `Room`; a method's configuration inherits from the rooms
that it uses. A key is *bound* when changing it would change results, *operational* otherwise.
"""

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from fleet import strictjson

LIMIT = 1 << 20


class Wrong(ValueError):
    """A configuration that cannot be used; says where, what was seen and what is allowed."""


class Room(BaseModel):
    """The keys that one part of the project understands."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def bound(self) -> dict[str, Any]:
        return self._keys(bound=True)

    def operational(self) -> dict[str, Any]:
        return self._keys(bound=False)

    def _keys(self, bound: bool) -> dict[str, Any]:
        values = self.model_dump(mode="json")
        return {key: values[key] for key in values if is_bound(type(self), key) == bound}

    @classmethod
    def joined(cls, bound: Mapping[str, Any], operational: Mapping[str, Any]) -> Self:
        """The configuration as it stands in a run folder."""
        return validated(cls, {**bound, **operational}, "the run's configuration")


def bound(default: Any, about: str, **limits: Any) -> Any:
    """A key that results depend on."""
    return Field(default, description=about, json_schema_extra={"bound": True}, **limits)


def operational(default: Any, about: str, **limits: Any) -> Any:
    """A key that may change from one launch of a run to the next."""
    return Field(default, description=about, json_schema_extra={"bound": False}, **limits)


def is_bound(room: type[BaseModel], key: str) -> bool:
    extra = room.model_fields[key].json_schema_extra
    return isinstance(extra, dict) and bool(extra["bound"])


def _plain_name(value: str) -> str:
    if value and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", value):
        raise ValueError("allowed are up to 64 letters, digits, '.', '-' and '_', beginning with a letter or a digit")
    return value


class FleetConfig(Room):
    """The run itself."""

    algorithm: Annotated[str, AfterValidator(_plain_name)] = bound(
        "", "Which method the run uses. A script's own algorithm, or a flag, wins over it."
    )
    project_name: Annotated[str, AfterValidator(_plain_name)] = bound(
        "", "The run's folder below BASE_DIR. Empty: the algorithm's name."
    )
    seed: int = bound(1, "Where all randomness begins.", ge=0, lt=2**63)
    population_size: int = bound(8, "Members, or replicas, of a round.", ge=1, le=4096)
    max_generations: int = bound(
        12, "Rounds that train; round 0 prepares and one last round may sum up.", ge=1, le=90_000
    )
    threads: int = bound(
        1, "Threads of one worker. Fixed, never derived from the number of workers: sums depend on it.", ge=1, le=1024
    )
    quorum: float = bound(
        1.0,
        "Below 1, rounds are elastic: from this share of a round's members on, late ones may be closed.",
        gt=0,
        le=1,
    )
    grace_seconds: float = bound(60.0, "Elastic rounds: how long a quorum waits for the others.", ge=0, le=1e6)
    base_dir: str = operational(
        "runs", "The folder on the shared disk that holds the runs; relative to the configuration file.", min_length=1
    )
    num_machines: int = operational(2, "Local workers, where one machine stands for several.", ge=1, le=1024)
    snapshot_minutes: float = operational(
        10.0, "How much of a long recipe a killed process may lose.", ge=0.001, le=1e5
    )
    dead_seconds: float = operational(
        60.0, "A worker on another machine whose pulse stands still for so long looks dead.", ge=0.5, le=1e5
    )
    poll_seconds: float = operational(0.18, "The longest pause of a waiting worker between two looks.", ge=0.005, le=60)
    backup_factor: float = operational(
        0.0,
        "Above 0, an idle worker makes again what a slow holder needs so many times longer for; 0 never does.",
        ge=0,
        le=100,
    )
    time_limit_hours: float = operational(
        0.0, "Ends the run for good when a worker has worked for so long; 0 never does.", ge=0, le=1e5
    )
    restarts: int = operational(5, "How often in a row a worker that crashed at once is started again.", ge=0, le=1000)
    log_level: str = operational("INFO", "Of the workers' logs.", pattern="^(DEBUG|INFO|WARNING|ERROR)$")


T = TypeVar("T", bound=Room)


def load(path: Path, room: type[T]) -> T:
    """A configuration file as a frozen record."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise Wrong(f"{path}: an object is expected, {{...}}, not {_short(value)}")
    return validated(room, _lowered(value, path), str(path))


def validated(room: type[T], values: Mapping[str, Any], where: str) -> T:
    for key in values:
        if key not in room.model_fields:
            near = difflib.get_close_matches(key, room.model_fields, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0].upper()}?" if near else "; docs/configuration.md lists all keys"
            raise Wrong(f"{where}: unknown key {key.upper()}{hint}")
    try:
        return room.model_validate(values)
    except ValidationError as error:
        raise Wrong("\n".join(f"{where}: {_problem(dict(each))}" for each in error.errors())) from None


def read_json(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            data = file.read(LIMIT + 1)
    except OSError as error:
        raise Wrong(f"{path}: {error.strerror}") from None
    try:
        return strictjson.parse(data, LIMIT)
    except strictjson.Bad as error:
        comments = (
            ""
            if not re.search(rb"^\s*(//|#|/\*)|[\],}0-9\"]\s*(//|#|/\*)", data, re.M)
            else ("; JSON has no comments: remove what stands after // or #")
        )
        raise Wrong(f"{path}: {error}{comments}") from None


def table(rooms: list[type[Room]]) -> str:
    """All keys as a table for docs/configuration.md."""
    lines = ["| key | default | allowed | changes results | what it is |", "|---|---|---|---|---|"]
    for room in rooms:
        own = [key for key in room.__annotations__ if key in room.model_fields]
        for key in own:
            field = room.model_fields[key]
            results = "yes" if is_bound(room, key) else "no"
            default = strictjson.text(field.get_default(call_default_factory=True))
            lines.append(f"| `{key.upper()}` | `{default}` | {allowed(room, key)} | {results} | {field.description} |")
    return "\n".join(lines) + "\n"


def allowed(room: type[BaseModel], key: str) -> str:
    schema = room.model_json_schema()["properties"][key]
    kinds = {
        "string": "text",
        "integer": "whole number",
        "number": "number",
        "boolean": "true or false",
        "array": "list",
    }
    words = [kinds.get(schema.get("type", ""), schema.get("type", "see text"))]
    signs = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    words += [f"{sign} {schema[name]:g}" for name, sign in signs.items() if name in schema]
    if "pattern" in schema:
        words = [schema["pattern"].strip("^$()").replace("|", ", ")]
    return ", ".join(words)


def _lowered(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    lowered: dict[str, Any] = {}
    for key, value in values.items():
        if key.lower() in lowered:
            raise Wrong(f"{path}: the key {key.upper()} stands there twice, in two spellings")
        lowered[key.lower()] = value
    return lowered


def _problem(error: dict[str, Any]) -> str:
    key = ".".join(str(part) for part in error["loc"])
    return f"{key.upper()} is {_short(error['input'])}: {error['msg']}"


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
