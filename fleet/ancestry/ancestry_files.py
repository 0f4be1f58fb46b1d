"""The files that show a run's ancestry, written beside its registers or wherever one likes."""

import json

from fleet.ancestry.tree import Tree, as_json
from fleet.ancestry.tree_builder import tree
from fleet.history import History
from fleet.places import address
from fleet.report import family
from fleet.report.formatting import name
from fleet.report.page_parts import document, framed, heading

TEXT, PAGE = "ancestry.json", "ancestry.html"


def write_family_tree(history: History) -> list[str]:
    """Into the run's own folder, as it is now; nothing while nobody is finished."""
    grown, root = tree(history), history.store.root
    made = files(grown, root.name) if grown.nodes else {}
    for file, data in made.items():
        history.store.replace(file, data)
    return [f"{address(root)}/{file}" for file in made]


def files(grown: Tree, title: str) -> dict[str, bytes]:
    """By their names."""
    text = json.dumps(as_json(grown), indent=1, ensure_ascii=False) + "\n"
    made = {TEXT: text, PAGE: page(grown, title)}
    return {file: text.encode(errors="backslashreplace") for file, text in made.items()}


def page(grown: Tree, title: str) -> str:
    """The two parts of the run's report that tell of its members, with nothing else around them."""
    head = heading("Family tree", title, f'<p class="state">{name(family.said(grown), 1000)}</p>')
    parts = [
        ("family", "Family tree", family.tree_part(grown)),
        ("genome", "The genome's history", family.genome_part([*grown.nodes.values()])),
    ]
    return document(title, framed(head, parts))
