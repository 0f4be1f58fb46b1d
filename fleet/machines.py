"""machines.json: the machines that a person has, read strictly, since their names end up in commands."""

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from fleet.config import Wrong, _problem, read_json


def _host(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_.:-]{0,251}[A-Za-z0-9])?", value):
        raise ValueError("a host is a name or an address: letters, digits, '.', '-', '_', ':'")
    return value


def _user(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.@\\-]{0,63}", value):
        raise ValueError("a user name is letters, digits, '.', '-', '_', '@', beginning with a letter, digit or '_'")
    return value


def _plain(value: str) -> str:
    if not value or any(ord(c) < 32 or ord(c) == 127 for c in value):
        raise ValueError("must not be empty, nor hold control characters")
    return value


def _environment(value: dict[str, str]) -> dict[str, str]:
    for key, text in value.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key) or "\0" in text:
            raise ValueError(f"{key!r} cannot be set in an environment")
    return value


Text = Annotated[str, AfterValidator(_plain)]


class Machine(BaseModel):
    """One machine and what runs there."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    host: Annotated[str, AfterValidator(_host)]
    port: int | None = Field(None, ge=1, le=65535)
    user: Annotated[str, AfterValidator(_user)] | None = None
    key: Text | None = None
    name: Annotated[str, AfterValidator(_host)] = ""
    workers: int = Field(1, ge=1, le=1024)
    devices: tuple[Annotated[int, Field(ge=0, le=1023)], ...] = ()
    python: Text = "python3"
    setup: Text | None = None
    env: Annotated[dict[str, str], AfterValidator(_environment)] = Field(default_factory=dict)
    base_dir: Text | None = None


def load(path: Path) -> tuple[Machine, ...]:
    entries = read_json(path)
    if not isinstance(entries, list) or not entries:
        raise Wrong(f'{path}: a list with at least one machine is expected, such as ["192.168.0.1", "192.168.0.2"]')
    machines = tuple(_machine(entry, f"{path}: machine {n}") for n, entry in enumerate(entries, 1))
    for what in ("name", "host"):
        seen: set[tuple[Any, ...]] = set()
        for machine in machines:
            mark = (machine.name,) if what == "name" else (machine.host.lower(), machine.port or 22, machine.user)
            if mark in seen:
                raise Wrong(
                    f"{path}: the {what} {getattr(machine, what)} stands there twice; for more workers on one "
                    "machine use its workers or devices"
                )
            seen.add(mark)
    return machines


def _machine(entry: Any, where: str) -> Machine:
    if isinstance(entry, str):
        entry = {"host": entry}
    if not isinstance(entry, dict):
        raise Wrong(f"{where}: a host or an object is expected, not {entry!r}")
    entry = {key.lower(): value for key, value in entry.items()}
    if isinstance(entry.get("devices"), list):
        entry["devices"] = tuple(entry["devices"])
    if "workers" in entry and "devices" in entry:
        raise Wrong(f"{where}: workers and devices exclude each other: there is one worker a device")
    entry.setdefault("name", entry.get("host"))
    try:
        return Machine.model_validate(entry)
    except ValidationError as error:
        known = ", ".join(Machine.model_fields)
        problems = [
            _problem(dict(each)).replace("Extra inputs are not permitted", f"unknown; known are {known}")
            for each in error.errors()
        ]
        raise Wrong("\n".join(f"{where}: {problem}" for problem in problems)) from None
