"""The files that show a run's ancestry, written beside its registers or wherever one likes."""

import json
from pathlib import Path

from fleet.ancestry.drawn import picture
from fleet.ancestry.genes_drawn import genome_picture
from fleet.ancestry.growth import tree
from fleet.ancestry.tree import Tree, as_json
from fleet.history import History

TEXT, PICTURE, GENOME = "ancestry.json", "ancestry.png", "genome.png"


def keep(history: History) -> list[Path]:
    """Into the run's own folder, as it is now; nothing while nobody is finished."""
    grown, root = tree(history), history.store.disk.root
    made = files(grown, root.name) if grown.nodes else {}
    for file, data in made.items():
        history.store.replace(file, data)
    return [root / file for file in made]


def files(tree: Tree, title: str = "") -> dict[str, bytes]:
    """By their names; no picture of genomes where there are none."""
    text = json.dumps(as_json(tree), indent=1, ensure_ascii=False) + "\n"
    about = f" of {title}" if title else ""
    genome = genome_picture(tree, f"The genome's history in {title}" if title else "")
    drawn = {PICTURE: picture(tree, f"Family tree{about}"), **({GENOME: genome} if genome else {})}
    return {TEXT: text.encode(errors="backslashreplace"), **drawn}
