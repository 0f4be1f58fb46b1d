"""Start, check, watch and stop a run on all machines: what stands behind launch_to_machines.py."""

import json
import os
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fleet import faults
from fleet.busy_notice import saying
from fleet.console import console
from fleet.idle_workers import idle
from fleet.machines import Machine, file_name, said_of_run
from fleet.our_packages import spoken
from fleet.places import address, in_bucket
from fleet.plain import say
from fleet.processes import thread_counts
from fleet.remote import agent, bucket_check, preflight
from fleet.remote.all_machines import Links
from fleet.remote.code import Code, pack, requirements
from fleet.remote.preflight import Report, accelerators
from fleet.remote.run_proxy import RemoteRunProxy, RunProxy
from fleet.run import begun
from fleet.run_config import FleetConfig, UserError, lowered, read_json, validated

MethodScripts = Mapping[str, Sequence[str]]  # method: its script, as Python's words

_LAUNCH_SCRIPT = "launch_to_machines"


@dataclass(frozen=True)
class RunLocation:
    """What the configuration file says about where the run is, without anything that costs an import."""

    file: Path
    base: str  # as the launching machine calls it
    project: str
    algorithm: str
    local_package: str

    @property
    def folder(self) -> str:
        return f"{self.base}/{self.project}"

    def of(self, machine: Machine) -> str:
        """BASE_DIR as that machine calls it."""
        return machine.base_dir.rstrip("/") if machine.base_dir and not self.in_bucket else self.base

    @property
    def in_bucket(self) -> bool:
        return in_bucket(Path(self.base))


def place(file: Path, algorithm: str, scripts: MethodScripts) -> RunLocation:
    value = read_json(file)
    if not isinstance(value, dict):
        raise UserError(f"{file}: an object is expected, {{...}}")
    keys = lowered(value, str(file))
    algorithm = algorithm or str(keys.get("algorithm") or "") or next(iter(scripts))
    if algorithm.endswith("-loop"):
        raise UserError(
            f"{file}: ALGORITHM {algorithm}: a training loop of your own is no method that the launcher knows: start "
            "your script on each machine, with the run's folder on the shared disk"
        )
    if algorithm not in scripts:
        raise UserError(f"ALGORITHM {algorithm!r}: the launcher starts {' or '.join(scripts)}")
    said = Path(str(keys.get("base_dir") or "runs"))
    base = address(said) if in_bucket(said) else os.path.normpath(file.absolute().parent / said)
    project = str(keys.get("project_name") or algorithm)
    package = str(keys.get("local_package") or "")
    return RunLocation(file, base, project, algorithm, str(file.absolute().parent / package) if package else "")


def again(*words: str) -> str:
    """Another command about the same run, to be copied."""
    mine = Path(sys.argv[0]).stem == _LAUNCH_SCRIPT
    return shlex.join([*(["python", sys.argv[0]] if mine else spoken(_LAUNCH_SCRIPT)), *words])


