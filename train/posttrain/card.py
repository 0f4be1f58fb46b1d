"""What is said of a member that leaves its run: README.md of its folder."""

import json

import yaml

from fleet.ancestry.growth import tree
from fleet.ancestry.tree import Tree, line_of
from fleet.history import History
from fleet.recipe import Member
from train.posttrain.posttrain_config import PosttrainConfig

_INIT = "0/init-"


def card(c: PosttrainConfig, history: History, id: str) -> str:
    """Who it descends from, what it has learned, how fit it was."""
    origin = history[id].origin
    known = tree(history)
    line = line_of(known, origin).all
    founders = [called(c, each) for each in line if each.startswith(_INIT)]
    hub = [name for name in founders if name.count("/") == 1 and not name.startswith((".", "~"))]
    fields = {"library_name": "transformers", "tags": ["merge"], **({"base_model": hub} if hub else {})}
    parts = (
        f"---\n{yaml.safe_dump(fields, sort_keys=False).strip()}\n---\n# {c.project_name}, member {origin}",
        f"Bred by {c.algorithm} from:\n\n" + "\n".join(f"- `{name}`" for name in founders),
        "## Descent\n\n" + "\n".join(_described(known, history, each) for each in line if not each.startswith("0/")),
        f"## Configuration\n\n```json\n{json.dumps(c.bound(), indent=2)}\n```",
    )
    return "\n\n".join(parts) + "\n"


def called(c: PosttrainConfig, id: str) -> str:
    """A founder, by the name that was given."""
    return c.models[int(id.removeprefix(_INIT))] if id.startswith(_INIT) else id


def _described(known: Tree, history: History, id: str) -> str:
    node, member = known.nodes[id], history[id]
    made = f"{node.technique} of {' and '.join(node.parents)}" if len(node.parents) > 1 else f"of {node.parents[0]}"
    return f"- `{id}`: {made}; {_learned(member)}fitness {member.metrics['fitness']:.4f}"


def _learned(member: Member) -> str:
    if "steps" not in member.metrics:
        return ""
    data = member.recipe.genome["data"]
    total = sum(data.values())
    shares = ", ".join(f"{weight / total:.0%} {name}" for name, weight in data.items() if weight)
    return f"{member.recipe.args['how']} for {member.metrics['steps']} steps on {shares}; "
