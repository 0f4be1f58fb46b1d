"""Starting a tournament, here or on other machines; and what stands behind the API's simple names."""

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from evomerge.config import BUILTIN, Configuration, ModelReference, TournamentConfig
from evomerge.tournament_method import ALGORITHM
from fleet import gpus
from fleet.config import Name, UserError, validated, whole
from fleet.errors import absolute
from fleet.local import Starter
from fleet.metrics import sinks
from fleet.plain import say
from merge.donors import located


def specialists_at(beside: Path | None = None) -> Path:
    """Where the default models are kept; for other machines, beside the run that they work on."""
    if beside:
        return beside / "specialists"
    home = os.environ.get("EVOMERGE_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "evomerge"
    return Path(home).expanduser()


def resolved(models: Sequence[ModelReference], beside: Path | None = None) -> list[ModelReference]:
    """Default models are trained if nobody has; local paths become whole ones."""
    made: Mapping[str, Path] = {}
    for model in models:
        if not model.builtin and not model.path.endswith(".gguf"):
            located(model.path)  # what is not there is said before anything is trained
    if any(model.builtin for model in models):
        from evomerge import specialists

        if beside and (known := specialists.home_in(specialists_at())).is_dir():
            shutil.copytree(known, specialists.home_in(specialists_at(beside)), dirs_exist_ok=True)
        made = specialists.made(specialists_at(beside), tell=_say)
    return [ModelReference(model.name, _whole(model, made)) for model in models]


def _say(line: str) -> None:
    say(line, file=sys.stderr)


def _whole(model: ModelReference, made: Mapping[str, Path]) -> str:
    if model.builtin:
        if model.builtin not in made:
            raise UserError(
                f"there is no default model {model.path!r}; there are {', '.join(BUILTIN + each for each in made)}"
            )
        return str(made[model.builtin])
    return whole(model.path, Path())


def prepared(config: Configuration) -> TournamentConfig:
    """Whatever cannot work is said before anything is begun."""
    from evomerge import fitness_evaluator
    from evomerge.model_checks import check_alike, check_causal
    from train import tasks

    where = absolute(Path(config.out))
    sinks.check(config.metrics)
    _check_folder(where)
    if config.machines and not Path(config.machines).is_file():
        raise UserError(f"{config.machines}: cannot be read")
    if config.machines and config.workers:
        raise UserError("workers: machines.json says how many each machine has")
    if config.ssh_config and not config.machines:
        raise UserError("ssh_config: it is for machines")
    m, e = config.merge_settings.model_copy(deep=True), config.evaluation_settings.model_copy(deep=True)
    base = [config.base] if config.base else []
    models = resolved([*config.models, *base], where.parent if config.machines else None)
    check_alike(models)
    check_causal(models, m.trust_remote_code)
    m.base_model = models.pop() if base else None
    if m.base_model and m.base_model.path in [model.path for model in models]:
        raise UserError(f"base_model {m.base_model.name} is one of the models: its change of itself is nothing")
    for task in fitness_evaluator.load_tasks(e, config.evolution_settings.seed).get("tasks", {}).values():
        tasks.validation_count(task.config.task, len(task.eval_docs), e.holdout)
    if e.text:
        e.text = str(absolute(Path(e.text)))
    e.task_path = [str(absolute(Path(folder))) for folder in e.task_path]
    return TournamentConfig(
        algorithm=ALGORITHM,
        project_name=where.name,
        base_dir=str(where.parent),
        models=tuple(models),
        merge_settings=m,
        evolution_settings=config.evolution_settings.model_copy(deep=True),
        evaluation_settings=e,
        text_digest=fitness_evaluator.digest(e),
        threads=config.threads,
        metrics=config.metrics,
        wandb_project=config.wandb_project,
        wandb_entity=config.wandb_entity,
        log_level=config.log_level,
    )


class _Named(BaseModel):
    out: Name


def _check_folder(where: Path) -> None:
    validated(_Named, {"out": where.name}, str(where), spelled=lambda key: "the folder's name")
    if where.is_file():
        raise UserError(f"{where}: a folder is expected")
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{where}: cannot be made: {error.strerror}") from None


class Hosted(Starter):
    """Workers of evomerge.cli, whatever script it is that starts them."""

    def script(self) -> list[str]:
        return [sys.executable, str(Path(__file__).with_name("cli.py"))]


def run(config: Configuration) -> int:
    """The whole tournament, or the rest of it; how it ended."""
    from evomerge.tournament_view import TournamentView

    chosen = prepared(config)
    if config.machines:
        from fleet.remote.handed import hand_over

        ssh = Path(config.ssh_config) if config.ssh_config else None
        script = ("-m", "evomerge.cli")
        return hand_over(chosen, script, Path(config.machines), ssh)
    count = gpus.workers(config.workers or None, None, config.threads)
    return Hosted(chosen, Path(chosen.base_dir), count, TournamentView).run()


def evaluated(model: ModelReference, config: Configuration) -> dict[str, Any]:
    """One model's marks, on what chooses."""
    from evomerge.formula import Formula
    from evomerge.formula_evaluator import alone
    from evomerge.model_checks import check_causal

    (there,) = resolved([model])
    check_causal([there], config.merge_settings.trust_remote_code)
    found = dict(alone(config, {there.name: there.path}).scored(Formula(blend=there.name), "choosing"))
    return {**found, "objectives": json.loads(found["objectives"])}
