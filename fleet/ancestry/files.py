"""The files that show a run's ancestry, written beside its registers or wherever one likes."""

import contextlib
import json
from pathlib import Path

from fleet import faults
from fleet.ancestry.drawn import picture
from fleet.ancestry.genes_drawn import genome_picture
from fleet.ancestry.tree import Tree, as_json, tree
from fleet.disk import Disk
from fleet.history import History
from fleet.host import Host

TEXT, PICTURE, GENOME = "ancestry.json", "ancestry.png", "genome.png"


def keep(history: History) -> list[Path]:
    """Into the run's own folder, as it is now; nothing while nobody is finished."""
    disk, grown = history.store.disk, tree(history)
    return leave(disk, files(grown, disk.root.name), "tmp/") if grown.nodes else []


def files(tree: Tree, title: str = "") -> dict[str, bytes]:
    """By their names; no picture of genomes where there are none."""
    text = json.dumps(as_json(tree), indent=1, ensure_ascii=False) + "\n"
    about = f" of {title}" if title else ""
    genome = genome_picture(tree, f"The genome's history in {title}" if title else "")
    drawn = {PICTURE: picture(tree, f"Family tree{about}"), **({GENOME: genome} if genome else {})}
    return {TEXT: text.encode(errors="backslashreplace"), **drawn}


def leave(disk: Disk, written: dict[str, bytes], private: str = ".") -> list[Path]:
    """Each as a whole, whoever else writes or reads it now; drafts have names that begin with `private`."""
    for file, data in written.items():
        draft = f"{private}ancestry.{Host().token()}"
        try:
            disk.write(draft, data, sync=True)
            disk.rename(draft, file)
        except faults.Fault:
            with contextlib.suppress(faults.Fault):
                disk.remove(draft)
            raise
    return [disk.root / file for file in written]
