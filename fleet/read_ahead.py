"""Reading ahead: while the first lane trains, the second one reads and checks what either of them will want next."""

import itertools
from collections.abc import Callable
from functools import partial

from fleet import small_files
from fleet.context import WorkerContext
from fleet.foresight import awaited, likelihood_key, previous_in_slot
from fleet.host import AT_ONCE
from fleet.payload import InputMember


class ReadAhead:
    """Of one worker, in its second lane. Memory: at most as much as the largest model that the run was given, or as one
    that this worker made, whose moments may be more than its weights."""

    def __init__(self, context: WorkerContext, first: WorkerContext, current_id: Callable[[], str]) -> None:
        """`current_id` says what the first lane is at."""
        self.context, self._first, self._current_id = context, first, current_id
        self._files, self._seen = list[tuple[InputMember, str]](), ("", -1.0)
        self._most = 0

    def go_on(self, looked: float, hurry: Callable[[], bool]) -> bool:
        """Read some more files, unless there is a `hurry`; false if there are none. `looked` tells when the run was
        looked at last. Small ones come side by side; a large one by itself is there, and can be used, the sooner."""
        here = self.context.store.at_hand
        if (seen := (self._current_id(), looked)) != self._seen:
            self._seen = seen  # what is being made counts as there
            self._files = self._foreseen(seen[0])
            here.keep({input.place(name) for input, name in self._files})
        self._files = [(input, name) for input, name in self._files if not here.holds(input.place(name))]
        sizes = itertools.accumulate(input.files[name][0] for input, name in self._files[:AT_ONCE])
        count = max(1, sum(size <= small_files.SMALL for size in sizes))
        some, self._files = self._files[:count], self._files[count:]
        self.context.host.together([partial(small_files.read, *file, hurry) for file in some])
        return bool(some)

    def _foreseen(self, current: str) -> list[tuple[InputMember, str]]:
        """What is at hand for what is being made; and of what comes then, as much as there is room for."""
        context, history, found = self.context, self.context.history, dict[str, tuple[InputMember, str]]()
        free = [
            (id, recipe) for id, recipe in history.unfinished()
            if self._has(previous_in_slot(id)) and id not in self._first.pending and not context.claims.held(id)
        ]  # fmt: skip
        free.sort(key=lambda job: likelihood_key(history, context.store.name, self._has, *job))
        room = self._room(current) if free else 0
        for id, recipe in [job for job in history.unfinished() if job[0] == current] + free:
            for input, name in awaited(history, id, recipe, context.files_read):
                file, at_hand = input.place(name), context.store.at_hand.holds(input.place(name))
                made_here = context.store.at_hand.made_here(file) is not None
                if file not in found and not made_here and (at_hand or id != current):
                    room -= input.files[name][0]
                    if room < 0 and id != current:
                        return [*found.values()]
                    found[file] = input, name
        return [*found.values()]

    def _has(self, id: str) -> bool:
        return self.context.has(id) or id == self._seen[0]

    def _room(self, current: str) -> int:
        history = self.context.history
        given = [f"0/{recipe.slot}" for recipe in history.plan(0) if recipe.role == "given"] if not self._most else []
        made = [previous_in_slot(current)] if current and self.context.has(previous_in_slot(current)) else []
        models = [history.outcome(id).files.values() for id in given + made if history.finished(id)]
        self._most = max(self._most, *(sum(size for size, _ in files) for files in models), 0)
        return self._most
