"""When a parent's files are wrong or not there: wait, see that one is behind, or void that version of the parent."""

from fleet import faults, launches
from fleet.desk import Desk, Stopped
from fleet.recipe import folder, place

_VERSIONS = 8  # of one member


class Repair:
    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self._puzzles: dict[str, int] = desk.history.recent()

    def behind(self, id: str) -> bool:
        """The recipe has an outcome by now: its parents' files may be gone, and no error means anything."""
        self.desk.history.look(probe=8)
        if finished := self.desk.history.finished(id):
            self.desk.events.note("behind", id)
        return finished

    def explains(self, id: str, fault: faults.Fault) -> bool:
        """Find out what a fault in the files means, and mend it; false if nothing is wrong with the parents."""
        self.desk.events.note("suspects", id, why=str(fault))
        good = set[str]()  # parents that were read once: all of them may be many gigabytes
        looks = 0  # a second apart; counted, since a clock goes on while this process is paused and sees nothing
        while not self.desk.host.stopping:
            try:
                if self.behind(id):
                    return True
                bad, fault = self._bad_parent(id, good)
            except faults.Passing:  # nothing answers: that says nothing about the files
                self.desk.host.sleep(1.0)
                continue
            if bad is None:  # good by now: try again, but not for ever
                self._puzzles[id] = self._puzzles.get(id, 0) + 1
                return self._puzzles[id] % 4 != 0
            looks += 1
            if isinstance(fault, faults.Damaged) or looks > self.desk.options.visible_seconds:
                self._suspect(id, bad, str(fault))
                return True
            self.desk.host.sleep(1.0)
        return True

    def _bad_parent(self, id: str, good: set[str]) -> tuple[str | None, faults.Fault]:
        """Where the first parent was made that fresh reads do not find whole."""
        for parent in self.desk.history.recipe(id).parents:
            if parent not in good and (fault := self._fault_in(parent)):
                return self.desk.history[parent].origin, fault
            good.add(parent)
        return None, faults.Fault()

    def _fault_in(self, parent: str) -> faults.Fault | None:
        if not self.desk.history[parent]:
            return None
        for again in (0.2, 1.0, 0.0):
            try:
                self.desk.history.files(parent).check(fresh=True)
                return None
            except faults.Passing as fault:
                self.desk.store.read("run.json")  # the disk answers otherwise
                return fault
            except faults.Missing as fault:
                return fault
            except (faults.Damaged, faults.Refused) as fault:
                found = faults.Damaged(str(fault))
                self.desk.host.sleep(again)
        return found

    def _suspect(self, id: str, bad: str, why: str) -> None:
        """It may be this machine that reads wrongly: where others live, one of them finds the same, or makes it."""
        version = self.desk.history.outcome(bad).version
        self.desk.claims.leave(id, "damaged", error=why, parent=f"{bad}.{version}")
        self.desk.blame.failed(id)
        if self.desk.blame.confirmed(id, f"{bad}.{version}"):
            self._void(bad, version, why)

    def _void(self, id: str, version: int, why: str) -> None:
        """Names the version that was read: nobody may void what they have not seen. Then it is to be made again, but
        not for ever."""
        round, slot = place(id)
        if version + 1 >= _VERSIONS:
            why = f"{id} was made {version + 1} times and never read back whole: {why}; look after the disk"
            launches.stop(self.desk.store, self.desk.options.launch, why)
            raise Stopped(why)
        self.desk.store.settle(f"{folder(round)}/{slot}.{version}.void", {"by": self.desk.store.name, "why": why})
        self.desk.events.note("voided", id, version=version, why=why)
        self.desk.history.reopen(id)
