"""A worker that comes late meets a disk that fails at the worst moment: it looks again, and goes on."""

import contextlib
from collections.abc import Callable
from typing import Any

from fleet import faults
from fleet.digest import digest
from fleet.history import History
from fleet.host import Host
from fleet.recipe import NotYet
from fleet.run import open_run
from fleet.store import Store


def known(history: History) -> tuple[int, str]:
    return history.first_open, digest(history)


def test_a_passing_fault_while_it_learns_the_plans_leaves_nothing_half_known(toys, monkeypatch):
    run = toys(max_generations=6).prepare()
    run.work(recipes=16)
    sound = run.history()
    patiently = Store.patiently
    for fails_at in range(1, 40):
        calls = iter(range(1, 10**6))

        def failing(store: Store, call: Callable[[], Any], fails_at: int = fails_at, calls: Any = calls) -> Any:
            if next(calls) == fails_at:
                raise faults.Passing("not now")
            return patiently(store, call)

        late = History(open_run(run.folder, Host(), "late")[0])
        with monkeypatch.context() as patch:
            patch.setattr(Store, "patiently", failing)
            for _ in range(3):
                with contextlib.suppress(faults.Passing, NotYet):
                    late.look(probe=8)
        assert sound.first_open > 0 and known(late) == known(sound), fails_at
