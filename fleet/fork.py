"""`python -m fleet.fork RUN --round R --set KEY=VALUE ... --name NEW`: a new run that goes on from a round of another.

The registers of the rounds up to R, which never change, are the new run's, too, with the files of round R and round 0:
linked on a disk, copied in a bucket. What the method has to say about its own state stands in `Carried`.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from pydantic import BaseModel, ConfigDict

from fleet import faults, launches, results_version, summary
from fleet.copy import bring
from fleet.history import History
from fleet.host import Host
from fleet.our_packages import ROOT, spoken
from fleet.places import address, here
from fleet.plain import say
from fleet.plan_format import record_of
from fleet.recipe import NotYet, Recipe, check, folder, name, round_and_slot
from fleet.round_state import parse
from fleet.run import about, begin_copy, end_copy, open_run, taken
from fleet.run_config import UserError, is_bound
from fleet.single_command import command
from fleet.store import Store, compare

_PATIENCE = 5.0  # seconds between two lines about how far it is
_EXAMPLES = """Go on with a finished run for twice as many rounds:

    python -m fleet.fork runs/edt --set MAX_GENERATIONS=240 --name edt-long

From an earlier round (KEEP_EVERY keeps some), with half the rate and another method:

    python -m fleet.fork runs/edt --round 60 --set LR=0.005 --set ALGORITHM=diloco --name from-60

Twice as many slots, and text of one's own beside the old one:

    python -m fleet.fork runs/edt --set MAX_GENERATIONS=240 --set POPULATION_SIZE=8 \\
        --set 'DATASETS=["stdlib", "my.txt"]' --name wider"""


class ForkOrder(BaseModel):
    """What is asked for, as it goes from this command to the method's script."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    run: Path
    round: int | None
    settings: dict[str, Any]
    name: str
    config: Path


@dataclass(frozen=True)
class Carried:
    """What a method says of a fork, before anything is made."""

    config: Any
    plans: Mapping[int, Sequence[Recipe]] = field(default_factory=dict)  # of rounds that have another one now
    anew: Collection[str] = ()  # members that are made again
    notes: Sequence[str] = ()  # what cannot go on as it was


Forking = Callable[[Any, Any, History, int, Sequence[Recipe]], Carried]  # old, new, history, round, the new round 0


# -- the command -------------------------------------------------------------------------------------------------------


def go_on(
    run: Path,
    *,
    name: Annotated[str, Parameter(help="The new run's PROJECT_NAME; its folder lies beside the old one's.")],
    round: Annotated[int | None, Parameter(help="The last one that is carried over; else the last whole one.")] = None,
    set: Annotated[
        tuple[str, ...], Parameter(negative=(), help="KEY=VALUE: a key that is another now; as often as needed.")
    ] = (),
    config: Annotated[
        Path | None, Parameter(help="Where the new configuration file goes; NAME.json in this folder by default.")
    ] = None,
) -> None:  # fmt: skip
    """Make a new run that goes on from a round of another one, with more rounds, slots or text, other rates, or another
    method. The old run stays as it is, and may go on."""
    settings = dict(map(_setting, set))
    if "base_dir" in settings:
        raise UserError("--set BASE_DIR: a fork lies beside the run that it goes on from")
    run = here(run)
    was = str(open_run(run, Host(), "fork")[1]["config"].get("algorithm"))
    if was.endswith("-loop"):
        raise UserError(
            f"a run of {was} cannot be forked: let your script begin with what `python -m train.export {address(run)}` "
            "writes, and join a new run"
        )
    algorithm = str(settings.get("algorithm", was))
    script = ROOT / f"{algorithm.replace('-', '_')}.py"
    if not algorithm.replace("-", "").isalnum() or not script.is_file():
        raise UserError(f"a run of {algorithm} cannot be forked; those of edt and diloco can")
    file = config or Path(f"{name}.json")
    order = ForkOrder(run=run, round=round, settings=settings, name=name, config=file.absolute())
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, str(script), "--fork", order.model_dump_json()])