class Launcher:
    def __init__(
        self, place: RunLocation, machines: Sequence[Machine], scripts: MethodScripts, root: Path,
        seconds: float = 15.0, through: str = "", ssh_config: Path | None = None, strict: bool = False,
        apart: Sequence[Path] = (), options: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.place, self.machines, self.scripts = place, machines, scripts
        self.through, self.strict, self.seconds = through, strict, seconds
        self.console = console()
        self._mine, self._options = apart, options
        self.stranger = ""  # why this machine's own BASE_DIR is not the one of the others
        self._project, self._root, self.ssh_config = root, Path(place.local_package or root), ssh_config
        self._proxy: RunProxy | RemoteRunProxy | None = None
        self._facts: dict[str, Any] | None = None

    def command(self, *words: str) -> str:
        return again(*words, *self._options)

    @cached_property
    def code(self) -> Code:
        """Without the files that say what this launcher is to do: they may hold secrets, and may change."""
        usual = [self._root / name for name in ("machines.json", "evolution.json")]
        code = pack(self._root, [self.place.file, *self._mine, *usual])
        return code if code.requirements else replace(code, requirements=requirements(self._project))

    def links(self, machines: Sequence[Machine] | None = None) -> Links:
        return Links(self.machines if machines is None else machines, self.seconds, self.ssh_config, self.console)

    # -- the way to the run --------------------------------------------------------------------------------------------

    def proxy(self, links: Links | None) -> RunProxy | RemoteRunProxy:
        """Here, if this machine sees the disk; or by way of one that does."""
        if not self._proxy and self.sees_disk():
            self._proxy = RunProxy(self._root)
        if self._proxy:
            return self._proxy
        if links is None:
            with self.links(self._gates()) as links:
                return self.proxy(links)
        gates = [machine for machine in links.there if machine in self._gates()]
        if not gates:
            why = "; ".join(f"{name}: {why}" for name, why in links.bad.items())
            raise UserError(f"BASE_DIR {self.place.base} is not on this machine, and none that has it answers: {why}")
        self._gate = gates[0]
        self._proxy = RemoteRunProxy(links.fresh(self._gate), self.code.digest, self.code.text, self._gate.env)
        return self._proxy

    def sees_disk(self) -> bool:
        if self.place.in_bucket:
            return not self.through and self._reaches_bucket
        return not self.through and Path(self.place.base).parent.is_dir()

    @cached_property
    def _reaches_bucket(self) -> bool:
        """From here, with the credentials that are here."""
        try:
            return begun(Path(self.place.folder)) or True
        except (UserError, faults.Fault):
            return False

    def named(self, name: str) -> Machine:
        names = [machine.name for machine in self.machines]
        if name not in names:
            raise UserError(f"no machine is called {name!r}: machines.json names {', '.join(names)}")
        return self.machines[names.index(name)]

    def base_at_proxy(self) -> str:
        return self.place.base if isinstance(self._proxy, RunProxy) else self.place.of(self._gate)

    def open(self, links: Links | None) -> tuple[RunProxy | RemoteRunProxy, str]:
        """The run that is there, and its id."""
        proxy = self.proxy(links)
        return proxy, proxy.ask("open", folder=f"{self.base_at_proxy()}/{self.place.project}")

    def _gates(self) -> list[Machine]:
        return [self.named(self.through)] if self.through else list(self.machines)

    # -- looking at the machines ---------------------------------------------------------------------------------------

    def facts(self, links: Links) -> dict[str, Any]:
        """What the machines that answer say of themselves; asked once."""
        if self._facts is None:
            asked = {"packages": list(self.code.requirements)}
            self._facts = links.ask("facts", "looking", lambda m: asked, wait=10)
        return self._facts

    def look(self, links: Links, run_id: str) -> list[Report]:
        """Ask every machine about itself, and all of them about the disk that they should share."""
        reports = {m.name: Report(m) for m in self.machines}
        for name, facts in self.facts(links).items():
            reports[name].facts, reports[name].notes = facts, list(links[name].notes)
            reports[name].clock = links[name].clock
        here = Report(Machine(host="localhost", name="this-machine"))
        if self.place.in_bucket:
            bucket_check.look(links, self.machines, self.place.base, self.code, reports)
        else:
            self._look_at_disk(links, reports, here)
        if run_id:
            for name, found in links.ask("running", "looking for workers", lambda m: {"run_id": run_id}).items():
                reports[name].running = found["processes"]
        preflight.judge([*reports.values()], here, self.code.requirements, self.strict, self.devices_of_each())
        self.stranger = f"This machine: {here.why}. With --through MACHINE it need not see it." if here.why else ""
        return [*reports.values()]

    def _look_at_disk(self, links: Links, reports: Mapping[str, Report], here: Report) -> None:
        round = secrets.token_hex(6)
        tokens, mine_here = {m.name: f"{round}-{n}" for n, m in enumerate(self.machines)}, f"{round}-here"
        if self.sees_disk():
            try:
                agent.show(self.place.base, mine_here)
            except agent.Problem as problem:
                raise UserError(str(problem)) from None

        def mine(m: Machine) -> dict[str, Any]:
            return {"base": self.place.of(m), "token": tokens[m.name]}

        def able() -> list[Machine]:
            """Those that have answered everything until now; of all others it is noted why not."""
            for name, why in links.bad.items():
                reports[name].why = reports[name].why or why
            return [m for m in self.machines if not reports[m.name].why]

        for name, got in links.ask("show", "writing to BASE_DIR", mine, able()).items():
            reports[name].free = got["free"]
        writers = able()
        all_tokens = [tokens[m.name] for m in writers] + ([mine_here] if self.sees_disk() else [])
        words = {"tokens": all_tokens, "seconds": 5.0}
        names = {token: name for name, token in tokens.items()} | {mine_here: here.machine.name}
        seen = links.ask("seen", "comparing disks", lambda m: {"base": self.place.of(m), **words}, writers, wait=6)
        for name, got in seen.items():
            reports[name].missing, reports[name].after = [names[token] for token in got["missing"]], got["after"]
        able()
        if self.sees_disk():
            here.missing = [names[token] for token in agent.seen(self.place.base, all_tokens, 2.0)["missing"]]
            agent.unshow(self.place.base, mine_here)
        links.ask("unshow", "tidying up", mine, writers)

    # -- starting ------------------------------------------------------------------------------------------------------

    def create(self, links: Links | None) -> dict[str, Any]:
        """Make the run, or join it; what its machines compute with decides what the configuration leaves open."""
        made: dict[str, Any] = self._ask_script("create", links, *self._accelerators(links))
        count = sum(len(seats(machine, made["devices_per_worker"])) for machine in self.machines)
        few = idle(count or made["workers"], made["slots"])
        return {**made, "notes": [*made["notes"], *([f"Note: {few}."] if few else [])]}

    def _accelerators(self, links: Links | None) -> list[str]:
        """What the script is told of the machines that are there. An engine's nobody can ask before they have work."""
        there = self.facts(links) if links else {}
        found = [accelerators(each, there[each.name]) for each in self.machines if each.name in there]
        return ["--accelerators", json.dumps([asdict(each) for each in found])] if found else []

    def preview(self, links: Links | None) -> str:
        """What the method says of the configuration, and what its text has of what the run needs."""
        return str(self._ask_script("preview", links))

    def _ask_script(self, verb: str, links: Links | None, *words: str) -> Any:
        proxy, also = self.proxy(links), said_of_run(self.machines)
        text = "" if isinstance(proxy, RunProxy) else self._config_text()
        command = [*self.scripts[self.place.algorithm], *(["--also", json.dumps(also)] if also else []), *words]
        with saying("the configuration and its text are looked at", say):  # its tokens may be counted
            return proxy.ask(verb, command=command, file=str(self.place.file.absolute()), text=text)

    def _config_text(self) -> str:
        """For a machine that calls the disk by its own name."""
        values = {key.upper(): value for key, value in self._values().items()}
        return json.dumps(values | {"BASE_DIR": self.base_at_proxy()})

    def _values(self) -> dict[str, Any]:
        return lowered(read_json(self.place.file), str(self.place.file))

    def run_at(self, machine: Machine) -> str:
        return f"{self.place.of(machine)}/{self.place.project}"

    def foreseen(self) -> dict[str, Any]:
        """What `create` would say, as far as it can be known without doing it."""
        values = self._values()
        known = {key: value for key, value in values.items() if key in FleetConfig.model_fields}
        config = validated(FleetConfig, known, str(self.place.file))
        return {
            "folder": self.place.folder, "run_id": "RUN-ID", "operational": config.operational(),
            "threads": config.threads, "restarts": config.restarts, "workers": config.num_machines,
            "devices_per_worker": self.devices_of_each(),
        }  # fmt: skip

    def devices_of_each(self) -> int:
        """Of each worker, as the files say that the run is to be."""
        said = said_of_run(self.machines).get("devices_per_worker") or self._values().get("devices_per_worker", 1)
        return said if isinstance(said, int) and said > 0 else 1  # whoever makes the run says what is wrong

    def order(
        self, run: str, machine: str, made: Mapping[str, Any], launch: int, seats: list[dict[str, str]]
    ) -> dict[str, Any]:
        """What a supervisor is told."""
        return {
            "run": run, "run_id": made["run_id"], "launch": launch, "machine": file_name(machine),
            "digest": self.code.digest, "command": list(self.scripts[self.place.algorithm]),
            "restarts": made["restarts"], "seats": seats, "first": 0, "lock": made["run_id"],
            "umask": 0o027 if made["operational"]["group_readable"] else 0o077,
        }  # fmt: skip

    def start(self, links: Links, machines: Sequence[Machine], made: Mapping[str, Any], launch: int) -> dict[str, Any]:
        """The code, and then the workers. What each machine answered whose workers are there."""
        if self.place.in_bucket:
            fetched = bucket_check.code_on(links, machines, self.code)
        else:
            code = {m.name: {"tar": f"{self.run_at(m)}/{self.code.name}", "digest": self.code.digest} for m in machines}
            fetched = links.ask("fetch", "copying the code", lambda m: code[m.name], machines, wait=30)

        def words(m: Machine) -> dict[str, Any]:
            order = self.order(self.run_at(m), m.name, made, launch, seats(m, made["devices_per_worker"]))
            return {**fetched[m.name], "order": order, "env": {**thread_counts(made["threads"]), **m.env}}

        return links.ask("start", "starting its workers", words, [m for m in machines if m.name in fetched], wait=10)


def seats(machine: Machine, each: int) -> list[dict[str, str]]:
    """What differs in the environment of each of its workers."""
    if len(machine.devices) % each:
        raise UserError(
            f"machines.json: {machine.name} has {len(machine.devices)} devices: not a multiple of "
            f"devices_per_worker, {each}"
        )
    found = [machine.devices[begin : begin + each] for begin in range(0, len(machine.devices), each)]
    mine = [{"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))} for devices in found]
    return mine or [{} for _ in range(machine.workers)]
