"""Models to merge, wherever they lie: opened by their references, with PEFT adapters merged into them."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from fleet.errors import Lacking, from_home
from fleet.places import of_hub
from merge.adapters import adapted
from merge.donor import Donor, read_config, tensors_in
from merge.hub import fetched
from merge.tensor_files import UserError
from merge.tensor_names import stacks

T = TypeVar("T")


class Donors:
    """Opens models by their references; closes their files at the end. Some references may be mere names of models
    that lie in other places."""

    def __init__(self, places: Mapping[str, Path | str] | None = None) -> None:
        self.places = dict(places or {})
        self.stack, self._open = ExitStack(), dict[str, Donor]()
        self._known: dict[Any, Any] = {}

    def __enter__(self) -> "Donors":
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def __getitem__(self, reference: str) -> Donor:
        if reference not in self._open:
            self._open[reference] = self._opened(reference)
        return self._open[reference]

    def remembered(self, key: Any, find: Callable[[], T]) -> T:
        """What was found out about these models, for whoever plans many merges."""
        if key not in self._known:
            self._known[key] = find()
        found: T = self._known[key]
        return found

    def _opened(self, reference: str) -> Donor:
        model, adapter = parts_of(str(self.places.get(reference, reference)))
        if model.endswith(".gguf"):
            from merge.gguf.reading import open_gguf

            donor = open_gguf(from_home(model), self.stack)
        else:
            folder = located(model)
            donor = Donor(model, folder, read_config(folder), tensors_in(folder, self.stack))
        _check_whole(donor)
        if adapter:
            where = located(adapter)
            donor = adapted(donor, where, tensors_in(where, self.stack, "adapter_model"))
        return replace(donor, reference=reference)


def parts_of(reference: str) -> tuple[str, str]:
    """A model and its adapter; a + may also be part of a path."""
    places = [n for n, sign in enumerate(reference) if sign == "+"]
    for place in reversed([*places, len(reference)]):
        if from_home(reference[:place]).exists():
            return reference[:place], reference[place + 1 :]
    model, _, adapter = reference.partition("+")
    return model, adapter


def located(reference: str) -> Path:
    """The folder of a model: a local one, or one of the hub, which is fetched."""
    if (folder := from_home(reference)).is_dir():
        return folder
    name, _ = of_hub(reference)
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or folder.exists():
        raise Lacking(f"{reference}: not a folder with a model, a .gguf file, or a hub id")
    return fetched(reference)


def _check_whole(donor: Donor) -> None:
    """Layers that the configuration promises and the files lack; where layers share weights there is just one."""
    promised, found = donor.layers, max((*map(len, stacks(donor.tensors).values()), 0))
    if promised is None:
        return
    for stack, numbers in stacks(donor.tensors).items():
        there = numbers & set(range(promised)) if promised < 1 << 20 else numbers
        if len(numbers) == found and 1 < len(there) < promised:
            raise UserError(f"{donor.folder}: {stack} has {len(there)} layers, its config.json says {promised}")
