"""The configuration that people edit: read strictly, checked with messages that say what to do, then frozen.

Each section describes its keys in a class of its own below `Section`; a method's configuration inherits from those
that it uses. A key is *bound* when changing it would change results, *operational* otherwise.
"""

import difflib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, WithJsonSchema

from fleet import strictjson
from fleet.errors import UserError as UserError

LIMIT = 1 << 20

Text = Annotated[
    str, StringConstraints(pattern=r"^\P{C}+$"), WithJsonSchema({"expected": "text without control characters"})
]
Anything = Annotated[
    str,
    StringConstraints(pattern=r"^\P{C}*$"),
    WithJsonSchema({"expected": "text without control characters, or none"}),
]
Name = Annotated[
    str,
    StringConstraints(pattern=r"^([A-Za-z0-9][A-Za-z0-9_.-]{0,63})?$"),
    WithJsonSchema({"expected": "up to 64 letters, digits, '.', '-' and '_', beginning with a letter or a digit"}),
]
Metrics = Literal["csv", "tensorboard", "wandb", "trackio"]


# Bound keys that earlier versions had, each with the value at which this code does what they did: a run that has it so
# goes on. At any other value the key is unknown, and refused.
RETIRED: dict[str, Any] = {}


class Section(BaseModel):
    """The keys that one part of the project understands."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    gone: ClassVar[Mapping[str, str]] = {}  # keys that people may still have in their files, and what there is instead
    lacked: ClassVar[Mapping[str, Any]] = {}  # bound keys that came later, and what runs without them do

    def bound(self) -> dict[str, Any]:
        return {key: value for key, value in self.model_dump(mode="json").items() if is_bound(type(self), key)}

    def operational(self) -> dict[str, Any]:
        return {key: value for key, value in self.model_dump(mode="json").items() if not is_bound(type(self), key)}

    @classmethod
    def joined(cls, bound: Mapping[str, Any], operational: Mapping[str, Any]) -> Self:
        """The configuration as it stands in a run folder, perhaps of an older version: what is missing is as it was
        done then, or has its default, and what changes no results may be unknown."""
        kept = {key: value for key, value in bound.items() if key not in RETIRED or RETIRED[key] != value}
        known = {key: value for key, value in operational.items() if key in cls.model_fields}
        older = {key: each.lacked[key] for each in cls.__mro__ if issubclass(each, Section) for key in each.lacked}
        return validated(cls, {**older, **kept, **known}, "the run's configuration")


def bound(default: Any, about: str, **limits: Any) -> Any:
    """A key that results depend on."""
    return Field(default, description=about, json_schema_extra={"bound": True}, **limits)


def operational(default: Any, about: str, **limits: Any) -> Any:
    """A key that may change from one launch of a run to the next."""
    return Field(default, description=about, json_schema_extra={"bound": False}, **limits)


def is_bound(section: type[BaseModel], key: str) -> bool:
    extra = section.model_fields[key].json_schema_extra
    return isinstance(extra, dict) and bool(extra["bound"])


class FleetConfig(Section):
    """The run itself."""

    algorithm: Name = bound("", "Which method the run uses. Empty: the script's own; one of another script is refused.")
    project_name: Name = bound("", "The run's folder below BASE_DIR. Empty: the algorithm's name.")
    seed: int = bound(1, "Where all randomness begins.", ge=0, le=2**63 - 1)
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
    grace_seconds: float = bound(
        0.0,
        "With QUORUM below 1: how long a round that has its quorum waits for the others. 0: one and a half times the "
        "median of what its finished members have taken.",
        ge=0,
        le=1e6,
    )
    base_dir: Text = operational(
        "runs",
        "The folder on the shared disk that holds the runs, relative to the configuration file; or s3://BUCKET/PATH.",
    )
    num_machines: int = operational(
        2, "Workers that a command starts here, or tasks of a Slurm job; not where machines.json says.", ge=1, le=1024
    )
    snapshot_minutes: float = operational(
        10.0, "How much of a long recipe a killed process may lose.", ge=0.001, le=1e5
    )
    keep_every: int = operational(
        0, "The files of every N-th round stay, to evaluate, export or fork it; 0: of the last ones only.",
        ge=0, le=90_000,
    )  # fmt: skip
    dead_seconds: float = operational(
        60.0, "A worker on another machine whose pulse stands still for so long looks dead.", ge=0.5, le=1e5
    )
    poll_seconds: float = operational(
        0.13,
        "The longest pause of a waiting worker between two looks, unless looking itself takes long.",
        ge=0.005,
        le=60,
    )
    disk_lane: bool = operational(
        False,
        "While a worker trains, a second thread writes what it made before, makes what needs no device (the outer "
        "step, means), and reads ahead. So it waits less for a slow disk.",
    )
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
    local_package: Anything = operational(
        "", "The folder of the code that the launcher gives to all machines; empty: this project."
    )
    group_readable: bool = operational(False, "Lets the user's group read the run; otherwise it is the user's alone.")
    metrics: tuple[Metrics, ...] = operational(
        ("csv",), "Where metrics go: csv always, and whichever of the others are named.", strict=False
    )
    wandb_project: Anything = operational(
        "", "METRICS wandb: its project there; empty: WANDB_PROJECT in the environment, or the algorithm's name."
    )
    wandb_entity: Anything = operational("", "METRICS wandb: its owner there; empty: whoever is logged in.")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = operational("INFO", "Of the workers' logs.")

    @property
    def rounds(self) -> int:
        """The most there will be, for people."""
        return self.max_generations

    def steps_in(self, round: int) -> int:
        """How long a round trains, where they differ in that."""
        return 1


T = TypeVar("T", bound=Section)
M = TypeVar("M", bound=BaseModel)


def load(path: Path, section: type[T]) -> T:
    """A configuration file as a frozen record."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{path}: an object is expected, {{...}}, not {_short(value)}")
    return validated(section, _all_lowered(section, lowered(value, str(path)), str(path)), str(path))


