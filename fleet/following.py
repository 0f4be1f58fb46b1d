"""A run that others work on, followed: the lines that a start on this machine says, and at the end what it came to."""

import contextlib
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleet import faults, status
from fleet.history import History
from fleet.host import Host
from fleet.method import Method
from fleet.places import address
from fleet.plain import say, several, unsaid
from fleet.processes import hold_leash, run_in
from fleet.progress import Progress
from fleet.recipe import NotYet

_LOOK = 0.1  # seconds
_SHOWN = 16  # members of the last round that are worth a line


def follow(methods: Mapping[str, Method[Any]], folder: Path, finish: bool, begun: bool) -> int:
    """A process of its own, on a leash: say how the run gets on until it is over; and then leave behind, if wanted,
    what its method leaves behind. Of a run that had begun before, finished rounds are not told again."""
    host = Host()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it decides
    threading.Thread(target=hold_leash, args=(host,), daemon=True).start()
    store, method, config, _ = run_in(folder, host, f"follower-{host.token()}", methods)
    history = History(store)
    if not begun:
        with contextlib.suppress(faults.Passing, NotYet):
            history.look_far()
        if not history.over:
            say(f"The run goes on in round {history.first_open}.")
    progress = method.view(history, config.rounds, config.steps_in)
    while not (host.stopping or history.over):
        progress.show()
        host.sleep(_LOOK)
    if not history.over:
        return 0
    progress.show(last=True)
    say_result(history, folder, method.view)
    if finish:
        method.show_result(config, folder)
    return 0


def say_result(history: History, folder: Path, view: type[Progress], more: str = "") -> None:
    """Of a run that is over."""
    last = history.first_open - 1
    members = history.round(last) if last >= 0 and view.names_members else []
    say(f"The run is over after {several(history.made, 'round')}.{' Its last round:' if members else ''}")
    left = unsaid(len(members), _SHOWN)
    for member in members[left:]:
        try:
            where = f"files/{history.outcome(member.origin).attempt}" if member.digests else member.absent
        except (NotYet, faults.Fault, KeyError):
            where = ""
        said = f"{status.metrics_text(member.metrics)}{status.asked(member)}"
        say(f"  {member.id}  {said}  {where}".rstrip())
    if left:
        say(f"  and {left} more before these")
    say(f"Everything is in {address(folder)}{more}")
