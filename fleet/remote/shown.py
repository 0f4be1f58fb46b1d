"""What the launcher shows: what it would do, what runs where, how workers ended."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from fleet.machines import Machine
from fleet.remote.all_machines import Bad
from fleet.remote.launcher import Launcher
from fleet.remote.link import command
from fleet.start import thread_counts
from fleet.status import plain

_ENDINGS = {0: "the run is over", 3: "it was told to stop", 130: "it was asked to end"}


def plan(launcher: Launcher) -> None:
    """For every machine exactly what would be done. Nobody is asked, nothing is written."""
    place, code = launcher.place, launcher.code
    made = launcher.foreseen()
    print(f"The run {place.folder}, method {place.algorithm}: would be made unless it is there.")
    print(f"The code, {len(code.data)} bytes, would be put there as {code.name}.")
    for machine in launcher.machines:
        order = launcher.order(machine, made, launch=1)
        env = {**thread_counts(made["threads"]), **machine.env}
        print(f"\n{machine.name}: by SSH to {launcher.route(machine)}")
        print(f"  its shell is given: {command(machine, '@MARK ')}")
        print("  that is sent far.py, and asked:")
        base, tar = place.of(machine), f"{order['run']}/{code.name}"
        asks: list[tuple[str, Mapping[str, Any]]] = [
            ("facts", {"packages": list(code.requirements)}),
            ("show", {"base": base, "token": "TOKEN"}),
            ("seen", {"base": base, "tokens": ["TOKEN", "..."]}),
            ("unshow", {"base": base, "token": "TOKEN"}),
            ("running", {"run_id": order["run_id"]}),
            ("fetch", {"tar": tar, "digest": code.digest}),
            ("start", {"code": f"~/.cache/fleet/code/{code.digest}", "order": order, "env": env}),
        ]
        for verb, words in asks:
            print(f"    {verb} {json.dumps(words)}")


def started(machines: Sequence[Machine], answers: Mapping[str, Any], why: Mapping[str, str]) -> Table:
    """What runs where, and what does not and why."""
    table = _table("Workers", "machine", "host", "workers", "processes", "what")
    for machine in machines:
        answer = answers.get(machine.name)
        if isinstance(answer, Bad) or answer is None:
            said = str(answer) if answer else why.get(machine.name, "not asked")
            table.add_row(machine.name, "", "0", "", Text(plain(said, 1000), "red"))
        elif "already" in answer:
            found = [str(each["pid"]) for each in answer["already"] if each["what"] == "worker"]
            table.add_row(machine.name, "", str(len(found)), ", ".join(found), "running already")
        else:
            pids = ", ".join(str(seat["pid"]) for seat in answer["seats"])
            table.add_row(
                machine.name, plain(answer["host"]), str(len(answer["seats"])), pids, Text("started", "green")
            )
    return table


def crews(found: Sequence[Mapping[str, Any]]) -> Table:
    """What the crews wrote down last. The disk may hold anything: nothing is taken on trust."""
    table = _table("Crews", "machine", "host", "launch", "worker", "process", "how it ended last", "now")
    for crew in found:
        for seat in [each for each in crew.get("seats", []) if isinstance(each, dict)][:64]:
            code = seat.get("code")
            said = _ENDINGS.get(code) or seat.get("said") or ""  # type: ignore[arg-type]
            now = "ended" if code is not None else "at work, when its crew last wrote"
            words = (crew.get("machine"), crew.get("host"), crew.get("launch"), seat.get("name"), seat.get("pid"))
            table.add_row(*(Text(plain(word, 80)) for word in (*words, said, now)))
    return table


def ended(launcher: Launcher, left: Mapping[str, Any], bad: Mapping[str, str]) -> int:
    """Which machines are empty now; 1 if not all are, as far as is known."""
    table, code = _table("Workers", "machine", "left"), 0
    for machine in launcher.machines:
        got = left.get(machine.name, Bad(bad.get(machine.name, "not asked")))
        if isinstance(got, Bad):
            table.add_row(machine.name, Text(f"unknown: {plain(got, 1000)}", "red"))
            code = 1
        elif got["left"]:
            table.add_row(machine.name, Text(", ".join(f"{each['what']} {each['pid']}" for each in got["left"]), "red"))
            code = 1
        else:
            table.add_row(machine.name, Text("none", "green"))
    launcher.console.print(table)
    return code


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