def read_json(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            data = file.read(LIMIT + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        return strictjson.parse(data, LIMIT)
    except strictjson.BadJson as error:
        raise UserError(f"{path}: {error}") from None


def whole(name: str, where: Path, endings: tuple[str, ...] = ()) -> str:
    """A local file or folder by its whole path, seen from a folder: workers may be anywhere. `model+adapter` is two of
    them; any other name, such as a hub's, stays what it is."""
    path = where / os.path.expanduser(name)
    if name and (os.path.exists(path) or name.endswith(endings)):  # os.path's: names may be too long for a file system
        return os.path.abspath(path)
    model, plus, adapter = name.partition("+")
    return f"{whole(model, where)}+{whole(adapter, where)}" if plus else name


def lowered(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Keys are the same in any case."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if key.lower() in found:
            raise UserError(f"{where}: the key {_short(key)} stands there twice, in two spellings")
        found[key.lower()] = value
    return found


def _all_lowered(model: type[BaseModel], values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Within records of lists, too."""
    found = dict(values)
    for key, items in values.items():
        if isinstance(items, list) and key in model.model_fields and _item(model, key):
            begin = f"{where}: {key.upper()}, number"
            found[key] = [lowered(each, f"{begin} {n}") if isinstance(each, dict) else each
                          for n, each in enumerate(items, 1)]  # fmt: skip
    return found


def validated(model: type[M], values: Mapping[str, Any], where: str, spelled: Callable[[str], str] = str.upper) -> M:
    """A record of these values, or all that is wrong with them, a line each."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        deep = {each["loc"][0] for each in error.errors() if len(each["loc"]) > 2}  # says more than "not a list of ..."
        errors = [each for each in error.errors() if len(each["loc"]) > 2 or not {*each["loc"][:1]} & deep]
        problems = [_problem(model, values, dict(each), spelled) for each in errors]
        raise UserError("\n".join(f"{where}: {each}" for each in dict.fromkeys(problems))) from None


def _problem(model: type[M], values: Mapping[str, Any], error: Mapping[str, Any], spelled: Callable[[str], str]) -> str:
    why = str(error["msg"]).removeprefix("Value error, ")
    if not error["loc"]:  # a rule about several keys says all by itself
        return why
    key = str(error["loc"][0])
    if key not in model.model_fields:
        for section in model.__mro__:
            if issubclass(section, Section) and key in section.gone:
                return f"{spelled(key)} is no key any more: {section.gone[key]}"
        near = spelled(_nearest(key, model))
        listed = "docs/configuration.md lists all"
        return f"unknown key {_short(spelled(key))}; the nearest known key is {near}, {listed}"
    if len(error["loc"]) > 2 and isinstance(item := error["loc"][1], int):  # within a record of a list
        what, record = f"{_short(error['input'])}: {why}", _item(model, key)
        if error["type"] == "extra_forbidden":
            near = f"; the nearest known key is {_nearest(str(error['loc'][-1]), record)}" if record else ""
            what = f"unknown{near}"
        return f"{spelled(key)}, number {item + 1}, {'.'.join(map(str, error['loc'][2:]))}: {what}"
    seen = f"is {_short(values[key])}" if key in values else "is missing"
    if error["type"] != "value_error":
        why = f"{allowed(model, key)} is expected"
        if why.startswith("a list") and isinstance(values.get(key), str | dict):
            why += f", such as [{_short(values[key])}]"
    return f"{spelled(key)} {seen}: {why}"


def _nearest(key: str, model: type[BaseModel]) -> str:
    return difflib.get_close_matches(key[:64].lower(), model.model_fields, n=1, cutoff=0.0)[0]


def _item(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    """The record that a list's items are, if they are of one kind."""
    named = get_args(model.model_fields[key].annotation)
    return next((each for each in named if isinstance(each, type) and issubclass(each, BaseModel)), None)


def _shown(value: Any) -> str:
    return json.dumps(value, default=lambda record: record.model_dump(exclude_defaults=True))


def _short(value: Any) -> str:
    shown = json.dumps(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


# -- what is allowed, for messages and for docs/configuration.md -----------------------------------------------------


def table(models: Iterable[type[BaseModel]], spelled: Callable[[str], str] = str.upper) -> str:
    """The keys that these classes add, as a table."""
    lines = ["| key | default | allowed | changes results | what it is |", "|---|---|---|---|---|"]
    for model in models:
        for key in model.__annotations__:
            if field := model.model_fields.get(key):
                required = field.is_required()
                default = "" if required else f"`{_shown(field.get_default(call_default_factory=True))}`"
                results = "yes" if is_bound(model, key) else "no"
                cells = (f"`{spelled(key)}`", default, allowed(model, key), results, field.description)
                lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def allowed(model: type[BaseModel], key: str) -> str:
    """In words: "a whole number from 1 to 4096"."""
    return _words(model.model_json_schema()["properties"][key])


_NOUNS = {
    **{"string": "text", "integer": "a whole number", "number": "a number"},
    **{"boolean": "true or false", "object": "an object, {...},"},
}
_SIDES = {"minimum": "from", "exclusiveMinimum": "from above"}, {"maximum": "to", "exclusiveMaximum": "to below"}


def _words(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_words(each) for each in schema["anyOf"] if each.get("type") != "null")
    if "$ref" in schema:
        return "an object, {...},"
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return " or ".join(map(json.dumps, schema["enum"]))
    if schema.get("type") == "array":
        if "prefixItems" in schema:  # so many, all alike
            return f"a list of {schema['maxItems']} items, each {_words(schema['prefixItems'][0])}"
        most = f" up to {schema['maxItems']}" if "maxItems" in schema else ""
        return f"a list of{most} items, each {_words(schema['items'])}"
    noun = schema.get("expected") or _NOUNS[schema["type"]]
    low, high = ([f"{word} {_plain(schema[name])}" for name, word in side.items() if name in schema] for side in _SIDES)
    return " ".join([noun, *low, *(high or low and ["upwards"])])


def _plain(number: float) -> str:
    return str(int(number) if number == int(number) else number)
