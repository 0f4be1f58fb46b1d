"""The project's code as one file, named by its hash: all workers of a launch run exactly this."""

import base64
import contextlib
import hashlib
import io
import re
import subprocess
import tarfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from fleet import faults, our_packages
from fleet.run_config import UserError
from fleet.store import Store

FOLDER = "code"
_MOST = 64 << 20
# of files, where git does not say which of them belong to the code
_KINDS = {".py", ".css", ".js", ".jinja", ".json", ".yml", ".yaml", ".toml", ".txt", ".md", ".cfg"}


@dataclass(frozen=True)
class Code:
    digest: str
    data: bytes
    requirements: dict[str, str]  # package: version, as requirements.txt pins them

    @property
    def text(self) -> str:
        return base64.b64encode(self.data).decode()

    @property
    def name(self) -> str:
        return f"{FOLDER}/{self.digest}.tar"


def pack(root: Path, without: Collection[Path] = ()) -> Code:
    """The same files give the same bytes, whoever packs them and when. What is only the launcher's stays here."""
    apart = {path.resolve() for path in without}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name in [name for name in _files(root) if (root / name).resolve() not in apart]:
            data = (root / name).read_bytes()
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    data = packed.getvalue()
    if len(data) > _MOST:
        raise UserError(
            f"{root}: {len(data) >> 20} MB of code; more than {_MOST >> 20} MB: keep data out of the project"
        )
    return Code(hashlib.sha256(data).hexdigest(), data, requirements(root))


def requirements(root: Path) -> dict[str, str]:
    try:
        lines = (root / "requirements.txt").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = our_packages.pins() if root.resolve() == our_packages.ROOT else []
    found = [re.match(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?==(\S+)", line) for line in lines]
    return {each[1]: each[2] for each in found if each}


def keep(store: Store, code: Code) -> None:
    """Put it on the run's disk, once. Its name says what must be in it, so whoever writes it writes the same."""
    store.folder(FOLDER)
    with contextlib.suppress(faults.Fault):
        if hashlib.sha256(b"".join(store.blocks(code.name))).hexdigest() == code.digest:
            return
    try:
        store.replace(code.name, code.data)
    except faults.Full as error:
        raise UserError(f"no room for the code on the shared disk: {error}") from None
    store.sync(FOLDER)


def _listed(root: Path, *words: str) -> list[str]:
    """Files that git knows of; none where there is no git, or nothing of it."""
    try:
        done = subprocess.run(["git", "-C", str(root), "ls-files", "-z", *words], capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [name for name in done.stdout.decode(errors="surrogateescape").split("\0") if name]


def _files(root: Path) -> list[str]:
    """What git tracks, as it lies there now, and Python that it does not know yet; of this project, if it is no clone,
    what was installed; elsewhere all that looks like a part of a project."""
    if not root.is_dir():
        raise UserError(f"LOCAL_PACKAGE {root}: no such folder")
    installed = root.resolve() == our_packages.ROOT and not our_packages.in_clone()
    names = our_packages.files() if installed else _listed(root, "--cached", "--", ".")
    if names and not installed:
        names = sorted({*names, *_listed(root, "--others", "--exclude-standard", "--", "*.py")})
    elif not names:
        names = [str(file.relative_to(root)) for file in root.rglob("*") if file.suffix in _KINDS]
        names = [name for name in names if not any(part.startswith(".") for part in Path(name).parts)]
        runs = [str(file.parent.relative_to(root)) + "/" for file in root.rglob("run.json")]
        names = [name for name in names if not name.startswith(tuple(runs))]
    files = sorted(name for name in names if (root / name).is_file() and not (root / name).is_symlink())
    if not files:
        raise UserError(f"{root}: no code there")
    return files