def _setting(text: str) -> tuple[str, Any]:
    """KEY=VALUE; what is no JSON is text."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UserError(f"--set {text}: KEY=VALUE is expected, such as --set MAX_GENERATIONS=240")
    with contextlib.suppress(ValueError):
        return key.lower(), json.loads(value)
    return key.lower(), value


# -- the fork ----------------------------------------------------------------------------------------------------------


def fork(method: Any, order: ForkOrder) -> int:
    """All that can be refused is refused before anything is made."""
    if method.forked is None:
        raise UserError(f"a run of {method.algorithm} cannot be forked; those of edt and diloco can")
    store, run = open_run(order.run, Host(), "fork")
    results_version.check(order.run, run)
    history = History(store)
    with contextlib.suppress(NotYet, faults.Passing):
        history.look_far()
    round = _round(history, order)
    carried = _carried(method, order, store, run, history, round)
    base = order.run.parent
    if carried.config.group_readable:
        os.umask(0o027)
    for where, option in ((base / order.name, "--name"), (order.config, "--config")):
        if taken(where):
            raise UserError(f"{address(where)}: is there already; choose another {option}")
    _make(base / order.name, carried, history, round)
    _write_down(order.config, base, carried.config)
    for note in carried.notes:
        say(f"Note: {note}.")
    say(f"{address(base / order.name)}: goes on from round {round} of {address(order.run)}. Start it with")
    say(f"{' '.join(spoken(Path(sys.argv[0]).stem))} --config {order.config}")
    return 0


def _round(history: History, order: ForkOrder) -> int:
    """The round to go on from, if all that the next one may need is there."""
    last = history.first_open - 1
    round = last if order.round is None else order.round
    if last < 1:
        raise UserError(
            f"{address(order.run)}: no round that trains is finished yet: wait for round 1, or start a new run"
        )
    if not 1 <= round <= last:
        whole = f"rounds 1 to {last} are finished" if round else "round 0 only prepares: start a new run instead"
        raise UserError(f"--round {round}: {whole}")
    there = {*history.store.names("files")}
    if not _whole(history, round, there):
        rounds = [each for each in range(1, last + 1) if _whole(history, each, there)]
        listed = ", ".join(map(str, rounds)) or "none"
        raise UserError(
            f"--round {round}: its files were removed when nothing needed them any more; rounds whose files are there: "
            f"{listed} (KEEP_EVERY keeps more of them)"
        )
    return round


def _whole(history: History, round: int, there: Collection[str]) -> bool:
    return all(history.outcome(id).attempt in there for id in _made(history, round))


def _made(history: History, round: int) -> list[str]:
    """Where the members of a round were made, of those that have files."""
    ids = (history.origin(name(round, recipe.slot)) for recipe in history.plan(round))
    return [id for id in dict.fromkeys(ids) if history.outcome(id).files]


def _carried(
    method: Any, order: ForkOrder, store: Store, run: Mapping[str, Any], history: History, round: int
) -> Carried:
    section, launch = method.config, launches.latest(store)
    operational = launches.settings(store, launch) if launch else {}
    old = section.joined(run["config"], operational)
    known = {**old.bound(), **old.operational(), **order.settings, "project_name": order.name}
    bound = {key: value for key, value in known.items() if key not in section.model_fields or is_bound(section, key)}
    new = section.joined(bound, {key: known[key] for key in known if key not in bound})
    if new.max_generations <= round:
        raise UserError(
            f"MAX_GENERATIONS is {new.max_generations}, and round {round} is done: raise it with --set, or go on from "
            "an earlier round with --round"
        )
    # where a run is, text is not counted: what it has to suffice for is known only with the fork
    there = {"base_dir": address(order.run.parent), "project_name": order.run.name}
    ready = method.prepare(new.model_copy(update=there), Path.cwd())
    new = ready.model_copy(update={key: getattr(new, key) for key in there})
    found: Carried = method.forked(old, new, history, round, method.strategy(new).plan(0, history))
    method.prepare(found.config, Path.cwd())  # text and rounds are counted from where it goes on
    for each, plan in found.plans.items():
        check(each, plan)
    return found


def _make(target: Path, carried: Carried, history: History, round: int) -> None:
    """Nobody finds half a run: it is one with its run.json, which comes last."""
    host, _last[0] = Host(), time.monotonic()
    said = about(carried.config.bound(), host)
    store = begin_copy(target, host, "fork", str(said["id"]))
    try:
        for each in range(round + 1):
            _carry_round(history, store, each, carried)
            _said(f"{each + 1} of {round + 1} rounds are carried over")
        ids = [id for id in dict.fromkeys([*_made(history, 0), *_made(history, round)]) if id not in carried.anew]
        for n, id in enumerate(ids):
            _carry_files(history, store, id)
            _said(f"the files of {n + 1} of {len(ids)} members are carried over")
        store.sync("files")
        end_copy(store, said)
    except BaseException:
        store.dissolve()
        raise


def _carry_round(history: History, store: Store, round: int, carried: Carried) -> None:
    """What stands in its registers for good: its plan, outcomes, and which versions are void."""
    there, plan = history.store, carried.plans.get(round)
    same = {"plan", summary.NAME} if plan is None else set[str]()
    if any(round_and_slot(id)[0] == round for id in carried.anew):  # a summary would tell of what is not there any more
        same -= {summary.NAME}
    store.folder(folder(round))
    for register in there.names(folder(round)):
        said = parse(register)
        decided = said and said.kind in ("done", "void") and name(round, said.slot) not in carried.anew
        if decided or register in same:
            path = f"{folder(round)}/{register}"
            value = there.read(path)
            if not store.borrow(there, path):
                store.settle(path, value)
    if plan is not None:
        store.settle(f"{folder(round)}/plan", {"by": store.name, **record_of(plan)})
    store.sync(folder(round))


def _carry_files(history: History, store: Store, id: str) -> None:
    """Each is read once, so that what goes on is what was made."""
    outcome = history.outcome(id)
    where = f"files/{outcome.attempt}"
    store.begin(where)
    for file, wanted in outcome.files.items():
        path = f"{where}/{file}"
        try:
            if store.borrow(history.store, path):
                compare(path, store.hash_of(path, wanted[1]), wanted)
            else:
                bring(history.store, store, path, wanted)
        except (faults.Damaged, faults.Missing) as fault:
            if not history.store.stamp(path):
                gone = f"{address(history.store.root)}/{path}: was removed meanwhile: the run goes on"
                raise UserError(f"{gone}; choose another --round") from None
            needed = "every round needs it: let that run go on, which makes it again, or if it is over, start a new one"
            help = "choose another --round" if round_and_slot(id)[0] else needed
            raise UserError(f"{id} is damaged where it comes from: {fault}; {help}") from None
    store.sync(where)


def _write_down(file: Path, base: Path, config: Any) -> None:
    values = {**config.bound(), **config.operational(), "base_dir": address(base)}
    given = config.model_dump(mode="json", exclude_defaults=True)
    kept = {key.upper(): value for key, value in values.items() if key in given or key == "base_dir"}
    try:
        file.write_text(json.dumps(kept, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"{file}: cannot be written: {error.strerror}; the run is made: {json.dumps(kept)}") from None


_last = [time.monotonic()]


def _said(how_far: str) -> None:
    """On long work, now and then."""
    if time.monotonic() - _last[0] > _PATIENCE:
        _last[0] = time.monotonic()
        say(how_far)


def main() -> None:
    command("fleet.fork", go_on, _EXAMPLES)


if __name__ == "__main__":
    main()
