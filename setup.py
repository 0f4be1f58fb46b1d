"""What only a build knows, beside pyproject.toml: the commit that is installed, and the configurations of the clone,
which become presets."""

import shutil
import sys
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # a build starts elsewhere, and has none of the packages that ours need

from fleet.our_packages import PRESETS, presets_in  # noqa: E402
from fleet.version import NOTED, commit  # noqa: E402


def note_commit(folder: Path) -> None:
    if found := commit(ROOT):
        (folder / NOTED).write_text(found + "\n", encoding="utf-8")


class BuildPackages(build_py):
    def run(self) -> None:
        made = Path(self.build_lib)
        if not self.editable_mode:  # what an earlier build has left is not installed again
            shutil.rmtree(made, ignore_errors=True)
        super().run()
        if not self.editable_mode:  # or it is a clone, which has both
            note_commit(made)
            (made / PRESETS).mkdir()
            for file in presets_in(ROOT):
                shutil.copyfile(file, made / PRESETS / file.name)


class SourceArchive(sdist):
    def make_release_tree(self, base_dir: str, files: Any) -> None:
        super().make_release_tree(base_dir, files)
        note_commit(Path(base_dir))


setup(cmdclass={"build_py": BuildPackages, "sdist": SourceArchive})
