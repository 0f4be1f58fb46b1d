"""The same recipes through this project and through mergekit: how far apart is each tensor?

    python -m venv elsewhere && elsewhere/bin/pip install torch mergekit
    python -m benchmarks.mergekit_same --mergekit elsewhere/bin/mergekit-yaml

Random drops (dare, della) cannot be compared: they are drawn differently. Arithmetic is float32, as `dtype` says; the
models and the results are float32, so that what is seen is the method and not the rounding, and then bfloat16, where at
most one unit of the last place may lie between the two, beside what float32 allows. mergekit draws a straight line
between directions that are less than 1.8 degrees apart, and adds small numbers to divisors: that is seen in slerp and
multislerp. In arcee_fusion its rows' divergences are sums in float32 of what cancels nearly, so that one to three
numbers of 1,000 fall on the other side of the threshold; with its sums in float64 none does. In bfloat16 many changes
have the same magnitude, and which of these ties and breadcrumbs keep is open: all numbers that are farther apart there
than allowed (up to 7 of 1,000) have such a one; in sce, the same variance. mergekit's sce gives all models one weight
where their means of squares sum to less than 1e-6.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import yaml
from cyclopts import App, Parameter
from rich.console import Console
from safetensors.torch import load_file

from benchmarks.figures import NONE, goal, table
from benchmarks.models import MODELS, llamas
from merge.evolve.search_config import MergeGenome
from merge.evolve.search_space import Space
from merge.merge_recipe import parse, text_of
from merge.merging import merge

app = App(name="python -m benchmarks.mergekit_same", help=__doc__, version_flags=[])
GRADIENT = [
    {"filter": "self_attn", "value": [0, 0.5, 0.3, 0.7, 1]},
    {"filter": "mlp", "value": [1, 0.3, 0]},
    {"value": 0.5},
]
ALLOWED = {"float32": 5e-6, "bfloat16": 2**-7}  # of the largest number, of the number itself
RECIPES = {
    "linear": {"others": [{"weight": 0.7}, {"weight": 0.2}, {"weight": 0.4}]},
    "slerp": {"base": 0, "others": [1], "t": GRADIENT},
    "nuslerp": {"others": [{"weight": 0.3}, {"weight": 0.9}]},
    "nuslerp, rows": {"others": [{"weight": 0.3}, {"weight": 0.9}], "nuslerp_flatten": False},
    "nuslerp, columns": {
        "others": [{"weight": 0.3}, {"weight": 0.9}],
        "nuslerp_flatten": False,
        "nuslerp_row_wise": True,
    },
    "nuslerp, changes": {"base": 0, "others": [1, 2], "each": {"weight": [0.3, 0.9]}},
    "multislerp": {"others": [{"weight": 0.3}, {"weight": 0.9}, {"weight": 0.5}]},
    "karcher": {"others": [{}, {}, {}]},
    "task_arithmetic": {"base": 0, "others": [1, 2], "each": {"weight": [0.3, 0.9]}, "lambda": 1.2},
    "ties": {"base": 0, "others": [1, 2], "each": {"weight": [0.3, [0.2, 0.9]], "density": [0.3, 0.55]}},
    "ties, rescaled": {
        "base": 0,
        "others": [1, 2],
        "each": {"weight": [0.3, 0.9], "density": [0.3, 0.55]},
        "rescale": True,
        "normalize": False,
    },
    "breadcrumbs": {
        "base": 0,
        "others": [1, 2],
        "each": {"weight": [0.3, 0.9], "density": [0.5, 0.7], "gamma": [0.02, 0.1]},
    },
    "breadcrumbs_ties": {"base": 0, "others": [1, 2], "each": {"weight": [0.3, 0.9], "density": [0.5, 0.7]}},
    "model_stock": {"base": 0, "others": [1, 2]},
    "model_stock, rows": {"base": 0, "others": [1, 2], "filter_wise": True},
    "sce": {"base": 0, "others": [1, 2], "select_topk": 0.4},
    "ram": {"base": 0, "others": [1, 2], "epsilon": 0.003},
    "ramplus_tl": {"base": 0, "others": [1, 2], "epsilon": 0.003, "r": 0.5, "alpha": 0.9},
    "nearswap": {"base": 0, "others": [1], "t": 0.01},
    "arcee_fusion": {"base": 0, "others": [1]},
}  # fmt: skip


def recipe_of(name: str, folder: Path, dtype: str) -> str:
    said = dict(RECIPES[name])
    others, base, each = said.pop("others"), said.pop("base", None), said.pop("each", {})
    made = {"merge_method": name.partition(",")[0], "dtype": "float32", "out_dtype": dtype}
    if base is not None:
        made["base_model"] = str(folder / MODELS[base])
    models = []
    for n, other in enumerate(others):
        own = other if isinstance(other, dict) else {key: values[n] for key, values in each.items()}
        path = folder / MODELS[n if isinstance(other, dict) else other]
        models.append({"model": str(path), **({"parameters": own} if own else {})})
    return yaml.safe_dump({**made, "models": models, **({"parameters": said} if said else {})}, sort_keys=False)


def stacked(folder: Path, dtype: str) -> str:
    a, b, _ = (str(folder / name) for name in MODELS)
    scaled = {"scale": [{"filter": "o_proj", "value": 0.5}, {"filter": "down_proj", "value": 0.25}, {"value": 1.0}]}
    slices = [
        {"sources": [{"model": a, "layer_range": [0, 3]}]},
        {"sources": [{"model": b, "layer_range": [1, 3], "parameters": scaled}]},
        {"sources": [{"model": a, "layer_range": [2, 4]}]},
    ]
    return yaml.safe_dump(
        {"merge_method": "passthrough", "dtype": "float32", "out_dtype": dtype, "slices": slices}, sort_keys=False
    )


def searched(folder: Path, dtype: str) -> dict[str, str]:
    """Recipes as a search writes them into its best_config.yaml."""
    a, b, c = (str(folder / name) for name in MODELS)
    genomes = {
        "linear": {"models": [a, b, c], "merge_method": "linear", "layer_granularity": 2},
        "slerp": {"models": [a, b, c], "merge_method": "slerp", "layer_granularity": 1},
        "ties": {"models": [b, c], "base_model": a, "merge_method": "ties", "layer_granularity": 2},
        "ties, smooth": {
            **{"models": [b, c], "base_model": a, "merge_method": "ties", "layer_granularity": 1, "smooth": True},
            **{"filters": ["self_attn", "mlp"]},
        },
        "task_arithmetic": {
            **{"models": [b, c], "base_model": a, "merge_method": "task_arithmetic", "layer_granularity": 4},
            **{"allow_negative_weights": True, "filters": ["mlp"]},
        },
    }
    found = {}
    for n, (name, genome) in enumerate(genomes.items()):
        space = Space(MergeGenome(**genome), 4, dtype)
        point = np.random.default_rng(n).normal(0.4, 0.3, space.size)
        found[f"of a search: {name}"] = text_of(space.recipe(point))
    return found


def differences(mine: Path, other: Path) -> tuple[int, float, int, str]:
    """How many tensors; the largest distance as a share of a tensor's largest number; how many numbers are farther."""
    a, b = ({k: v for f in sorted(p.glob("*.safetensors")) for k, v in load_file(f).items()} for p in (mine, other))
    if a.keys() != b.keys():
        return 0, float("inf"), 0, f"other tensors: {', '.join(sorted(a.keys() ^ b.keys())[:3])}"
    far, off, numbers = {}, 0, 0
    for name in a:
        x, y = a[name].double(), b[name].double()
        largest, distance = y.abs().max(), (x - y).abs()
        far[name] = float(distance.max() / largest)
        unit = ALLOWED["bfloat16"] * (a[name].dtype == torch.bfloat16)
        off += int((distance > ALLOWED["float32"] * largest + unit * torch.maximum(x.abs(), y.abs())).sum())
        numbers += x.numel()
    worst = max(far, key=far.__getitem__)
    return len(far), far[worst], off, f"of {numbers}" + (f"; {worst}" if off else "")


