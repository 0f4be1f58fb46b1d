"""Which rounds a model can be taken from: the files of old ones are removed while a run goes on."""

from fleet.history import History
from fleet.payload import InputMember
from fleet.planning import ATTEMPT
from fleet.recipe import name
from fleet.run_config import UserError

_SHOWN = 12  # rounds


def files_of(history: History, id: str) -> InputMember:
    """A member's files; where they are gone, the rounds that have theirs are named."""
    if _has_files(history, id):
        return history.files(id)
    begun = {int(match[1]) for each in history.store.names("files") if (match := ATTEMPT.fullmatch(each))}
    rounds = [round for round in sorted(begun) if 0 < round < history.first_open and _is_whole(history, round)]
    some = ", ".join(map(str, rounds[-_SHOWN:])) or "none"
    raise UserError(
        f"{id}: its files were removed, as those of old rounds are; rounds that can be exported: {some}. "
        "KEEP_EVERY keeps more, of a run that is still at work"
    )


def _is_whole(history: History, round: int) -> bool:
    members = [name(round, each.slot) for each in history.plan(round) if each.role == "member"]
    return all(_has_files(history, id) for id in members)


def _has_files(history: History, id: str) -> bool:
    member = history[id]
    return not member.digests or bool(history.store.names(f"files/{history.outcome(member.origin).attempt}"))
