"""The options by which every command here is told its settings and its models."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from evomerge.config import Configuration, create_default_config, with_models


@Parameter(name="*")
@dataclass(frozen=True)
class SettingsFlags:
    config: Annotated[Path | None, Parameter(help="A JSON file with all settings; other options win over it.")] = None
    model1: Annotated[str, Parameter(help="A hub id, a link to a model's page there, a folder or a .gguf file.")] = ""
    model2: Annotated[str, Parameter(help="The second one.")] = ""
    model3: Annotated[str, Parameter(help="The third one; the default models fill the gaps.")] = ""

    def settings(self) -> Configuration:
        config = Configuration.load(self.config) if self.config else create_default_config()
        given = [self.model1, self.model2, self.model3]
        return with_models(config, given) if any(given) else config
