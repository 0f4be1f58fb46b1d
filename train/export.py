"""A finished model as an ordinary Hugging Face folder: `python -m train.export RUN_DIR --what average --out DIR`."""

import contextlib
import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from cyclopts import App, Parameter
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from fleet import faults, launches
from fleet.config import UserError
from fleet.history import History
from fleet.host import Host
from fleet.metrics.file_sinks import TABLE
from fleet.plain import say
from fleet.recipe import Member, NotYet, name, place
from fleet.run import open_run
from fleet.status import metrics_text
from fleet.work import Input
from train import report
from train.batches import TokenFile
from train.config import TrainConfig
from train.made_here import save
from train.member import vectors
from train.member.prepare import open_tokenizer
from train.member.pretraining_runtime import CONFIG, outer_of, sources
from train.member.vectors import Joining
from train.model import empty, layout_of, read_config
from train.posttrain_results import taken
from train.training_recipes import FIRST, TOKENIZER, token_files

_PROMPT, _SAMPLE = 8, 60  # tokens


class Exporter:
    """Reads a run; what its members are stays as it is."""

    def __init__(self, run_dir: Path) -> None:
        self.store, run = open_run(run_dir, Host(), "export")
        self.config = TrainConfig.joined(run["config"], launches.settings(self.store, launches.latest(self.store)))
        self.history = History(self.store)
        self.history.look_far()
        self.last = self.history.first - 1  # the last finished round
        shape = read_config(self.parent(FIRST).read(CONFIG), self.config)
        self.model: PreTrainedModel = empty(shape, 0, self.config.trust_remote_code)
        self.layout = layout_of(self.model)
        self.diloco = self.config.algorithm == "diloco"
        while self.last > 0 and not self._members(self.last):  # nobody came of it
            self.last -= 1

    def parent(self, id: str) -> Input:
        return Input(self.history[id], self.history.files(id))

    def export(self, what: str, out: Path) -> None:
        """Write the folder."""
        members, vector = self.chosen(what)
        for parameter, view in self.layout.views(vector).items():
            self.model.get_parameter(parameter).data.copy_(view)
        out.mkdir(parents=True, exist_ok=True)
        disable_progress_bar()
        save(self.model, self.tokenizer(), out)
        (out / "README.md").write_text(self._readme(what, members, out), encoding="utf-8")

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return open_tokenizer(self.parent(TOKENIZER), self.config)

    def chosen(self, what: str) -> tuple[list[Member], Tensor]:
        """The members that it is made of, and its weights."""
        if self.last < 1:
            raise UserError("no round is finished yet; there is nothing to export")
        if what == "average":
            return self._average(self.last)
        if what == "best":
            evaluated = [m for m in self._members(self.last) if "loss" in m.metrics]
            if self.diloco or not evaluated:
                return self._average(self.last)
            return self._one(min(evaluated, key=lambda m: (m.metrics["loss"], m.id)).id)
        if not (match := re.fullmatch(r"([0-9]{1,5})-([a-z0-9][a-z0-9_-]*)", what)):
            raise UserError(f"--what {what}: average, best, or a round and a slot, as in 3-m0")
        round, slot = int(match[1]), match[2]
        return self._average(round) if slot in ("average", "global") else self._one(name(round, slot))

    def sources(self, part: str) -> list[TokenFile]:
        return sources([self.parent(id) for id in token_files(self.config)], part, self.config)

    def _members(self, round: int) -> list[Member]:
        """Of EDT: the generation's; of DiLoCo: the shards of the global model."""
        tasks = ("shard", "gathered") if self._in_shards(round) else ("child", "whole", "")
        there = [each for each in self.history.plan(round) if each.role == "member" and each.task in tasks]
        return [member for each in there if (member := self.history[name(round, each.slot)])]

    def _in_shards(self, round: int) -> bool:
        """Of a run that goes on from another, earlier rounds may be of another method."""
        return any(each.task in ("shard", "gathered") for each in self.history.plan(round))

    def _average(self, round: int) -> tuple[list[Member], Tensor]:
        members = self._members(round)
        parents = [self.parent(member.id) for member in members]
        if not members:
            raise UserError(f"round {round} has no members whose average could be exported")
        return members, self._settled(vectors.joined if self._in_shards(round) else vectors.mean, parents)

    def _one(self, id: str) -> tuple[list[Member], Tensor]:
        parent, vector = self.parent(id), torch.empty(self.layout.size)
        if id.startswith("0/") and vectors.WEIGHTS in parent.member.digests:
            vectors.load_weights(parent, vector)
        elif parent.member.recipe.task in ("child", "whole"):
            vector = self._settled(vectors.mean, [parent])
        else:
            raise UserError(f"{id} has no weights of its own; it has: {', '.join(parent.member.digests) or 'no files'}")
        return [parent.member], vector

    def _settled(self, join: Joining, parents: list[Input]) -> Tensor:
        return vectors.settled(outer_of(self.config), join, parents, self.layout.size)

    def _readme(self, what: str, members: list[Member], out: Path) -> str:
        lines = [f"- `{m.id}`: {metrics_text(m.metrics)}; parents: {', '.join(m.recipe.parents)}" for m in members]
        round = place(members[0].id)[0]
        together = [m for m in self.history.round(round) if m.id.endswith(("/average", "/global")) and m]
        evaluated = together if len(members) > 1 else members
        whole = [f"- `{m.id}`: {metrics_text(m.metrics)}" for m in evaluated]
        bound = json.dumps(self.config.bound(), indent=2)
        parts = (
            f"# {self.config.project_name}: {what}",
            f"Made by {self.config.algorithm} in {round} rounds.",
            "## Metrics\n\n" + ("\n".join(whole) or "Not evaluated as a whole."),
            f"## Evaluation\n\n```sh\n{report.lm_eval(out)}\n```",
            "## Lineage\n\nThe members that it was made of:\n\n" + "\n".join(lines),
            f"## Configuration\n\n```json\n{bound}\n```",
        )
        return "\n\n".join(parts) + "\n"


