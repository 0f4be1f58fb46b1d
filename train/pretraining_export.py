"""A model of pre-training as an ordinary Hugging Face folder, at the end or any time before."""

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from fleet import faults, launches, lm_eval_command
from fleet.busy_notice import saying
from fleet.history import History
from fleet.host import Host
from fleet.metrics.file_sinks import TABLE
from fleet.permissions import leaving
from fleet.places import address
from fleet.plain import say, several
from fleet.recipe import Member, name, round_and_slot
from fleet.run import open_run
from fleet.run_config import UserError
from fleet.scratch import scratch
from fleet.status import metrics_text
from fleet.work import InputMember
from train import loss_picture, model_card
from train.batches import TokenFile, held_of
from train.kept_rounds import files_of
from train.learner import best_device, language_loss
from train.member import vectors
from train.member.exchange_tasks import outer_of
from train.member.pretraining_round_zero import open_tokenizer
from train.member.pretraining_runtime import CONFIG, bits_per_byte, evaluated, mean_loss, token_files_of
from train.member.vectors import Joining
from train.model import empty, layout_of, read_config
from train.models_on_demand import save
from train.recipe_arguments import FIRST, TOKENIZER, token_files
from train.token_budget import held_count
from train.training_config import TrainConfig
from train.verdicts import NotFinite, ran_out

T = TypeVar("T")
_SHARDS = ("shard", "gathered")  # the tasks whose members are parts of the model; others' that have weights are whole
_PROMPT, _SAMPLE = 8, 60  # tokens
_SAMPLED = 4  # sources


