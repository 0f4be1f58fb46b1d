"""machines.json: the machines that a person has, read strictly, since their names end up in commands."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, WithJsonSchema

from fleet.run_config import Text, UserError, bound, lowered, read_json, validated

Host = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9_]([A-Za-z0-9_.:-]{0,251}[A-Za-z0-9])?$"),
    WithJsonSchema({"expected": "a host's name or address (letters, digits, '.', '-', '_', ':')"}),
]
Whole = Annotated[
    str, StringConstraints(pattern=r"^/\P{C}+$"), WithJsonSchema({"expected": 'a whole path, such as "/mnt/disk/runs"'})
]
User = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.@-]{0,63}$"),
    WithJsonSchema({"expected": "a user's name (letters, digits, '.', '-', '_', '@')"}),
]
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Environment = Annotated[dict[Variable, Text], WithJsonSchema({"expected": 'an object such as {"HF_HOME": "/data/hf"}'})]


def _different(devices: tuple[int, ...]) -> tuple[int, ...]:
    if len({*devices}) < len(devices):
        raise ValueError("a device stands there twice")
    return devices


Devices = Annotated[
    tuple[Annotated[int, Field(ge=0, le=1023)], ...],
    AfterValidator(_different),
    WithJsonSchema({"expected": "a list of different whole numbers from 0 to 1023"}),
]


class Machine(BaseModel):
    """One machine and what runs there."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    host: Host = Field(description="Where SSH finds it.")
    port: int | None = Field(None, ge=1, le=65535, description="Of its SSH server, if not the usual one.")
    user: User | None = Field(None, description="Who to log in as, if not as SSH would by itself.")
    key: Text | None = Field(None, description="The file of the private key, if not one that SSH finds by itself.")
    name: Host = Field("", description="What messages call it; the host by default.")
    workers: int = Field(1, ge=1, le=1024, description="How many run there, on its GPUs in turn; not beside `devices`.")
    devices: Devices = Field((), strict=False, min_length=1, description="One worker for each of these accelerators.")
    devices_per_worker: int | None = bound(
        None, "Or one worker for so many of them: the run's DEVICES_PER_WORKER, all machines' alike.", ge=1, le=1024
    )
    sharding_strategy: Text | None = bound(None, "The run's SHARDING_STRATEGY, all machines' alike.")
    python: Text = Field("python3", description="The Python that runs the workers there.")
    setup: Text | None = Field(None, description="A shell command that comes first there, such as `module load cuda`.")
    env: Environment = Field(default_factory=dict, description="Environment variables of its workers.")
    base_dir: Whole | None = Field(None, description="Where it mounts the shared disk's BASE_DIR, if elsewhere.")


def said_of_run(machines: Sequence[Machine]) -> dict[str, Any]:
    """What machines.json says about the run's configuration: the same on each machine, since results depend on it."""
    found: dict[str, Any] = {}
    for key in ("devices_per_worker", "sharding_strategy"):
        said = {machine.name: getattr(machine, key) for machine in machines}
        if len({*said.values()}) > 1:
            each = ", ".join(f"{value or 'nothing'} for {name}" for name, value in said.items())
            raise UserError(
                f"machines.json: {key} must be the same for all machines, since results depend on it: {each}"
            )
        if value := next(iter(said.values()), None):
            found[key] = value
    return found


def file_name(machine: str) -> str:
    """What its files in a run are called."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", machine)[:40]


def load(path: Path) -> tuple[Machine, ...]:
    entries = read_json(path)
    if not isinstance(entries, list) or not entries:
        raise UserError(f'{path}: a list with at least one machine is expected, such as ["192.168.0.1", "192.168.0.2"]')
    machines = [_machine(entry, f"{path}: machine {n}") for n, entry in enumerate(entries, 1)]
    places = [(machine.host.lower(), machine.port or 22, machine.user) for machine in machines]
    names = [file_name(machine.name).lower() for machine in machines]
    for n, machine in enumerate(machines):
        where, twice = f"{path}: machine {n + 1}", "stands there twice"
        if places[n] in places[:n]:
            why = "for more workers on one machine use its workers or devices"
            raise UserError(f"{where}: the host {machine.host} {twice}; {why}")
        if names[n] in names[:n]:
            raise UserError(f"{where}: the name {machine.name} {twice}, or nearly; give one of the two another name")
    return tuple(machines)


def _machine(entry: Any, where: str) -> Machine:
    if isinstance(entry, str):
        entry = {"host": entry}
    if not isinstance(entry, dict):
        raise UserError(f"{where}: a host, or an object that has one, is expected, not {type(entry).__name__}")
    entry = lowered(entry, where)
    if "workers" in entry and "devices" in entry:
        raise UserError(f"{where}: workers and devices exclude each other: each device has one worker")
    machine = validated(Machine, entry, where, spelled=str)
    return machine if machine.name else machine.model_copy(update={"name": machine.host})
