"""A model to merge: its configuration, and named tensors that are read row by row."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet.plausible import check_config
from merge.files import UserError, read_json
from merge.weights import Stored

LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


@dataclass(frozen=True)
class Donor:
    """A model: its folder, its config.json, its weights."""

    reference: str
    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Stored]

    @property
    def vocabulary_size(self) -> int:
        text = self.config.get("text_config")
        size = self.config.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else 0) or 0
        if type(size) is not int:
            raise UserError(f"{self.folder}/config.json: vocab_size is {str(size)[:60]!r}; a whole number is expected")
        return size

    @property
    def layers(self) -> int | None:
        """How many its configuration promises."""
        count = next((self.config[key] for key in LAYER_COUNTS if key in self.config), None)
        return count if type(count) is int else None


def read_config(folder: Path) -> dict[str, Any]:
    value = read_json(folder / "config.json")
    check_config(value, f"{folder}/config.json")
    if value.get("quantization_config") is not None:
        raise UserError(f"{folder}: its weights are quantized; merge the model that they were made of")
    return value
