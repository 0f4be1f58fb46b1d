"""When a parent's files are wrong or not there: wait, see that one is behind, or void that version of the parent."""

from fleet import faults
from fleet.context import WorkerContext
from fleet.round_state import register

_VERSIONS = 8  # of one member


class Repair:
    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self._puzzles: dict[str, int] = context.history.recent()

    def already_done(self, id: str) -> bool:
        """The recipe has an outcome by now: its parents' files may be gone, and no error means anything."""
        self.context.history.look(probe=8)
        if finished := self.context.history.finished(id):
            self.context.events.note("behind", id)
        return finished

    def explains(self, id: str, fault: faults.Fault) -> bool:
        """Find out what a fault in the files means, and mend it; false if nothing is wrong with the parents."""
        self.context.events.note("suspects", id, why=str(fault))
        good = set[str]()  # parents that were read once: all of them may be many gigabytes
        looks = 0  # a second apart; counted, since a clock goes on while this process is paused and sees nothing
        while not self.context.host.stopping:
            try:
                if self.already_done(id):
                    return True
                bad, fault = self._bad_parent(id, good)
            except faults.Passing:  # nothing answers: that says nothing about the files
                self.context.host.sleep(1.0)
                continue
            if bad is None:  # good by now: try again, but not for ever
                self._puzzles[id] = self._puzzles.get(id, 0) + 1
                return self._puzzles[id] % 4 != 0
            looks += 1
            if isinstance(fault, faults.Damaged) or looks > self.context.options.visible_seconds:
                self._suspect(id, bad, str(fault))
                return True
            self.context.host.sleep(1.0)
        return True

    def _bad_parent(self, id: str, good: set[str]) -> tuple[str | None, faults.Fault]:
        """Where the first parent was made that fresh reads do not find whole."""
        for parent in self.context.history.recipe(id).inputs:
            if parent not in good and (fault := self._fault_in(parent)):
                return self.context.history[parent].origin, fault
            good.add(parent)
        return None, faults.Fault()

    def _fault_in(self, parent: str) -> faults.Fault | None:
        if not self.context.history[parent]:
            return None
        for again in (0.2, 1.0, 0.0):
            try:
                self.context.history.files(parent).check(fresh=True)
                return None
            except faults.Passing as fault:
                self.context.store.read("run.json")  # the disk answers otherwise
                return fault
            except faults.Missing as fault:
                return fault
            except (faults.Damaged, faults.Refused) as fault:
                found = faults.Damaged(str(fault))
                self.context.host.sleep(again)
        return found

    def _suspect(self, id: str, bad: str, why: str) -> None:
        """It may be this machine that reads wrongly: where others live, one of them finds the same, or makes it."""
        version = self.context.history.outcome(bad).version
        self.context.claims.leave(id, "damaged", error=why, parent=f"{bad}.{version}")
        self.context.blame.failed(id)
        if self.context.blame.confirmed(id, f"{bad}.{version}"):
            self._void(bad, version, why)

    def _void(self, id: str, version: int, why: str) -> None:
        """Names the version that was read: nobody may void what they have not seen. Then it is to be made again, but
        not for ever."""
        if version + 1 >= _VERSIONS:
            times = f"{version + 1} times"
            raise self.context.stopped(f"{id} was made {times} and never read back whole: {why}; look after the disk")
        self.context.store.settle(register(id, version, "void"), {"by": self.context.store.name, "why": why})
        self.context.events.note("voided", id, version=version, why=why)
        self.context.history.reopen(id)