@app.default
def main(
    mergekit: Annotated[Path, Parameter(help="mergekit-yaml, in an environment of its own.")],
    only: Annotated[str, Parameter(help="Recipes with this in their names: search.")] = "",
) -> None:
    console = Console(width=150)
    shown = table(
        "The same recipes through mergekit", "recipe", "numbers", "tensors", "largest difference", "farther", ""
    )
    with tempfile.TemporaryDirectory() as temporary:
        for dtype in ("float32", "bfloat16"):
            folder = Path(temporary) / dtype
            llamas(folder, dtype, hidden=192, layers=4, vocabulary=1000)
            texts = {name: recipe_of(name, folder, dtype) for name in RECIPES}
            texts |= {"passthrough, stacked": stacked(folder, dtype)} | searched(folder, dtype)
            texts = {name: text for name, text in texts.items() if only in name}
            for n, (name, text) in enumerate(texts.items()):
                (folder / f"{n}.yml").write_text(text)
                merge(parse(text), folder / f"mine-{n}")
                command = [str(mergekit), str(folder / f"{n}.yml"), str(folder / f"theirs-{n}"), "--quiet"]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    shown.add_row(name, dtype, NONE, f"[red]{done.stderr.strip().splitlines()[-1]}[/red]", NONE, NONE)
                    continue
                count, far, off, where = differences(folder / f"mine-{n}", folder / f"theirs-{n}")
                shown.add_row(name, dtype, str(count), f"{far:.1e}", goal(not off, str(off)), where)
                print(f"{name}, {dtype}: {far:.1e}, {off} {where}", file=sys.stderr)
    console.print(shown)


if __name__ == "__main__":
    torch.set_num_threads(1)
    app()
