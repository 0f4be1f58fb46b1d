"""Watching a run until it is over, and its workers until none is left."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.live import Live
from rich.text import Text

from fleet.machines import Machine
from fleet.plain import plain, say
from fleet.remote import launch_tables
from fleet.remote.all_machines import Links
from fleet.remote.launcher import Launcher
from fleet.remote.run_proxy import RemoteRunProxy, RunProxy

_PAUSE = 2.0  # seconds between two looks


def killed(links: Links, machines: Sequence[Machine], run_id: str) -> dict[str, Any]:
    """What is left on each machine after all was killed."""
    return links.ask("kill", "killing", lambda m: {"run_id": run_id, "seconds": 10.0}, machines, wait=11)


def waited(links: Links, machines: Sequence[Machine], run_id: str) -> dict[str, Any]:
    """Wait until no process of the run is left on any of them that answers; and on which it is so."""
    left, ended = list(machines), dict[str, Any]()
    while left:
        found = links.ask("running", "waiting for its workers to end", lambda m: {"run_id": run_id}, left)
        for name, got in found.items():
            if all(each["what"] == "child" for each in got["processes"]):
                ended[name] = {"left": []}
                say(f"{plain(name)}: no worker is left")
        left = [machine for machine in left if machine.name in found and machine.name not in ended]
        time.sleep(0.5 if left else 0)
    return ended


def watched(launcher: Launcher, finish: bool = True) -> int:
    """The live status, or plain lines where there is no terminal, until the run is over or the user has seen enough;
    and what it came to, with what its method leaves behind, if that is wanted."""
    proxy, _ = launcher.open(None)
    command = list(launcher.scripts[launcher.place.algorithm])
    try:
        if not launcher.console.is_terminal:
            proxy.ask("follow", command=command, finish=finish)
        if why := _look(launcher, proxy):
            say(f"The run stopped: {why}")
            return 1
        if launcher.console.is_terminal:
            proxy.ask("follow", command=command, finish=finish)
        while _hear(proxy) is None:
            time.sleep(_PAUSE)
    except KeyboardInterrupt:
        say("\nThe workers go on. To look again, or to end them:")
        say(*(f"  {launcher.command(verb)}" for verb in ("status", "stop")), sep="\n")
    return 0


def _hear(proxy: RunProxy | RemoteRunProxy) -> int | None:
    """Say what the follower has said; its exit code, when it has ended."""
    told = proxy.ask("followed")
    if told["text"]:
        say(told["text"], end="")
    code: int | None = told["code"]
    return code


def _say_silent(lines: Sequence[str], before: set[str]) -> set[str]:
    """Once of each who begins to be silent; who is now."""
    who = {line.partition(" for ")[0]: line for line in lines}
    for line in (line for name, line in who.items() if name not in before):
        say(plain(line))
    return {*who}


def _nobody_left(supervisors: Sequence[Mapping[str, Any]], launch: int) -> bool:
    """As far as supervisors have written: what they wrote only ends the watching."""
    mine = [seat for supervisor in supervisors if supervisor["launch"] == launch for seat in supervisor["seats"]]
    return bool(mine) and all(seat.get("code") is not None for seat in mine)


def _look(launcher: Launcher, proxy: RunProxy | RemoteRunProxy) -> str:
    """Why it stopped; nothing when it is over."""
    console, silent = launcher.console, set[str]()
    with Live(console=console, auto_refresh=False) as live:
        while True:
            lines = console.height - 1 if console.is_terminal else 0
            picture = proxy.ask("picture", width=console.width, color=console.is_terminal, lines=lines)
            if picture["text"] and console.is_terminal:
                live.update(Text.from_ansi(picture["text"]), refresh=True)
            elif not console.is_terminal:
                _hear(proxy)
                silent = _say_silent(picture["silent"], silent)
            if picture["over"] or picture["why"]:
                return "" if picture["over"] else plain(picture["why"], 1000)
            if picture["launch"] and _nobody_left(supervisors := proxy.ask("supervisors"), picture["launch"]):
                console.print(launch_tables.supervisors(supervisors))
                return f"all its workers have ended; their logs may say why:\n  {launcher.command('logs')}"
            time.sleep(_PAUSE)