def show(exporter: Exporter, what: str, out: Path) -> None:
    """Export, and let the model say something."""
    torch.set_num_threads(exporter.config.threads)
    exporter.export(what, out)
    say(f"Exported ({what}): {out}")
    with contextlib.suppress(faults.Fault):
        if report.picture(exporter.history):
            root = exporter.store.disk.root
            say(f"Every member's metrics: {root / TABLE}\nThe loss over the rounds: {root / report.PICTURE}")
    say(f"Evaluate it: {report.lm_eval(out)}")
    say(f"Held-out text, and how it goes on:\n{sample(exporter)}")


def sample(exporter: Exporter) -> str:
    """How a text begins that it has never seen, and what it makes of it."""
    model, tokenizer = exporter.model.eval(), exporter.tokenizer()
    torch.manual_seed(exporter.config.seed)
    given = torch.tensor(exporter.sources("held")[0].values[:_PROMPT].astype("int64"))[None]
    most = getattr(model.config, "max_position_embeddings", None) or _SAMPLE + given.shape[1]
    count = max(1, min(_SAMPLE, most - given.shape[1]))
    more = {"do_sample": True, "top_k": 20, "temperature": 0.8, "use_cache": True}
    said = cast(Any, model).generate(given, max_new_tokens=count, **more)
    return str(tokenizer.decode(said[0], skip_special_tokens=True))


def export(
    run_dir: Path,
    *,
    what: Annotated[
        str,
        Parameter(help="average, best, or a member such as 12-m3. By default the average; of post-training the best."),
    ] = "",
    out: Annotated[Path | None, Parameter(help="Where to; RUN_DIR/export by default.")] = None,
) -> None:
    """Write a model of a run as a Hugging Face folder, at the end or any time before.

    For example: python -m train.export runs/edt --what best --out my-model
    """
    out = out or run_dir / "export"
    if open_run(run_dir, Host(), "export")[1]["config"].get("algorithm") == "edt-evomerge":
        taken(run_dir, what, out)
    else:
        show(Exporter(run_dir), what or "average", out)


if __name__ == "__main__":
    try:
        App(name="python -m train.export", help=export.__doc__, version_flags=[], default_command=export)()
    except NotYet as what:
        say(f"{what} is not finished yet; the run is too young to be exported", file=sys.stderr)
        raise SystemExit(2) from None
    except (UserError, faults.Fault, KeyError, ValueError) as error:
        say(*error.args, file=sys.stderr)
        raise SystemExit(2) from None
