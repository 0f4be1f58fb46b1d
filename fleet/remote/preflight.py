"""What the machines said about themselves: what would go wrong, what differs, and all of it in one table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fleet.console import in_full
from fleet.machines import Machine
from fleet.plain import bytes_of, plain
from fleet.progress import duration

_CLOCKS = 5.0  # seconds that two clocks may differ before it is worth a word
_SHOWN = ("torch", "transformers")  # packages with a column of their own


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
    clock: float = 0.0  # ahead of the launcher's
    running: list[Mapping[str, Any]] = field(default_factory=list)  # processes of this run

    @property
    def busy(self) -> bool:
        """Its supervisor or its workers run; a stray child of theirs keeps nobody from starting."""
        return any(each["what"] != "child" for each in self.running)

    @property
    def workers(self) -> int:
        return sum(each["what"] == "worker" for each in self.running)


def judge(reports: Sequence[Report], here: Report, requirements: Mapping[str, str], strict: bool) -> None:
    """Fill in what is wrong with each machine and what is worth a word; `here` is the launching one."""
    known = [report for report in reports if not report.why]
    for report in known:
        _packages(report, requirements)
        _devices(report)
        if abs(report.clock) > _CLOCKS:
            where = "ahead" if report.clock > 0 else "behind"
            report.notes.append(f"its clock is {duration(abs(report.clock))} {where}")
        if report.running and not report.busy:
            report.notes.append(f"{len(report.running)} stray processes of this run are left; `stop --now` ends them")
        if report.facts.get("lingers") is False:
            report.notes.append(
                "systemd ends what its users started when they log out: run `loginctl enable-linger` there"
            )
    _twins(known)
    _disks([here, *known])
    for name, of in differing([report for report in known if not report.why]).items():
        if name not in ("torch", "python"):
            continue
        words = f"{name} differs: " + ", ".join(f"{version} on {_names(where)}" for version, where in of.items())
        for report in known:
            if strict and not report.why:
                report.why = words
            elif not report.why:
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
    versions = report.facts["versions"]
    if lacking := [name for name in requirements if not versions.get(name)]:
        words = " ".join(f"{name}=={requirements[name]}" for name in lacking)
        report.why = f"its Python lacks {', '.join(lacking)}: {report.facts['executable']} -m pip install {words}"


def _devices(report: Report) -> None:
    there = report.facts["devices"]
    if lacking := [device for device in report.machine.devices if device >= len(there)]:
        report.why = report.why or f"device {lacking[0]} is not there: it has {len(there)} accelerators"


def _twins(reports: Sequence[Report]) -> None:
    """Two entries of machines.json that are one box."""
    for report in reports:
        box, others = report.facts.get("box"), [each for each in reports if each is not report]
        if twins := [each.machine.name for each in others if box and each.facts.get("box") == box]:
            many = "for more workers on one machine use its workers or devices"
            report.notes.append(f"is the same machine as {_names(twins)}, and would do the work of both: {many}")


def _disks(reports: Sequence[Report]) -> None:
    """Machines that do not see each other's tokens do not share a disk; those who are fewer are named."""
    if not (asked := [report for report in reports if report.missing is not None]):
        return
    names = {report.machine.name for report in asked}
    groups: dict[frozenset[str], list[Report]] = {}
    for report in asked:
        groups.setdefault(frozenset(names - {*(report.missing or [])}), []).append(report)
    if len(groups) < 2:
        return
    largest = max(groups.values(), key=len)
    several = " / ".join(_names([each.machine.name for each in group]) for group in groups.values())
    for group in groups.values():
        if group is largest and len(group) > 1:
            continue
        for report in group:
            report.why = report.why or f"its BASE_DIR is another disk than others'; those who share one: {several}"


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


# -- for people --------------------------------------------------------------------------------------------------------


def show(shown: Console, reports: Sequence[Report]) -> None:
    """A line for each machine; below them in full what is wrong, since there are commands in it to be copied."""
    odd = differing([report for report in reports if not report.why])
    table = Table(title="Machines", title_justify="left")
    for column in ("machine", "", "Python", *_SHOWN, "cores", "memory", "accelerators", "free", "disk", "workers"):
        table.add_column(column, overflow="fold")
    for report in reports:
        ready = Text("no", "red") if report.why else Text("ready", "green")
        table.add_row(report.machine.name, ready, *(_cells(report, odd) if report.facts else []))
    shown.print(table)
    in_full(shown, (line for report in reports for line in _words(report, odd)))


def _cells(report: Report, odd: Mapping[str, Any]) -> list[Text | str]:
    facts, seen = report.facts, f"seen after {report.after:.1f} s"
    disk = "" if report.missing is None else seen if not report.missing else "another"
    return [
        _cell(facts["python"], "python" in odd),
        *(_cell(facts["versions"].get(name) or "none", name in odd) for name in _SHOWN),
        str(facts["cores"]), f"{facts['memory'] / 2**30:.0f} GB", Text(plain(_devices_text(facts["devices"]))),
        "" if report.free is None else bytes_of(report.free), disk, str(report.workers or ""),
    ]  # fmt: skip


def _words(report: Report, odd: Mapping[str, Any]) -> list[Text]:
    name, versions = plain(report.machine.name), report.facts.get("versions", {})
    others = [f"{each} {versions[each]}" for each in odd if each not in (*_SHOWN, "python") and not report.why]
    notes = report.notes + ([f"not the same everywhere: {', '.join(others)}"] if others else [])
    wrong = [Text(f"{name}: NO: {report.why}", "red")] if report.why else []
    return wrong + [Text(f"{name}: {plain(note, 600)}") for note in notes]


def _cell(text: str, odd: bool) -> Text:
    return Text(plain(text), "red" if odd else "")


def _devices_text(devices: Sequence[str]) -> str:
    kinds = dict.fromkeys(devices)
    return "; ".join(f"{devices.count(kind)} x {kind}" for kind in kinds) or "none"
