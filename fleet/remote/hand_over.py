"""A run that another command has configured, handed to the launcher: workers on other machines, which go on when the
command ends."""

import json
import os
from pathlib import Path

from fleet.our_packages import ROOT, spoken
from fleet.plain import say
from fleet.remote.commands import main
from fleet.run_config import FleetConfig, UserError


def hand_over(config: FleetConfig, script: tuple[str, ...], machines: Path, ssh_config: Path | None) -> int:
    """Launch and watch; the configuration stays beside the run's folder, for the launcher's other commands."""
    base = Path(config.base_dir)
    file = base / f"{config.project_name}.{config.algorithm}.json"
    words = ["--config", str(file), "--machines", str(machines)]
    words += ["--ssh-config", str(ssh_config)] if ssh_config else []
    if not os.path.isfile(machines):
        raise UserError(f"{machines}: cannot be read")
    values = {key.upper(): value for key, value in config.model_dump(mode="json").items()}
    file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    try:
        main({config.algorithm: script}, ROOT, "", ["launch", *words])
    except SystemExit as end:
        code = int(end.code or 0)
    say(f"To look after it: {' '.join(spoken('launch_to_machines'))} status|logs|stop {' '.join(words)}")
    return code
