"""What lies beside the weights: configuration, tokenizer, chat template, the recipe, a model card."""

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from merge.donors import Donor
from merge.files import Wrong
from merge.output import write_json
from merge.planning import Plan
from merge.recipe import Merge, nearest

RECIPE = "mergekit_config.yml"  # the name by which others look for it
_TOKENIZER = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json tokenizer.model added_tokens.json vocab.json "
    "merges.txt vocab.txt chat_template.jinja chat_template.json"
).split()
_TURN = "{% for message in messages %}"
_ASK = "{% if add_generation_prompt %}"
TEMPLATES = {
    "chatml": _TURN
    + "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    + _ASK
    + "{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "alpaca": _TURN
    + "{% if message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}"
    + "{% elif message['role'] == 'user' %}{{ '### Instruction:\\n' + message['content'] + '\\n\\n' }}"
    + "{% else %}{{ '### Response:\\n' + message['content'] + '\\n\\n' }}{% endif %}{% endfor %}"
    + _ASK
    + "{{ '### Response:\\n' }}{% endif %}",
    "llama3": "{{ bos_token }}"
    + _TURN
    + "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' "
    + "+ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    + _ASK
    + "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
    "mistral": "{{ bos_token }}"
    + _TURN
    + "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    + "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}",
}


def furnish(folder: Path, recipe: Merge, plan: Plan, donors: Sequence[Donor]) -> None:
    """config.json comes last: a folder without it is no model to anybody."""
    source = plan.vocabulary.source if plan.vocabulary else plan.leader
    for name in _TOKENIZER:
        if (source.folder / name).is_file():
            shutil.copyfile(source.folder / name, folder / name)
    if (plan.leader.folder / "generation_config.json").is_file():
        shutil.copyfile(plan.leader.folder / "generation_config.json", folder / "generation_config.json")
    if plan.vocabulary:
        plan.vocabulary.save(folder)
    if template := chat_template(recipe.chat_template, donors):
        _set_template(folder, template)
    text = recipe.text or "# made by the library, not from a file\n"
    (folder / RECIPE).write_text(text)
    (folder / "README.md").write_text(card(recipe, text))
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
    if wanted not in TEMPLATES:
        raise Wrong(f"chat_template is {wanted!r}: auto, Jinja, or a known one; {nearest(wanted, TEMPLATES)}")
    return TEMPLATES[wanted]


def template_of(folder: Path) -> str | None:
    try:
        if (folder / "chat_template.jinja").is_file():
            return (folder / "chat_template.jinja").read_text().strip()
        said = json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return None
    return said.strip() if isinstance(said, str) else None


def _set_template(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    (folder / "chat_template.json").unlink(missing_ok=True)
    settings = folder / "tokenizer_config.json"
    try:
        said: dict[str, Any] = json.loads(settings.read_text())
    except (OSError, ValueError):
        return
    if said.pop("chat_template", None) is not None:
        write_json(settings, said)


def card(recipe: Merge, text: str) -> str:
    """README.md, with the fields that the hub reads."""
    local = [name for name in recipe.models if name.startswith(("/", ".", "~")) or name.count("/") != 1]
    hub = [name for name in recipe.models if name not in local]
    fields = {"library_name": "transformers", "tags": ["merge"], **({"base_model": hub} if hub else {})}
    about = yaml.safe_dump(fields, sort_keys=False).strip()
    models = "\n".join(f"- `{name}`{' (base)' if name == recipe.base_model else ''}" for name in recipe.models)
    return (
        f"---\n{about}\n---\n# A merge of {len(recipe.models)} models\n\nMethod: `{recipe.method}`.\n\n{models}\n\n"
        f"The recipe, `{RECIPE}`:\n\n```yaml\n{text.rstrip()}\n```\n"
    )
