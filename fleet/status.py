"""What a run is doing, for people: `python -m fleet.status RUN_DIR [--watch]`. It only reads."""

import contextlib
import json
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from fleet import faults, launches
from fleet.claims import Claims, Watch
from fleet.config import Wrong
from fleet.history import History
from fleet.host import Host
from fleet.recipe import NotYet, name
from fleet.run import open_run

_TAIL = 1 << 16


class Progress:
    """A plain line for every round that gets finished."""

    def __init__(self, history: History) -> None:
        self.history, self._told = history, history.first
        self._looked = 0.0

    def show(self) -> None:
        with contextlib.suppress(faults.Fault, NotYet):
            if self.history.store.host.now() - self._looked > 1.0:
                self.history.look(probe=4)
                self._looked = self.history.store.host.now()
            while self._told < self.history.first:
                members = self.history.round(self._told)
                losses = [m.metrics["loss"] for m in members if isinstance(m.metrics.get("loss"), float)]
                best = f"  loss: best {min(losses):.4f}, mean {sum(losses) / len(losses):.4f}" if losses else ""
                absent = sum(not m for m in members)
                print(f"round {self._told}: {len(members) - absent} of {len(members)} members{best}", flush=True)
                self._told += 1


def metrics_text(metrics: Mapping[str, Any]) -> str:
    return " ".join(f"{k}={v:.6g}" if isinstance(v, float) else f"{k}={v}" for k, v in metrics.items())


def view(history: History, claims: Claims) -> Group:
    """The open rounds and the workers as tables."""
    history.look(probe=8)
    makers: dict[str, str] = {}
    rounds = Table(title=f"Rounds (finished: {history.first})", title_justify="left")
    for column in ("round", "finished", "being made", "free", "waiting for"):
        rounds.add_column(column, overflow="fold")
    for round in history.open_rounds():
        rounds.add_row(*_round_row(history, claims, round, makers))
    return Group(rounds, _workers(history, makers))


def _round_row(history: History, claims: Claims, round: int, makers: dict[str, str]) -> list[str]:
    recipes = [x for x in history.plans[round]]
    done = [x for x in recipes if history.finished(name(round, x.slot))]
    made, free, waits = [], [], Counter[str]()
    for recipe in recipes:
        id = name(round, recipe.slot)
        if recipe in done or recipe.carried:
            continue
        if unfinished := [p for p in recipe.parents if not history.finished(p)]:
            waits.update(unfinished)
        elif claims.held(id):
            holder = claims.holder(id)
            makers[str(holder.get("by"))] = id
            made.append(f"{recipe.slot} by {holder.get('by', '?')}")
        else:
            free.append(recipe.slot)
    waiting = [f"{id} ({n})" for id, n in waits.most_common(3)]
    return [str(round), f"{len(done)} of {len(recipes)}", _some(made), _some(free), _some(waiting)]


def _some(words: list[str], most: int = 6) -> str:
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def _workers(history: History, makers: Mapping[str, str]) -> Table:
    table = Table(title="Workers", title_justify="left")
    for column in ("worker", "made", "a minute", "MB written", "last seen doing", "seconds ago", "last error"):
        table.add_column(column, overflow="fold")
    for file in history.store.names("workers"):
        if file.endswith(".events"):
            events = recent_events(history.store.disk.root / "workers" / file)
            if events:
                worker = file.removesuffix(".events")
                table.add_row(worker, *_worker_row(events, makers.get(worker, "")))
    return table


def _worker_row(events: list[dict[str, Any]], making: str) -> list[str]:
    last, made = events[-1], [e for e in events if e.get("what") == "made"]
    span = max(1.0, float(last["at"]) - float(events[0]["at"]))
    errors = [str(e.get("why", "")) for e in events if e.get("what") in ("failed", "waits", "stopped", "suspects")]
    doing = f"{last.get('what')} {last.get('id', '')}".strip()
    return [
        str(len(made)),
        f"{60 * len(made) / span:.1f}",
        f"{sum(e.get('written', 0) for e in made) / 1e6:.1f}",
        f"making {making}" if making and last.get("what") != "ended" else doing,
        f"{max(0.0, time.time() - float(last['at'])):.0f}",
        errors[-1][:80] if errors else "",
    ]


def recent_events(path: Path, most: int = _TAIL) -> list[dict[str, Any]]:
    """The last events of a worker; lines that are not whole are passed over."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - most))
        found = []
        for line in file.read().splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                event = json.loads(line)
                float(event["at"])
                found.append(event)
        return found
    return []


def look(
    run_dir: Path,
    *,
    watch: Annotated[bool, Parameter(help="Keep looking until Ctrl-C.")] = False,
) -> None:
    """Show the rounds, who makes what, what waits for whom, and the last errors of a run.

    For example: python -m fleet.status runs/edt --watch
    """
    host, console = Host(), Console()
    store, _ = open_run(run_dir, host, "status")
    history = History(store)
    claims = Claims(store, history, Watch(store, host, 60.0), 0)
    with Live(console=console, auto_refresh=False, screen=False) as live:
        while True:
            with contextlib.suppress(NotYet, faults.Passing):
                live.update(view(history, claims), refresh=True)
            if why := launches.ordered(store, launches.latest(store)):
                console.print(f"Stopped: {why}")
            if history.over:
                console.print("The run is over.")
            if history.over or not watch:
                return
            time.sleep(2.0)


if __name__ == "__main__":
    try:
        App(help=look.__doc__, version_flags=[], default_command=look)()
    except (Wrong, faults.Fault) as error:
        raise SystemExit(str(error)) from None
    except KeyboardInterrupt:
        pass
