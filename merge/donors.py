"""Models to merge, wherever they lie: opened by their references."""

import fnmatch
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from fleet.errors import Lacking
from merge.donor import Donor, read_config
from merge.files import UserError
from merge.lora import adapted
from merge.names import stacks
from merge.weights import tensors_in

_BESIDE = ("*.json", "*.model", "*.txt", "*.jinja")
_WEIGHTS = (("model*.safetensors", "adapter_model*.safetensors"), ("pytorch_model*.bin", "adapter_model*.bin"))


class Donors:
    """Opens models by their references; closes their files at the end. Some references may be mere names of models
    that lie in other places."""

    def __init__(self, places: Mapping[str, Path | str] | None = None) -> None:
        self.places = dict(places or {})
        self.stack, self._open = ExitStack(), dict[str, Donor]()
        self.known: dict[Any, Any] = {}  # what was found out about these models, for whoever plans many merges

    def __enter__(self) -> "Donors":
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def __getitem__(self, reference: str) -> Donor:
        if reference not in self._open:
            self._open[reference] = self._opened(reference)
        return self._open[reference]

    def _opened(self, reference: str) -> Donor:
        model, adapter = _parts(str(self.places.get(reference, reference)))
        if model.endswith(".gguf"):
            from merge.gguf.reading import open_gguf

            donor = open_gguf(_path(model), self.stack)
        else:
            folder = located(model)
            donor = Donor(model, folder, read_config(folder), tensors_in(folder, self.stack))
        _check_whole(donor)
        if adapter:
            where = located(adapter)
            donor = adapted(donor, where, tensors_in(where, self.stack, "adapter_model"))
        return replace(donor, reference=reference)


def _parts(reference: str) -> tuple[str, str]:
    """A model and its adapter; a + may also be part of a path."""
    places = [n for n, sign in enumerate(reference) if sign == "+"]
    for place in reversed([*places, len(reference)]):
        if _path(reference[:place]).exists():
            return reference[:place], reference[place + 1 :]
    model, _, adapter = reference.partition("+")
    return model, adapter


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UserError(f"{text}: {error}") from None


def located(reference: str) -> Path:
    """The folder of a model: a local one, or one of the hub, which is fetched."""
    if (folder := _path(reference)).is_dir():
        return folder
    name, _, at = reference.partition("@")
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or folder.exists():
        raise Lacking(f"{reference}: not a folder with a model, a .gguf file, or a hub id")
    from huggingface_hub import list_repo_files, snapshot_download

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries; the error says enough
    try:
        there = list_repo_files(name, revision=at or None)
        safe = any(fnmatch.fnmatch(file, pattern) for file in there for pattern in _WEIGHTS[0])
        wanted = [*_BESIDE, *_WEIGHTS[0 if safe else 1]]
        return Path(snapshot_download(name, revision=at or None, allow_patterns=wanted))
    except Exception as error:  # whatever a hub and a network can come up with
        why = str(error).splitlines()[0][:200]
        raise UserError(f"{reference}: no such folder here, and the hub does not give it: {why}") from None


def _check_whole(donor: Donor) -> None:
    """Layers that the configuration promises and the files lack; where layers share weights there is just one."""
    promised, found = donor.layers, max((*map(len, stacks(donor.tensors).values()), 0))
    if promised is None:
        return
    for stack, numbers in stacks(donor.tensors).items():
        there = numbers & set(range(promised)) if promised < 1 << 20 else numbers
        if len(numbers) == found and 1 < len(there) < promised:
            raise UserError(f"{donor.folder}: {stack} has {len(there)} layers, its config.json says {promised}")
