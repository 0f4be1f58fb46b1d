"""How long a tournament's parts take, what memory they need, and what they give.

For example:

    python -m evomerge.benchmarks
    python -m evomerge.benchmarks --model1 ./a --model2 ./b --model3 ./c --json figures.json
"""

import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.table import Table

from evomerge.cli import SettingsFlags
from evomerge.config import Configuration, ModelReference
from evomerge.formula import in_words
from evomerge.given_models import resolved
from evomerge.merger import AdvancedModelMerger, known
from fleet import help_pages
from fleet.console import console
from fleet.plain import say
from merge.search import search_command
from merge.search.search_progress import table


@dataclass(frozen=True)
class Figure:
    """One part."""

    what: str
    seconds: float
    memory_mb: float  # the most that this process has had so far
    gpu_mb: float | None
    result: str = ""


def measured(what: str, work: Callable[[], str]) -> Figure:
    import torch

    if cuda := torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    say(f"{what} ...", file=sys.stderr)
    begin = time.perf_counter()
    result = work()
    took = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Figure(what, took, peak, torch.cuda.max_memory_allocated() / 1e6 if cuda else None, result)


def figures(config: Configuration, place: Path) -> list[Figure]:
    """Each technique as a folder and in memory, evaluation, GGUF; each model and each merge with its score."""
    from evomerge.evolutionary_tournament import EvolutionaryMerger
    from evomerge.gguf_utils import export_gguf

    steps, made, found = EvolutionaryMerger(config, place), list[ModelReference](), list[Figure]()

    def merged(*stages: Any) -> str:
        made.append(AdvancedModelMerger(config, place)._ps_dfs_merge(techniques=stages))
        return made[-1].name

    def scored(model: ModelReference) -> str:
        return f"score {steps.evaluate(model):.4f}"

    def exported(kind: str) -> str:
        return f"{export_gguf(made[0].path, place / f'model-{kind}.gguf', kind).bytes / 1e6:.1f} MB"

    found.append(measured("models opened", lambda: f"{len(config.models)} models of {size(config):.0f} MB"))
    for stages in (("linear", "ties", "dfs"), ("slerp", "dare", "frankenmerge")):
        found.append(measured(f"merged to disk: {'+'.join(stages)}", partial(merged, *stages)))
    found.append(measured("what is asked made ready, one model evaluated", lambda: scored(made[0])))
    for model in [*config.models, *made]:
        found.append(measured(f"evaluated: {model.name}", partial(scored, model)))
    found.append(measured("mutated to disk", lambda: in_words(known(steps.mutate_model(made[0]))[0])))
    return [*found, *(measured(f"GGUF {kind}", partial(exported, kind)) for kind in ("F16", "Q8_0"))]


def size(config: Configuration) -> float:
    from merge.donors import Donors

    with Donors() as donors:
        there = [donors[model.path] for model in resolved(config.models)]
        return sum(tensor.bytes for donor in there for tensor in donor.tensors.values()) / len(there) / 1e6


def shown(found: list[Figure]) -> Table:
    rows = []
    for each in found:
        gpu = "-" if each.gpu_mb is None else f"{each.gpu_mb:.0f}"
        rows.append([each.what, f"{each.seconds:.2f}", f"{each.memory_mb:.0f}", gpu, each.result])
    caption = "MB: the most memory that this process has had so far."
    return table("evomerge", ["", "seconds", "MB", "GPU MB", "result"], rows, left=["result"], caption=caption)


app = help_pages.app("python -m evomerge.benchmarks", __doc__)


@app.default
def main(
    *,
    how: SettingsFlags = SettingsFlags(),
    json_file: Annotated[Path | None, Parameter(name="--json", help="Write the figures here, too.")] = None,
) -> int:
    with tempfile.TemporaryDirectory(prefix="evomerge-") as place:
        found = figures(how.settings(), Path(place))
    console().print(shown(found))
    if json_file:
        json_file.write_text(json.dumps([asdict(each) for each in found], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    search_command.run(app)
