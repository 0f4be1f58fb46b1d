"""Installed by pip, without the clone beside it: the commands, what they are called, and a run from an empty folder."""

import json
import os
import re
import subprocess
import sysconfig
import tarfile
import tomllib
import venv
from dataclasses import dataclass
from importlib.metadata import Distribution
from io import BytesIO
from pathlib import Path
from shutil import copyfile

import pytest

from fleet.digest import digest
from fleet.history import opened
from fleet.host import Host
from fleet.our_packages import COMMANDS, SCRIPTS
from fleet.remote.code import pack
from fleet.results_version import code_hash
from fleet.run import open_run
from tests.helpers import ROOT
from tests.small import KEYS, shared

EXTRAS = ("ray", "hivemind", "metrics", "posttrain", "rl", "bucket", "dev")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@dataclass(frozen=True)
class Installed:
    """A fresh environment that has this project, and sees the packages of the one that tests."""

    venv: Path
    commit: str

    @property
    def packages(self) -> Path:
        (found,) = self.venv.glob("lib/python3*/site-packages")
        return found

    def run(self, here: Path, *words: str, code: int = 0, **env: str) -> str:
        command = [str(self.venv / "bin" / words[0]), *words[1:]]
        clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        told = {**clean, "COLUMNS": "120", "XDG_STATE_HOME": str(here), **env}
        done = subprocess.run(command, cwd=here, env=told, capture_output=True, text=True)
        assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Of a clone that is gone once it is installed; offline."""
    place = tmp_path_factory.mktemp("install")
    clone, there = place / "clone", Installed(place / "venv", "")
    for name in filter(None, git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")):
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            copyfile(ROOT / name, clone / name)
    git(clone, "init", "-q")
    git(clone, "add", "-A")
    git(clone, "commit", "-qm", "all of it")
    venv.create(there.venv, symlinks=True)
    (there.packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    there.run(
        place, "python", "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-build-isolation", "./clone"
    )
    commit = git(clone, "rev-parse", "HEAD").strip()
    clone.rename(place / "gone")
    return Installed(there.venv, commit)


def git(place: Path, *words: str) -> str:
    known = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(["git", *known, *words], cwd=place, check=True, capture_output=True, text=True).stdout


# -- what is installed -------------------------------------------------------------------------------------------------


def test_the_same_versions_are_asked_for_as_in_the_requirements_files(installed):
    lines = Distribution.at(next(installed.packages.glob("edt-*.dist-info"))).requires or []
    asked = {extra: [] for extra in ("", *EXTRAS)}
    for line in lines:
        package, _, extra = line.partition("; extra == ")
        asked[extra.strip("\"'")].append(package)
    for extra, packages in asked.items():
        file = ROOT / f"requirements{'-' * bool(extra)}{extra}.txt"
        assert packages == file.read_text().split(), file.name


def test_all_that_the_packages_hold_is_installed(installed):
    def own(names):
        return {name for name in names if name.split("/")[0] in {"fleet", "merge", "train", "evomerge"}}

    made = {"fleet/commit.txt", *(f"fleet/preset_files/{file.name}" for file in (ROOT / "configs").glob("*.json"))}
    there = {str(file.relative_to(installed.packages)) for file in installed.packages.rglob("*") if file.is_file()}
    wanted = own(tarfile.open(fileobj=BytesIO(pack(ROOT).data)).getnames())
    assert own(name for name in there if not name.endswith(".pyc")) == wanted | made
    assert code_hash(installed.packages) == code_hash(ROOT), "whoever joins a run of a clone may be installed"
    assert PROJECT["tool"]["setuptools"]["py-modules"] == [*SCRIPTS]


def test_commands_are_called_alike_wherever_they_are_named():
    scripts = {
        name: said.partition(":")[0].removesuffix(".__main__") for name, said in PROJECT["project"]["scripts"].items()
    }
    assert scripts == {command: module for module, command in COMMANDS.items()}
    assert all(command == module.replace(".", "-").replace("_", "-") for module, command in COMMANDS.items()
               if module not in ("merge", "evomerge.cli"))  # fmt: skip


@pytest.mark.parametrize("command", sorted(COMMANDS.values()))
def test_help_is_there_at_once(installed, tmp_path, command):
    """Without what takes seconds to load, and with so few modules that they take a second of a processor at most."""
    said = installed.run(tmp_path, command, "--help", PYTHONPROFILEIMPORTTIME="1")
    assert re.search(rf"^Usage: {command} ", said, re.M) and "--version" in said
    loaded = re.findall(r"^import time: .*\| +(\S+)$", said, re.M)
    assert "cyclopts" in loaded and not {"torch", "transformers"} & {*loaded} and len(loaded) < 800


def test_the_version_has_the_commit(installed, tmp_path):
    for command in ("edt", "fleet-status", "train-export"):
        assert (
            installed.run(tmp_path, command, "--version")
            == f"edt {PROJECT['project']['version']}, commit {installed.commit}\n"
        )


# -- what it does ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def begun(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run, from a folder where nothing else is but modules that somebody called as we call ours."""
    here = tmp_path_factory.mktemp("empty")
    for name in ("train", "merge", "fleet", "edt"):
        (here / f"{name}.py").write_text("raise SystemExit('mine')\n")
    data = {"tokenizer": str(shared() / "tokenizer"), "datasets": [{"source": str(shared() / "text.jsonl")}]}
    (here / "evolution.json").write_text(json.dumps({**KEYS, **data}))
    said = installed.run(here, "edt", "--workers", "2")
    assert "The run is over after 3 rounds" in said and "Exported (average)" in said
    return here


