"""fsync: what was written is on the disk for good."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """A file's bytes; or a folder's names, which a rename has changed."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
