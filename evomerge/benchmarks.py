"""How long a tournament's parts take, what memory they need, and what they give: `python -m evomerge.benchmarks`

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

from cyclopts import App, Parameter
from rich.table import Table

from evomerge.config import Configuration, ModelReference, chosen
from evomerge.formula import Formula, in_words
from evomerge.merger import AdvancedModelMerger, known
from evomerge.utils import EvoMergeException, expected
from fleet.console import console
from fleet.plain import say


@dataclass(frozen=True)
class Figure:
    """One part."""

    what: str
    seconds: float
    memory_mb: float  # the most that this process has had so far
    gpu_mb: float | None
    result: str = ""


def measured(what: str, work: Callable[[], str]) -> Figure:
    cuda = _cuda()
    if cuda:
        cuda.reset_peak_memory_stats()
    say(f"{what} ...", file=sys.stderr)
    begin = time.perf_counter()
    result = work()
    took = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Figure(what, took, peak, cuda.max_memory_allocated() / 1e6 if cuda else None, result)


def _cuda() -> Any:
    import torch

    return torch.cuda if torch.cuda.is_available() else None


def figures(config: Configuration, place: Path) -> list[Figure]:
    """Each technique as a folder and in memory, evaluation, GGUF; each model and each merge with its score."""
    from evomerge.evolutionary_tournament import EvolutionaryMerger
    from evomerge.gguf_utils import export_gguf

    merger, made, found = EvolutionaryMerger(config, place), list[ModelReference](), list[Figure]()

    def scored(model: ModelReference) -> str:
        return f"score {merger.evaluate(model):.4f}"

    found.append(measured("models looked at", lambda: f"{len(config.models)} models of {size(config):.0f} MB"))
    for stages in (("linear", "ties", "dfs"), ("slerp", "dare", "frankenmerge")):

        def merge(stages: Any = stages) -> str:
            made.append(AdvancedModelMerger(config, place)._ps_dfs_merge(techniques=stages))
            return made[-1].name

        found.append(measured(f"merged to disk: {'+'.join(stages)}", merge))
    found.append(measured("what is asked made ready, one model evaluated", lambda: scored(made[0])))
    for model in [*config.models, *made]:
        found.append(measured(f"evaluated: {model.name}", partial(scored, model)))
    found.append(measured("mutated to disk", lambda: in_words(formula_of(merger.mutate_model(made[0])))))
    for kind in ("F16", "Q8_0"):
        file = place / f"model-{kind}.gguf"

        def export(file: Path = file, kind: str = kind) -> str:
            return f"{export_gguf(made[0].path, file, kind).bytes / 1e6:.1f} MB"

        found.append(measured(f"GGUF {kind}", export))
    return found


def formula_of(model: ModelReference) -> Formula:
    return known(model)[0]


def size(config: Configuration) -> float:
    from evomerge.tournament_running import resolved
    from merge.donors import Donors

    with Donors() as donors:
        there = [donors[model.path] for model in resolved(config.models)]
        return sum(tensor.bytes for donor in there for tensor in donor.tensors.values()) / len(there) / 1e6


def table(found: list[Figure]) -> Table:
    shown = Table(title="evomerge", title_justify="left")
    for column in ("", "seconds", "MB", "GPU MB", "result"):
        shown.add_column(column, justify="left" if column in ("", "result") else "right", overflow="fold")
    shown.caption = "MB: the most memory that this process has had so far."
    for each in found:
        gpu = "-" if each.gpu_mb is None else f"{each.gpu_mb:.0f}"
        shown.add_row(each.what, f"{each.seconds:.2f}", f"{each.memory_mb:.0f}", gpu, each.result)
    return shown


app = App(name="python -m evomerge.benchmarks", help=__doc__, help_format="plaintext", version_flags=[])


@app.default
def main(
    *,
    config: Annotated[Path | None, Parameter(help="A JSON file with all settings.")] = None,
    model1: Annotated[str, Parameter(help="A model; the default ones fill the gaps.")] = "",
    model2: Annotated[str, Parameter(help="The second one.")] = "",
    model3: Annotated[str, Parameter(help="The third one.")] = "",
    json_file: Annotated[Path | None, Parameter(name="--json", help="Write the figures here, too.")] = None,
) -> int:
    try:
        with expected(), tempfile.TemporaryDirectory(prefix="evomerge-") as place:
            settings = chosen(config, [model1, model2, model3])
            found = figures(settings, Path(place))
    except EvoMergeException as error:
        say(error, file=sys.stderr)
        return 2
    console().print(table(found))
    if json_file:
        json_file.write_text(json.dumps([asdict(each) for each in found], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(app(result_action="return_value"))