@pytest.mark.slow
def test_a_run_is_made_and_looked_at(installed, begun):
    assert open_run(begun / "runs/edt", Host(), "test")[1]["code"] == f"commit {installed.commit}"
    assert "over" in installed.run(begun, "fleet-status", "runs/edt")
    assert "Exported (best)" in installed.run(begun, "train-export", "runs/edt", "--what", "best", "--out", "best")
    assert (begun / "best/model.safetensors").is_file()
    assert "commands of" not in installed.run(begun, "fleet-report", "runs/edt", "--out", "page.html")
    more = ("--set", "MAX_GENERATIONS=4", "--name", "longer")
    assert f"edt --config {begun / 'longer.json'}" in installed.run(begun, "fleet-fork", "runs/edt", *more)


@pytest.mark.slow
def test_models_are_merged(installed, begun):
    (begun / "recipe.yml").write_text(
        "merge_method: linear\nmodels: [{model: runs/edt/export, parameters: {weight: 1}}]\n"
    )
    assert "written" in installed.run(begun, "merge-models", "recipe.yml", "merged")
    assert (begun / "merged/model.safetensors").is_file()


@pytest.mark.slow
def test_a_preset_begins_in_this_folder(installed, tmp_path):
    *_, said = installed.run(tmp_path, "edt", "--preset", "tiny", "--make").splitlines()  # after what it counts
    assert json.loads(said)["folder"] == str(tmp_path / "runs/tiny") and (tmp_path / "runs/tiny/run.json").is_file()
    there_are = ", ".join(sorted(file.stem for file in (ROOT / "configs").glob("*.json")))
    assert f"there are {there_are}\n" in installed.run(tmp_path, "edt", "--preset", "x", code=2)
    assert "one of them" in installed.run(tmp_path, "edt", "--preset", "tiny", "--config", "x.json", code=2)
    assert "--preset one of 14m" in installed.run(tmp_path, "diloco", code=2)
    values = json.loads(installed.run(tmp_path, "python", "-m", "fleet.presets", "150m"))
    assert values == json.loads((ROOT / "configs/150m.json").read_text()) | {"BASE_DIR": "runs"}


PACKED = """
import sys
from pathlib import Path
from fleet.our_packages import ROOT
from fleet.remote.code import pack

code = pack(ROOT)
Path(sys.argv[1]).write_bytes(code.data)
print(code.digest, dict(code.requirements) == pack(Path(sys.argv[2])).requirements)
"""


@pytest.mark.slow
def test_other_machines_get_what_is_installed(installed, begun, tmp_path):
    """The same files wherever they are packed; a run of theirs has the same bytes."""
    program = tmp_path / "pack.py"
    program.write_text(PACKED)
    said = [
        installed.run(tmp_path, "python", "pack.py", str(tmp_path / name), str(ROOT)) for name in ("a.tar", "b.tar")
    ]
    assert said[0] == said[1] and said[0].endswith(" True\n")
    with tarfile.open(tmp_path / "a.tar") as tar:
        assert {name.split("/")[0] for name in tar.getnames()} >= {"edt.py", "diloco.py", "fleet", "train"}
        assert not any("torch" in name.split("/")[0] or name.endswith(".pyc") for name in tar.getnames())
        tar.extractall(tmp_path / "copy", filter="data")
    values = json.loads((begun / "evolution.json").read_text())
    (tmp_path / "evolution.json").write_text(json.dumps(values))
    python = tmp_path / "copy" / "edt.py"
    installed.run(tmp_path, "python", str(python), "--workers", "1")
    assert digest(opened(tmp_path / "runs/edt")) == digest(opened(begun / "runs/edt"))
