"""LoRA adapters: made of what fine-tuning has changed, and merged among themselves.

For example:

    python -m merge.lora extract org/tuned org/base my-adapter --rank 32
    python -m merge.lora extract org/tuned org/base my-adapter --energy 0.95
    python -m merge.lora merge recipe.yml my-adapter --rank 16

In the recipe of a merge, the models are adapters' folders:

    merge_method: ties
    models:
      - model: ./math-adapter
        parameters: {weight: 0.6, density: 0.5}
      - model: ./code-adapter
        parameters: {weight: 0.4, density: 0.5}

docs/merging.md explains both. A model and its adapter become one model by:

    python -m merge MODEL+ADAPTER OUT
"""

import math
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from fleet import help_pages, lm_eval_command
from fleet.plain import readable_bytes, say
from merge.command_helpers import bar, keep_memory, open_many, run

if TYPE_CHECKING:
    from merge.lora.adapter_writing import AdapterPlan, AdapterStats

app = help_pages.app("python -m merge.lora", __doc__)
_RANK = 32


@Parameter(name="*")
@dataclass(frozen=True)
class Common:
    """What both commands understand."""

    energy: float = 1.0
    "Of each matrix the least rank that keeps this share of its change's energy, the sum of its squares."
    optimum: Annotated[bool, Parameter(negative="")] = False
    "Say, too, what the best matrices would leave, by a full decomposition of each: much slower."
    threads: Annotated[int, Parameter(validator=Number(gte=0))] = 0
    "Matrices that are decomposed at a time; 0: as many as there are processors."
    overwrite: Annotated[bool, Parameter(negative="")] = False
    "Replace the folder if it exists."
    quiet: Annotated[bool, Parameter(negative="")] = False
    "No progress."


Rank = Annotated[int, Parameter(validator=Number(gte=0))]
LinearOnly = Annotated[bool, Parameter(negative="")]


@app.command
def extract(
    tuned: str, base: str, out: Path, *, rank: Rank = 0, linear_only: LinearOnly = False, common: Common = Common()
) -> None:
    """Make an adapter of the difference between two models.

    Parameters
    ----------
    tuned:
        The fine-tuned model: a folder, a hub id, a .gguf file, any of them + an adapter.
    base:
        The model that it was made of.
    out:
        The adapter's folder.
    rank:
        The most that a matrix may have; 0: 32, or with --energy as much as it needs.
    linear_only:
        Only linear layers but the output head; else embeddings, too, and changed norms and biases as a whole.
    """
    from merge.donors import Donors
    from merge.lora.extracting import plan_extraction

    most = rank or (_RANK if common.energy == 1 else 1 << 30)
    with Donors() as donors:
        plan = plan_extraction(donors[tuned], donors[base], most, linear_only)
        _write(plan, out, [*donors[tuned].folders, *donors[base].folders], common)


@app.command
def merge(recipe: Path, out: Path, *, rank: Rank = 0, seed: int = 0, common: Common = Common()) -> None:
    """Merge adapters by a recipe; the result is an adapter.

    Parameters
    ----------
    recipe:
        The recipe, a YAML file whose models are adapters' folders.
    out:
        The adapter's folder.
    rank:
        The most that a matrix may have; 0: the sum of the adapters' own.
    seed:
        Of random drops, in dare and della.
    """
    from merge.engine import MergeOptions
    from merge.lora.adapter_merging import opened, plan_adapters
    from merge.merge_recipe import load

    said = load(recipe)
    with ExitStack() as stack:
        adapters = [opened(name, stack) for name in said.models]
        plan = plan_adapters(said, adapters, rank, MergeOptions(seed=seed))
        _write(plan, out, [recipe, *(each.folder for each in adapters)], common)


def _write(plan: "AdapterPlan", out: Path, needed: list[Path], common: Common) -> None:
    from merge.engine import MergeOptions
    from merge.lora.adapter_writing import write_adapter

    keep_memory()
    open_many()
    with bar(common.quiet, "decomposing") as progress:
        stats = write_adapter(
            plan,
            out,
            share=common.energy,
            optimum=common.optimum,
            overwrite=common.overwrite,
            needed=needed,
            how=MergeOptions(common.threads),
            progress=progress,
        )
    for note in stats.notes:
        say(f"Note: {note}.")
    say(f"{out}: {readable_bytes(stats.bytes)} in {stats.seconds:.1f} s; {_told(stats)}")
    say(f"Evaluate it: {lm_eval_command.lm_eval(out, plan.base)}")


def _told(stats: "AdapterStats") -> str:
    if not stats.ranks:
        return "no matrix has changed"
    least, most = min(stats.ranks.values()), max(stats.ranks.values())
    ranks = f"rank {most}" if least == most else f"ranks {least} to {most}"
    said = f"{len(stats.ranks)} matrices of {ranks} keep {stats.kept / stats.energy:.4%} of the change's energy"
    said += f", relative error {stats.error:.3g}"
    if stats.best is not None:
        said += f" (of the best matrices of these ranks: {stats.best / math.sqrt(stats.energy):.3g})"
    return said


if __name__ == "__main__":
    raise SystemExit(run(app))
