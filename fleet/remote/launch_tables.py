"""What the launcher shows: what it would do, what runs where, how workers ended."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fleet.console import in_full
from fleet.machines import Machine
from fleet.plain import plain, say
from fleet.processes import thread_counts
from fleet.progress import duration
from fleet.remote.agent_link import command
from fleet.remote.launcher import Launcher, seats
from fleet.remote.route import route_to
from fleet.status import table_of

_SILENT = 40.0  # seconds after which a supervisor, which writes every ten, is not at work as far as anybody knows
_ENDINGS = {0: "the run is over", 3: "it was told to stop", 130: "it was asked to end"}


def plan(launcher: Launcher) -> None:
    """For every machine exactly what would be done. Nobody is asked, nothing is written."""
    place, code = launcher.place, launcher.code
    made = launcher.foreseen()
    say(f"The run {place.folder}, method {place.algorithm}: would be made unless it is there.")
    say(f"The code, {len(code.data)} bytes, would be put there as {code.name}.")
    for machine in launcher.machines:
        order = launcher.order(
            launcher.run_at(machine), machine.name, made, 1, seats(machine, made["devices_per_worker"])
        )
        env = {**thread_counts(made["threads"]), **machine.env}
        say(f"\n{machine.name}: by SSH to {route_to(machine, launcher.ssh_config)}")
        say(f"  its shell is given: {command(machine, '@MARK ')}")
        say("  that is sent agent.py, and asked:")
        base, tar = place.of(machine), f"{order['run']}/{code.name}"
        asks: list[tuple[str, Mapping[str, Any]]] = [
            ("facts", {"packages": list(code.requirements)}),
            ("show", {"base": base, "token": "TOKEN"}),
            ("seen", {"base": base, "tokens": ["TOKEN", "..."], "seconds": 5.0}),
            ("unshow", {"base": base, "token": "TOKEN"}),
            ("running", {"run_id": order["run_id"]}),
            ("fetch", {"tar": tar, "digest": code.digest}),
            ("start", {"code": f"~/.cache/fleet/code/{code.digest}", "order": order, "env": env}),
        ]
        for verb, words in asks:
            say(f"    {verb} {json.dumps(words)}")


def started(shown: Console, machines: Sequence[Machine], answers: Mapping[str, Any], why: Mapping[str, str]) -> None:
    """What runs where, and what does not; and why not, unless that was said already."""
    table, bad = table_of("Workers", "machine", "host", "workers", "processes", "what"), list[Text]()
    for machine in machines:
        answer = answers.get(machine.name)
        if answer is None:
            table.add_row(machine.name, "", "0", "", Text("not started", "red"))
            if said := why.get(machine.name):
                bad.append(Text(f"{plain(machine.name)}: {plain(said, 1000)}", "red"))
        elif "already" in answer:
            found = [str(each["pid"]) for each in answer["already"] if each["what"] == "worker"]
            table.add_row(machine.name, "", str(len(found)), ", ".join(found), "running already")
        else:
            pids = ", ".join(str(seat["pid"]) for seat in answer["seats"])
            table.add_row(
                machine.name, plain(answer["host"]), str(len(answer["seats"])), pids, Text("started", "green")
            )
    shown.print(table)
    in_full(shown, bad)


def supervisors(found: Sequence[Mapping[str, Any]]) -> Table:
    """What the supervisors wrote down last. The disk may hold anything: nothing is taken on trust."""
    table = table_of("Supervisors", "worker", "launch", "process", "how it ended last", "now")
    for supervisor in found:
        for seat in supervisor["seats"]:
            code = seat.get("code")
            said, ago = _ENDINGS.get(code) or seat.get("said") or "", duration(supervisor["ago"])
            now = "ended" if code is not None else f"at work {ago} ago"
            if code is None and supervisor["ago"] > _SILENT:
                now = f"not heard of for {ago}"
            words = (seat.get("name"), supervisor.get("launch"), seat.get("pid"))
            table.add_row(*(Text(plain(word, 80)) for word in (*words, said, now)))
    return table


def ended(shown: Console, machines: Sequence[Machine], left: Mapping[str, Any], bad: Mapping[str, str]) -> None:
    """Which machines are empty now, as far as is known."""
    table, unknown = table_of("Workers", "machine", "left"), list[Text]()
    for machine in machines:
        if machine.name not in left:
            table.add_row(machine.name, Text("unknown", "red"))
            unknown.append(Text(f"{plain(machine.name)}: {plain(bad.get(machine.name, 'not asked'), 1000)}", "red"))
        elif there := ", ".join(f"{each['what']} {each['pid']}" for each in left[machine.name]["left"]):
            table.add_row(machine.name, Text(there, "red"))
        else:
            table.add_row(machine.name, Text("none", "green"))
    shown.print(table)
    in_full(shown, unknown)
