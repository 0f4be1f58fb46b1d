"""What the machines said about themselves: what would go wrong, what differs, and all of it in one table."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text

from fleet import gpus
from fleet.console import in_full
from fleet.gpus import Accelerators
from fleet.machines import Machine
from fleet.plain import plain, readable_bytes, some
from fleet.progress import duration
from fleet.status import table_of

_CLOCKS = 5.0  # seconds that two clocks may differ before it is worth a word
_SHOWN = ("torch", "transformers")  # packages that are shown in any case


@dataclass
class Report:
    """One machine, as far as it could be asked."""

    machine: Machine
    why: str = ""  # it cannot take part
    notes: list[str] = field(default_factory=list)
    facts: Mapping[str, Any] = field(default_factory=dict)
    free: int | None = None
    missing: list[str] | None = None  # machines whose tokens it does not see
    after: float = 0.0  # seconds until it saw all of them
    bucket: Mapping[str, Any] = field(default_factory=dict)  # how it reaches the bucket, if the run is in one
    clock: float = 0.0  # ahead of the launcher's
    running: list[Mapping[str, Any]] = field(default_factory=list)  # processes of this run

    @property
    def busy(self) -> bool:
        """Its supervisor or its workers run; a stray child of theirs keeps nobody from starting."""
        return any(each["what"] != "child" for each in self.running)

    @property
    def workers(self) -> int:
        return sum(each["what"] == "worker" for each in self.running)


def judge(
    reports: Sequence[Report], here: Report, requirements: Mapping[str, str], strict: bool, each: int = 1
) -> None:
    """Fill in what is wrong with each machine and what is worth a word; `here` is the launching one. A worker has
    `each` so many devices."""
    known = [report for report in reports if not report.why]
    for report in known:
        _packages(report, requirements)
        _devices(report, each)
        if abs(report.clock) > _CLOCKS:
            report.notes.append(
                f"its clock is {duration(abs(report.clock))} {'ahead' if report.clock > 0 else 'behind'}"
            )
        if report.running and not report.busy:
            report.notes.append(f"{len(report.running)} stray processes of this run are left; `stop --now` ends them")
        if report.facts.get("lingers") is False:
            report.notes.append(
                "systemd ends what its users started when they log out: run `loginctl enable-linger` there"
            )
    _twins(known)
    _disks([here, *known])
    fit = [report for report in known if not report.why]
    for name, of in differing(fit).items():
        words = f"{name} differs: " + ", ".join(f"{version} on {some(where, 4)}" for version, where in of.items())
        for report in fit if name in ("torch", "python") else ():
            if strict:
                report.why = report.why or words
            else:
                report.notes.append(f"{words}; results may differ in their last bits")


def differing(reports: Sequence[Report]) -> dict[str, dict[str, list[str]]]:
    """Of each package that is not the same everywhere: who has which version. Python itself counts by its release."""
    found: dict[str, dict[str, list[str]]] = {}
    for report in reports:
        python = str(report.facts.get("python", "")).rpartition(".")[0]
        for name, version in {"python": python, **report.facts.get("versions", {})}.items():
            found.setdefault(name, {}).setdefault(version, []).append(report.machine.name)
    return {name: of for name, of in found.items() if len(of) > 1}


def _packages(report: Report, requirements: Mapping[str, str]) -> None:
    if lacking := [name for name in requirements if not report.facts["versions"].get(name)]:
        words = " ".join(f"{name}=={requirements[name]}" for name in lacking)
        report.why = f"its Python lacks {', '.join(lacking)}: {report.facts['executable']} -m pip install {words}"


def _devices(report: Report, each: int) -> None:
    machine, there = report.machine, report.facts["devices"]
    if lacking := [device for device in machine.devices if device >= len(there)]:
        report.why = report.why or f"device {lacking[0]} is not there: it has {len(there)} accelerators"
    seen = machine.env.get("CUDA_VISIBLE_DEVICES")
    count = len(there) if seen is None else min(len(there), len([one for one in seen.split(",") if one.strip()]))
    if not machine.devices and (words := gpus.sharing(machine.workers, count, each)):
        report.notes.append(words)


def accelerators(machine: Machine, facts: Mapping[str, Any]) -> Accelerators:
    """All GPUs of a machine, unless its workers see none: which has which number, CUDA says, and not the driver."""
    hidden = machine.env.get("CUDA_VISIBLE_DEVICES", "").startswith("-1")
    return Accelerators(machine.name, () if hidden else tuple(facts["compute"]), facts["compiles"])


def _twins(reports: Sequence[Report]) -> None:
    """Two entries of machines.json that are one box."""
    for report in reports:
        box, others = report.facts.get("box"), [each for each in reports if each is not report]
        if twins := [each.machine.name for each in others if box and each.facts.get("box") == box]:
            many = "for more workers on one machine use its workers or devices"
            report.notes.append(f"is the same machine as {some(twins, 4)}, and would do the work of both: {many}")


def _disks(reports: Sequence[Report]) -> None:
    """Machines that do not see each other's tokens do not share a disk; those who are fewer are named."""
    asked = [report for report in reports if report.missing is not None]
    names, groups = {report.machine.name for report in asked}, dict[frozenset[str], list[Report]]()
    for report in asked:
        groups.setdefault(frozenset(names - {*(report.missing or [])}), []).append(report)
    if len(groups) < 2:
        return
    largest = max(groups.values(), key=len)
    several = " / ".join(some([each.machine.name for each in group], 4) for group in groups.values())
    for report in asked:
        if report not in largest or len(largest) == 1:
            asks = "its BASE_DIR is another disk than others': is the shared one mounted there?"
            report.why = report.why or f"{asks} Those who share one: {several}"


