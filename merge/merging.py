"""A recipe in, a model's folder out: its weights, and beside them configuration, tokenizer, chat template, the recipe,
a model card."""

import contextlib
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from fleet import lm_eval_command
from fleet.places import on_hub
from merge import atomic_output, engine
from merge.atomic_output import RECIPE as RECIPE
from merge.donor import Donor
from merge.donors import Donors
from merge.json_files import read_json, write_json
from merge.merge_planning import Plan, plan_merge
from merge.merge_recipe import MergeRecipe, load, nearest
from merge.tensor_files import UserError

SHARD = 5 * 10**9  # bytes of a weight file
TEMPLATES = Path(__file__).parent / "templates"
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json")
_VOCABULARY = ("tokenizer.json", "tokenizer.model", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt")

TOKENIZER_FILES = (*_VOCABULARY, *SETTINGS)


@dataclass(frozen=True)
class MergeStats:
    """What a merge took, and what somebody should know of its result."""

    seconds: float
    read: int  # bytes of all inputs
    written: int
    notes: tuple[str, ...]


def merge(
    recipe: MergeRecipe | Path | str,
    out: Path | str,
    *,
    shard_size: int = SHARD,
    overwrite: bool = False,
    how: engine.MergeOptions = engine.MergeOptions(),
    progress: Callable[[int, int], None] = lambda bytes, total: None,
    donors: Donors | None = None,
    beside: Mapping[str, str] | None = None,
) -> MergeStats:
    """Merge the models of a recipe (a record, or the path of a YAML file) into a Hugging Face folder, with other texts
    beside them.

    >>> merge("recipe.yml", "merged")
    """
    engine.check_device(how.device)
    atomic_output.free_for(Path(out), overwrite, [] if isinstance(recipe, MergeRecipe) else [Path(recipe)])
    recipe = recipe if isinstance(recipe, MergeRecipe) else load(Path(recipe))
    with contextlib.nullcontext(donors) if donors else Donors() as donors:
        plan = plan_merge(recipe, donors)
        folders = [folder for name in recipe.models for folder in donors[name].folders]
        with atomic_output.atomic_folder(Path(out), plan.bytes, overwrite, folders) as draft:
            known = {"README.md": f"{card(recipe)}\n{lm_eval_command.section(Path(out))}\n", **(beside or {})}
            return _write_model(recipe, plan, draft, donors, shard_size, how, progress, known)


def merge_into(
    folder: Path, recipe: MergeRecipe, donors: Donors, how: engine.MergeOptions = engine.MergeOptions()
) -> MergeStats:
    """The same, straight into a folder that is there and whose owner sees to it that nobody takes a part for the
    whole."""
    return _write_model(recipe, plan_merge(recipe, donors), folder, donors, SHARD, how, lambda bytes, total: None, {})


def _write_model(
    recipe: MergeRecipe,
    plan: Plan,
    into: Path,
    donors: Donors,
    shard_size: int,
    how: engine.MergeOptions,
    progress: Callable[[int, int], None],
    beside: Mapping[str, str],
) -> MergeStats:
    begin = time.monotonic()
    engine.check_device(how.device)
    template = chat_template(recipe.chat_template, [donors[name] for name in recipe.models])
    broken = engine.write(plan.jobs, into, shard_size, how, lambda bytes: progress(bytes, plan.bytes))
    for name, text in beside.items():
        (into / name).write_text(text, encoding="utf-8")
    furnish(into, recipe, plan, template)
    read = sum(each.bytes for job in plan.jobs for each in job.inputs)
    more = [f"{name} has numbers that are not finite, or too large for its dtype" for name in broken]
    return MergeStats(time.monotonic() - begin, read, plan.bytes, (*plan.notes, *more))


# -- what lies beside the weights --------------------------------------------------------------------------------------


def furnish(folder: Path, recipe: MergeRecipe, plan: Plan, template: str | None) -> None:
    """config.json comes last: a folder without it is no model to anybody."""
    source = plan.vocabulary.source if plan.vocabulary else plan.leader
    names = SETTINGS if plan.vocabulary else TOKENIZER_FILES
    copies = [(source, name) for name in (*names, "generation_config.json")]
    for donor, name in copies:
        if (donor.folder / name).is_file():
            shutil.copyfile(donor.folder / name, folder / name)
    if plan.vocabulary:
        write_json(folder / "tokenizer.json", plan.vocabulary.result.file)
    if template:
        _set_template(folder, template)
    (folder / RECIPE).write_text(recipe.text, encoding="utf-8")
    if not (folder / "README.md").exists():  # somebody may know more of it
        (folder / "README.md").write_text(card(recipe), encoding="utf-8")
    write_json(folder / "config.json", plan.config)


def chat_template(wanted: str | None, donors: Sequence[Donor]) -> str | None:
    """A known one, the one that most of the models have, or Jinja as it stands."""
    if wanted is None:
        return None
    if wanted == "auto":
        found = Counter(template for donor in donors if (template := template_of(donor.folder)))
        return found.most_common(1)[0][0] if found else None
    if "{" in wanted:
        return wanted
    known = {path.stem: path for path in sorted(TEMPLATES.glob("*.jinja"))}
    if wanted not in known:
        raise UserError(f"chat_template is {wanted!r}: auto, Jinja, or a known one; {nearest(wanted, known)}")
    return known[wanted].read_text(encoding="utf-8")


def template_of(folder: Path) -> str | None:
    if (file := folder / "chat_template.jinja").is_file():
        try:
            return file.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise UserError(f"{file}: cannot be read: {error}") from None
    settings = folder / "tokenizer_config.json"
    said = read_json(settings).get("chat_template") if settings.is_file() else None
    return said.strip() if isinstance(said, str) else None


def _set_template(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / "chat_template.json").unlink(missing_ok=True)
    settings = folder / "tokenizer_config.json"
    if settings.is_file() and "chat_template" in (said := read_json(settings)):
        write_json(settings, {key: each for key, each in said.items() if key != "chat_template"})


def card(recipe: MergeRecipe, models: Sequence[str] = ()) -> str:
    """README.md, with the fields that the hub reads. MODELS: those that it comes from, if these are others."""
    models = models or recipe.models
    hub = [*filter(on_hub, models)]
    fields = {"library_name": "transformers", "tags": ["merge"], **({"base_model": hub} if hub else {})}
    about = yaml.safe_dump(fields, sort_keys=False).strip()
    listed = "\n".join(f"- `{name}`{' (base)' if name == recipe.base_model else ''}" for name in models)
    return (
        f"---\n{about}\n---\n# A merge of {len(models)} models\n\nMethod: `{recipe.method}`.\n\n{listed}\n\n"
        f"The recipe, `{RECIPE}`:\n\n```yaml\n{recipe.text.rstrip()}\n```\n"
    )
