"""Starting a search, here or on other machines, and what is said and written when it ends."""

import contextlib
import os
import shutil
from pathlib import Path

from fleet import gpus, launches, lm_eval_command, results_version
from fleet.console import console
from fleet.history import opened
from fleet.host import Host
from fleet.local import Starter
from fleet.metrics import claim
from fleet.metrics.file_sinks import BOARD, TABLE
from fleet.permissions import leaving
from fleet.places import beside, in_bucket
from fleet.plain import say
from fleet.recipe import NotYet
from fleet.run import NoRun, open_run
from fleet.store import FOLDERS
from merge.evolve import records, search_view
from merge.evolve.search_config import ALGORITHM, SearchConfig


def local(config: SearchConfig, where: Path, workers: int, most: int | None) -> int:
    """Workers on this machine; how it ended."""
    if most is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus.visible()[:most])
    return Starter(config, where.parent, workers, search_view.SearchView).run()


def make_way(config: SearchConfig, where: Path) -> None:
    """A search that cannot work holds nothing: another one may take its place, if nothing else is in its folder."""
    try:
        store, run = open_run(where, Host(), "starter")
    except NoRun:
        return
    if run["config"].get("algorithm") != ALGORITHM:
        return
    results_version.check(where, run)
    launch = launches.latest(store)
    stopped = launch > 0 and launches.ordered(store, launch)
    checked = any(name.startswith("check.") and name.endswith(".done") for name in store.names("rounds/00000"))
    if SearchConfig.joined(run["config"], {}).bound() == config.bound():
        return
    scored = checked and (not over(where) or records.read(opened(where)).best)
    own = {*FOLDERS, "run.json", "bell", claim.FOLDER, TABLE, BOARD, "wandb"}
    own |= {records.TABLE, records.PLAIN, records.BEST, records.PICTURE}
    if (stopped or checked) and not scored and not in_bucket(where) and set(os.listdir(where)) <= own:
        say(f"In {where} lay a search that scored nothing; this one takes its place.")
        shutil.rmtree(where)


def over(where: Path) -> bool:
    """All that was to be searched has been, or the time is up."""
    with contextlib.suppress(NoRun, NotYet):
        store, _ = open_run(where, Host(), "starter")
        return launches.ended(store) or opened(where).over
    return False


def ended(where: Path, save: bool) -> int:
    """Write and say what a search has come to."""
    history = opened(where)
    try:
        found = records.read(history)
    except NotYet:
        say("Nothing was scored: the time was up before tasks and models had been checked.")
        return 1
    for name, data in (records.files(found) | {records.PICTURE: records.picture(found)}).items():
        history.store.replace(name, data)
    console().print(search_view.table_of(found))
    say(*search_view.summary(found), sep="\n")
    if not found.best:
        return 1
    if in_bucket(where):  # what people go on with lies here, too
        where = beside(where)
        where.mkdir(exist_ok=True)
        (where / records.BEST).write_bytes(records.files(found)[records.BEST])
    say(f"Its recipe: {where / records.BEST}")
    if save:
        from merge.merging import merge

        with leaving():
            merge(where / records.BEST, where / "final_model", overwrite=True)
        say(f"The model: {where / 'final_model'}", lm_eval_command.hint(where / "final_model"), sep="\n")
    return 0
