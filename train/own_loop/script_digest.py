"""The user's code as a number: the script that runs, and those of its modules that lie beside it."""

import hashlib
import sys
from pathlib import Path

from fleet.errors import UserError

_ROOT = Path(__file__).resolve().parents[2]
_OURS = ("fleet", "merge", "train", "evomerge")


def script_digest() -> str:
    """Of every file that counts, by its name; nothing of a notebook or a prompt, which has no file."""
    if not (script := getattr(sys.modules["__main__"], "__file__", None)):
        return ""
    total, folder = hashlib.sha256(), Path(script).resolve().parent
    for name, file in sorted(_beside(folder, Path(script).resolve())):
        try:
            total.update(f"{name}\n{len(data := file.read_bytes())}\n".encode() + data)
        except OSError as error:
            raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    return total.hexdigest()[:16]


def _beside(folder: Path, script: Path) -> set[tuple[str, Path]]:
    found = {("", script)}
    for module in [*sys.modules.values()]:
        file = getattr(module, "__file__", None)
        if file and file.endswith(".py") and Path(file).is_absolute():
            path = Path(file).resolve()
            if path != script and path.is_relative_to(folder) and not _foreign(path):
                found.add((str(path.relative_to(folder)), path))
    return found


def _foreign(path: Path) -> bool:
    """Of this project, or of a library."""
    if path.is_relative_to(_ROOT):
        inner = path.relative_to(_ROOT).parts
        if len(inner) == 1 or inner[0] in _OURS:
            return True
    return "site-packages" in path.parts or path.is_relative_to(sys.prefix)
