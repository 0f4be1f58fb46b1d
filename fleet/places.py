"""Where a run is: a folder, or a place in a bucket, as `s3://bucket/runs/edt`. Both are paths to the rest of the
project; of an address a path keeps one slash less, which `address` puts back."""

import os
from pathlib import Path

from fleet.errors import absolute

_SCHEMES = ("s3:", "gs:", "az:")


def in_bucket(place: Path) -> bool:
    return bool(place.parts) and place.parts[0] in _SCHEMES


def address(place: Path) -> str:
    """As people write it, and as a bucket's client wants it."""
    return f"{place.parts[0]}//{'/'.join(place.parts[1:])}" if in_bucket(place) else str(place)


def beside(place: Path) -> Path:
    """Where on this machine goes what a run comes to: into its folder; of a bucket's, into one of that name."""
    return Path.cwd() / place.name if in_bucket(place) else place


def here(place: Path, where: Path = Path()) -> Path:
    """What was written in a file of that folder, as this machine finds it."""
    return place if in_bucket(place) else absolute(where / place)


def on_hub(name: str) -> bool:
    """It can be the name of something on the hub that is somebody's, as a card may link it."""
    return name.count("/") == 1 and not name.startswith((".", "~", "/"))


def of_hub(name: str) -> tuple[str, str | None]:
    """A model's id on the hub and its revision, of `org/name@revision`; whatever lies here is what it is called."""
    id, _, revision = name.partition("@")
    return (name, None) if os.path.exists(name) else (id, revision or None)
