"""The lm_eval command line for a finished model: shown when a command ends, and in the model's README.md."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

_TEMPLATES = ("chat_template.jinja", "tokenizer_config.json")  # where a chat template is, or is named


@dataclass(frozen=True)
class Asked:
    """Public tasks, which know nothing of how a model was made; or those by which a run has chosen it."""

    tasks: tuple[str, ...] = ("hellaswag", "arc_easy")
    folders: tuple[str, ...] = ()  # of tasks of one's own; lm_eval takes one
    examples: int | None = None  # in prompts

    @property
    def possible(self) -> bool:
        return bool(self.tasks) and len(self.folders) < 2

    def options(self, folder: Path) -> str:
        words = ["--tasks", ",".join(self.tasks)]
        words += [word for each in self.folders for word in ("--include_path", each)]
        words += [] if self.examples is None else ["--num_fewshot", str(self.examples)]
        words += ["--apply_chat_template"] if self != PUBLIC and _chats(folder) else []
        return shlex.join(words)


PUBLIC, NOTHING = Asked(), Asked(())


def lm_eval(folder: Path, base: str = "", asked: Asked = PUBLIC) -> str:
    """Of a model; or of an adapter, beside its base."""
    given = {"pretrained": base, "peft": str(folder)} if base else {"pretrained": str(folder)}
    said = ",".join(f"{key}={value}" for key, value in given.items())
    if "," in "".join(given.values()):  # which would part them
        said = json.dumps(given)
    return f"lm_eval --model hf --model_args {shlex.quote(said)} {asked.options(folder)}"


def hint(folder: Path, asked: Asked = PUBLIC) -> str:
    """A line for people; none where it cannot be done."""
    if not asked.possible:
        return ""
    return f"{'Evaluate it' if asked == PUBLIC else 'All questions of its tasks'}: {lm_eval(folder, asked=asked)}"


def section(folder: Path, asked: Asked = PUBLIC) -> str:
    """Of the README.md in it."""
    if not asked.possible:
        return ""
    some = "" if asked == PUBLIC else "By all questions of the tasks that have chosen it:\n\n"
    return f"## Evaluation\n\n{some}```sh\n{lm_eval(folder, asked=asked)}\n```"


def _chats(folder: Path) -> bool:
    """Its run has asked it by its chat template, too."""
    there, named = (folder / each for each in _TEMPLATES)
    return there.is_file() or named.is_file() and '"chat_template"' in named.read_text(encoding="utf-8")
