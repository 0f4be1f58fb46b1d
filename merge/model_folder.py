"""What lies beside the weights: configuration, tokenizer, chat template, the recipe, a model card."""

import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import yaml

from merge.donor import Donor
from merge.files import UserError, read_json, write_json
from merge.merge_planning import Plan
from merge.merge_recipe import Merge, nearest

RECIPE = "mergekit_config.yml"  # the name by which others look for it
TEMPLATES = Path(__file__).parent / "templates"
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json")
_VOCABULARY = ("tokenizer.json", "tokenizer.model", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt")

TOKENIZER_FILES = (*_VOCABULARY, *_SETTINGS)


def furnish(folder: Path, recipe: Merge, plan: Plan, template: str | None) -> None:
    """config.json comes last: a folder without it is no model to anybody."""
    source = plan.vocabulary.source if plan.vocabulary else plan.leader
    names = _SETTINGS if plan.vocabulary else TOKENIZER_FILES
    copies = [(source, name) for name in (*names, "generation_config.json")]
    for donor, name in copies:
        if (donor.folder / name).is_file():
            shutil.copyfile(donor.folder / name, folder / name)
    if plan.vocabulary:
        write_json(folder / "tokenizer.json", plan.vocabulary.result.file)
    if template:
        _set_template(folder, template)
    (folder / RECIPE).write_text(recipe.text)
    if not (folder / "README.md").exists():  # somebody may know more of it
        (folder / "README.md").write_text(card(recipe))
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
    return known[wanted].read_text()


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
    (folder / "chat_template.jinja").write_text(template)
    (folder / "chat_template.json").unlink(missing_ok=True)
    settings = folder / "tokenizer_config.json"
    if settings.is_file() and "chat_template" in (said := read_json(settings)):
        write_json(settings, {key: each for key, each in said.items() if key != "chat_template"})


def card(recipe: Merge) -> str:
    """README.md, with the fields that the hub reads."""
    local = [name for name in recipe.models if name.startswith(("/", ".", "~")) or name.count("/") != 1]
    hub = [name for name in recipe.models if name not in local]
    fields = {"library_name": "transformers", "tags": ["merge"], **({"base_model": hub} if hub else {})}
    about = yaml.safe_dump(fields, sort_keys=False).strip()
    models = "\n".join(f"- `{name}`{' (base)' if name == recipe.base_model else ''}" for name in recipe.models)
    return (
        f"---\n{about}\n---\n# A merge of {len(recipe.models)} models\n\nMethod: `{recipe.method}`.\n\n{models}\n\n"
        f"The recipe, `{RECIPE}`:\n\n```yaml\n{recipe.text.rstrip()}\n```\n"
    )
