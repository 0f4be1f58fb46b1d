"""When a parent's files are wrong or not there: wait, see that one is behind, or void that version of the parent."""

from fleet import faults
from fleet.desk import Desk
from fleet.recipe import folder, place


class Repair:
    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self._puzzles: dict[str, int] = {}

    def behind(self, id: str) -> bool:
        """The recipe has an outcome by now: its parents' files may be gone, and no error means anything."""
        self.desk.history.look(probe=8)
        if finished := self.desk.history.finished(id):
            self.desk.events.note("behind", id)
        return finished

    def explains(self, id: str, fault: faults.Fault) -> bool:
        """Find out what a fault in the files means, and mend it; false if nothing is wrong with the parents."""
        since = self.desk.host.now()
        self.desk.events.note("suspects", id, why=str(fault))
        while not self.desk.host.stopping:
            try:
                if self.behind(id):
                    return True
                bad, fault = self._bad_parent(id)
            except faults.Passing:  # says nothing about the files
                self.desk.host.sleep(1.0)
                continue
            if bad is None:  # good by now: try again, but not for ever
                self._puzzles[id] = self._puzzles.get(id, 0) + 1
                return self._puzzles[id] % 4 != 0
            waited = self.desk.host.now() - since
            if isinstance(fault, faults.Damaged) or waited > self.desk.options.visible_seconds:
                self._void(bad, str(fault))
                return True
            self.desk.host.sleep(1.0)
        return True

    def _bad_parent(self, id: str) -> tuple[str | None, faults.Fault]:
        """Where the first parent was made that fresh reads do not find whole."""
        for parent in self.desk.history.recipe(id).parents:
            member = self.desk.history[parent]
            for again in (0.2, 1.0, 0.0) if member else ():
                try:
                    self.desk.history.files(parent).check(fresh=True)
                    break
                except faults.Missing as fault:
                    return member.origin, fault
                except (faults.Damaged, faults.Refused) as fault:
                    found = faults.Damaged(str(fault))
                    self.desk.host.sleep(again)
            else:
                if member:
                    return member.origin, found
        return None, faults.Fault()

    def _void(self, id: str, why: str) -> None:
        """Names the version that was read: nobody may void what they have not seen. Then it is to be made again."""
        (round, slot), version = place(id), self.desk.history.outcome(id).version
        self.desk.store.settle(f"{folder(round)}/{slot}.{version}.void", {"by": self.desk.store.name, "why": why})
        self.desk.events.note("voided", id, version=version, why=why)
        self.desk.history.reopen(id)