# -- for people --------------------------------------------------------------------------------------------------------


def show(shown: Console, reports: Sequence[Report]) -> None:
    """A line for each machine; below them in full what is wrong, since there are commands in it to be copied."""
    odd = differing([report for report in reports if not report.why])
    table = table_of("Machines", "machine", "", "what it has", "disk")
    for report in reports:
        busy = f"ready, {report.workers} at work" if report.workers else "ready"
        ready = Text("no", "red") if report.why else Text(busy, "green")
        table.add_row(report.machine.name, ready, *(_cells(report, odd) if report.facts else []))
    shown.print(table)
    in_full(shown, (line for report in reports for line in _words(report, odd)))


def _cells(report: Report, odd: Mapping[str, Any]) -> list[Text | str]:
    """Few of them, so that they have room in a narrow terminal; what differs is red."""
    facts, seen = report.facts, f"seen after {report.after:.1f} s"
    versions = [("python", "Python", facts["python"]), *((each, each, facts["versions"].get(each)) for each in _SHOWN)]
    has = [_cell(f"{shown} {version}" if version else f"no {shown}", name in odd) for name, shown, version in versions]
    has += [Text(f"{facts['cores']} cores"), Text(f"{facts['memory'] / 2**30:.0f} GB")]
    has += [_cell(f"{n} x {kind}") for kind, n in Counter(facts["devices"]).items()] or [Text("no accelerator")]
    disk = [] if report.missing is None else [seen if not report.missing else "another"]
    free = [] if report.free is None else [f"{readable_bytes(report.free)} free"]
    return [Text(", ").join(has), ", ".join(free + disk + _bucket(report.bucket))]


def _bucket(its: Mapping[str, Any]) -> list[str]:
    if not its:
        return []
    speed = f"{readable_bytes(its['up'])}/s up, {readable_bytes(its['down'])}/s down"
    return [f"a request takes {1000 * its['seconds']:.0f} ms", speed, plain(f"credentials: {its['source']}", 200)]


def _words(report: Report, odd: Mapping[str, Any]) -> list[Text]:
    name, versions = plain(report.machine.name), report.facts.get("versions", {})
    others = [f"{each} {versions[each]}" for each in odd if each not in (*_SHOWN, "python") and not report.why]
    notes = report.notes + ([f"not the same everywhere: {', '.join(others)}"] if others else [])
    wrong = [Text(f"{name}: NO: {report.why}", "red")] if report.why else []
    return wrong + [Text(f"{name}: {plain(note, 600)}") for note in notes]


def _cell(text: str, odd: bool = False) -> Text:
    return Text(plain(text), "red" if odd else "")