class Exporter:
    """Reads a run; what its members are stays as it is."""

    def __init__(self, run_dir: Path) -> None:
        self.store, run = open_run(run_dir, Host(), "export")
        self.config = TrainConfig.joined(run["config"], launches.settings(self.store, launches.latest(self.store)))
        self.history = History(self.store)
        self.history.look_far()
        self.last = self.history.first_open - 1  # the last finished round
        shape = read_config(self.parent(FIRST).read(CONFIG), self.config)
        self.model: PreTrainedModel = empty(shape, 0, self.config.trust_remote_code)
        self.layout = layout_of(self.model)
        while self.last > 0 and not self._members(self.last):  # nobody came of it
            self.last -= 1

    def parent(self, id: str) -> InputMember:
        return files_of(self.history, id)

    @leaving()
    def export(self, what: str, out: Path) -> Mapping[str, Any]:
        """Write the folder; how good the model in it is."""
        members = self._hold(what)
        tested = self.tested(members)
        disable_progress_bar()
        with _filling(out) as draft:
            save(self.model, self.tokenizer(), draft)
            (draft / "README.md").write_text(self._readme(what, members, tested, out), encoding="utf-8")
            model_card.complete(draft, self.history)
        return tested

    def best_tested(self) -> tuple[str, Mapping[str, Any]]:
        """The best member of the last round, where there are several, and how good it is on test text."""
        if self.config.shares_one_model or len(self._members(self.last)) < 2:
            return "", {}
        (best,) = self._hold("best")
        return best.id, self.tested([best])

    def _hold(self, what: str) -> list[Member]:
        """The model has these weights from here on."""
        members, vector = self.chosen(what)
        for parameter, view in self.layout.views(vector).items():
            self.model.get_parameter(parameter).data.copy_(view)
        return members

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return open_tokenizer(self.parent(TOKENIZER), self.config)

    def chosen(self, what: str) -> tuple[list[Member], Tensor]:
        """The members that it is made of, and its weights."""
        if self.last < 1:
            raise UserError("no round is finished yet; there is nothing to export")
        if what == "average":
            return self._average(self.last)
        if what == "best":
            there = [m for m in self._members(self.last) if "loss" in m.metrics]
            if self.config.shares_one_model or not there:
                return self._average(self.last)
            return self._one(min(there, key=lambda m: (m.metrics["loss"], m.id)).id)
        if not (match := re.fullmatch(r"([0-9]{1,5})-([a-z0-9][a-z0-9_-]*)", what)):
            raise UserError(f"--what {what}: average, best, or a round and a slot, as in 3-m0")
        round, slot = int(match[1]), match[2]
        if self.history.over and round > self.last:
            raise UserError(f"--what {what}: the run is over after {several(self.last, 'round')}")
        return self._average(round) if slot in ("average", "global") else self._one(name(round, slot))

    def token_files(self, part: str) -> list[TokenFile]:
        return token_files_of([self.parent(id) for id in token_files(self.config)], part, self.config)

    def tested(self, members: list[Member]) -> Mapping[str, Any]:
        """On text that selected nobody: what the run found out of all together, or else what is found out here."""
        ids = [member.id for member in members]
        for each in self.history.round(round_and_slot(ids[0])[0]):
            if each and each.recipe.role == "summary" and [id for id in each.recipe.parents if self.history[id]] == ids:
                return each.metrics
        with contextlib.suppress(NotFinite):  # then it is a model that says nothing, and is told to be one
            metrics = self._evaluated()
            sources = [self.parent(id).metrics for id in token_files(self.config)]
            return {**metrics, **bits_per_byte(metrics["loss"], sources, self.config, self.unseen)}
        return {"loss": math.nan}

    @property
    def unseen(self) -> str:
        """The part of the text that nobody has learned from; of a run of older code, what members were selected on."""
        there = (self.parent(id).metrics for id in token_files(self.config))
        return "test" if all("test" in each for each in there) else "held"

    @property
    def told_on(self) -> str:
        c = self.config
        windows = sum(held_count(c, number, self.unseen) for number in range(len(c.datasets)))
        count = f"{windows * c.seq_length:,} tokens"
        if self.unseen == "test":
            return f"On {count} of test text, which selected nobody"
        return f"On {count} of held-out text, which selected members, too (this run is of older code)"

    def by_source(self) -> list[str]:
        """The loss on the test text of each source, where there are several: of the model that is held now."""
        c, files = self.config, self.token_files(self.unseen)
        held = [(held_of(file, c, number, self.unseen), c.datasets[number].source) for number, file in enumerate(files)]
        there = [(windows, name) for windows, name in held if windows]
        if len(there) < 2:
            return []
        with contextlib.suppress(NotFinite):
            size = c.eval_batch_size
            losses = self._measured(lambda loss_of: [mean_loss(loss_of, windows, size) for windows, _ in there])
            return [f"{name} {loss:.6g}" for loss, (_, name) in zip(losses, there, strict=True)]
        return []

    def _evaluated(self) -> Mapping[str, Any]:
        return self._measured(
            lambda loss_of: evaluated(loss_of, self.token_files(self.unseen), self.config, self.unseen)
        )

    def _measured(self, measure: Callable[[Callable[[Tensor], float]], T]) -> T:
        """By the GPU, if there is one and it has room: workers may still have theirs there, or it may be too small."""
        for device in dict.fromkeys((best_device(), torch.device("cpu"))):
            try:
                cast(Any, self.model.eval()).to(device)
                return measure(partial(self._loss, device))
            except Exception as error:
                if device.type == "cpu" or not ran_out(error):
                    raise
            finally:
                cast(Any, self.model).to("cpu")  # where it says something
        raise AssertionError

    def _loss(self, device: torch.device, windows: Tensor) -> float:
        with torch.inference_mode():
            return float(language_loss(self.model, windows.to(device)))

    def _members(self, round: int) -> list[Member]:
        """Of DiLoCo: the shards of the global model; else whoever has weights."""
        shards = self._in_shards(round)
        there = [each for each in self.history.plan(round) if each.role == "member"]
        members = [self.history[name(round, each.slot)] for each in there]
        return [each for each in members if each and (each.recipe.task in _SHARDS if shards else has_weights(each))]

    def _in_shards(self, round: int) -> bool:
        """Of a run that goes on from another, earlier rounds may be of another method."""
        return any(each.task in _SHARDS for each in self.history.plan(round))

    def _average(self, round: int) -> tuple[list[Member], Tensor]:
        if not (parents := [self.parent(member.id) for member in self._members(round)]):
            raise UserError(f"round {round} has no members whose average could be exported")
        return self._without_lookahead(vectors.joined if self._in_shards(round) else vectors.mean, parents)

    def _one(self, id: str) -> tuple[list[Member], Tensor]:
        parent = self.parent(id)
        if id.startswith("0/") and vectors.file_of(vectors.WEIGHTS) in parent.member.digests:
            return [parent.member], vectors.load_weights(parent, self.layout.size)
        if has_weights(parent.member) and parent.member.recipe.task not in _SHARDS:
            return self._without_lookahead(vectors.mean, [parent])
        raise UserError(f"{id} has no weights of its own; it has: {', '.join(parent.member.digests) or 'no files'}")

    def _without_lookahead(self, join: Joining, parents: list[InputMember]) -> tuple[list[Member], Tensor]:
        together = vectors.without_lookahead(outer_of(self.config), join, parents, self.layout.size)
        return [parent.member for parent in parents], together

    def _readme(self, what: str, members: list[Member], tested: Mapping[str, Any], out: Path) -> str:
        lines = [f"- `{m.id}`: {metrics_text(m.metrics)}; parents: {', '.join(m.recipe.parents)}" for m in members]
        round, selected = round_and_slot(members[0].id)[0], "validation" if self.unseen == "test" else "held-out"
        counts = [self.history[id].metrics for id in token_files(self.config)]
        parts = (
            f"{model_card.front(self.config)}\n# {self.config.project_name}: {what}",
            f"Made by {self.config.algorithm} in {several(round, 'round')}.",
            f"## Metrics\n\n{self.told_on}: {metrics_text(tested)}",
            lm_eval_command.section(out),
            model_card.data_of(self.config, counts),
            f"## Lineage\n\nThe members that it was made of, with their loss on {selected} text:",
            "\n".join(lines),
            f"## Configuration\n\n```json\n{json.dumps(self.config.bound(), indent=2)}\n```",
        )
        return "\n\n".join(parts) + "\n"


