"""A look at a bucket from all machines at once: each reaches it by itself, and of one name one is the winner."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from fleet.machines import Machine, file_name
from fleet.remote.all_machines import Links
from fleet.remote.code import Code
from fleet.remote.preflight import Report


def look(links: Links, machines: Sequence[Machine], base: str, code: Code, reports: Mapping[str, Report]) -> None:
    round, there = secrets.token_hex(6), code_on(links, machines, code)

    def words(verb: str, m: Machine) -> dict[str, Any]:
        more = [file_name(m.name)] if verb == "reached" else []
        return {**there[m.name], "words": [verb, base, round, *more], "env": {**m.env}}

    able = [m for m in machines if m.name in there]
    found = links.ask("reach", "trying the bucket", lambda m: words("reached", m), able, wait=60)
    for m in machines:
        reports[m.name].bucket = found.get(m.name, {})
        if m.name not in found:
            reports[m.name].why = reports[m.name].why or links.bad.get(m.name, "not asked")
    stand = sorted({each["stands"] for each in found.values()})
    for report in reports.values() if len(stand) > 1 else ():
        many = f"{', '.join(stand)} have each won the same race of conditional puts"
        report.why = report.why or f"no run can be kept in {base}: {many}"
    links.ask("reach", "tidying up", lambda m: words("left", m), able[:1], wait=15)


def code_on(links: Links, machines: Sequence[Machine], code: Code) -> dict[str, Any]:
    """Over SSH, where no disk is shared from which it could be copied."""
    asked = {"digest": code.digest, "data": ""}
    there = links.ask("receive", "looking for the code", lambda m: asked, machines)
    if lacking := [m for m in machines if m.name in there and not there[m.name]]:
        whole = {**asked, "data": code.text}
        there |= links.ask("receive", "sending the code", lambda m: whole, lacking, wait=60)
    return {name: found for name, found in there.items() if found}