@contextlib.contextmanager
def _filling(out: Path) -> Iterator[Path]:
    """A folder whose files go into this one once all of them are written; or why they cannot be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with scratch(".unfinished", out) as draft:
            yield draft
            for file in draft.iterdir():
                file.replace(out / file.name)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{out}: cannot be written: {getattr(error, 'strerror', None) or error}") from None


def has_weights(member: Member) -> bool:
    """In one file, or in parts."""
    return not {vectors.file_of(vectors.WEIGHTS, part) for part in (None, 0)}.isdisjoint(member.digests)


def show(exporter: Exporter, what: str, out: Path) -> None:
    """Export, and let the model say something."""
    torch.set_num_threads(exporter.config.threads)
    with saying("the model is tested and exported", say):
        best, beside = exporter.best_tested() if what == "average" else ("", {})
        tested = exporter.export(what, out)
    say(f"Exported ({what}): {out}", f"{exporter.told_on}: {metrics_text(tested)}", sep="\n")
    if best:
        say(f"The best member, {best}, on the same text: {metrics_text(beside)}")
    if parts := exporter.by_source():
        say(f"The exported model's loss by source: {', '.join(parts)}")
    with contextlib.suppress(faults.Fault):
        if loss_picture.picture(exporter.history):
            root = address(exporter.store.root)
            say(f"Every member's metrics: {root}/{TABLE}\nThe loss over the rounds: {root}/{loss_picture.PICTURE}")
    say(lm_eval_command.hint(out))
    say("Held-out text, and after | how the model goes on:", *samples(exporter), sep="\n")


def samples(exporter: Exporter) -> list[str]:
    """Of each source, of some where there are many."""
    files = zip(exporter.config.datasets, exporter.token_files(exporter.unseen), strict=True)
    there = [(source.source, file.values) for source, file in files if len(file.values)][:_SAMPLED]
    return [f"{f'{name}: ' if len(there) > 1 else ''}{sample(exporter, unseen)}" for name, unseen in there]


def sample(exporter: Exporter, unseen: Any) -> str:
    """How a text begins that it has never seen, and after a mark what it makes of it; without the empty lines."""
    model, tokenizer = exporter.model.eval(), exporter.tokenizer()
    torch.manual_seed(exporter.config.seed)
    most = getattr(model.config, "max_position_embeddings", None) or _PROMPT + _SAMPLE
    given = torch.tensor(unseen[: min(_PROMPT, most - 1)].astype("int64"))[None]
    count = max(1, min(_SAMPLE, most - given.shape[1]))
    more = {"do_sample": True, "top_k": 20, "temperature": 0.8, "use_cache": True}
    said = cast(Any, model).generate(given, max_new_tokens=count, **more)
    parts = said[0].split([given.shape[1], said.shape[1] - given.shape[1]])
    text = "|".join(str(tokenizer.decode(part, skip_special_tokens=True)) for part in parts)
    return "\n".join(line for line in text.splitlines() if line.strip())
