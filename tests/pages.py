"""The documentation's pages taken apart, and a place where their examples are run, with smaller sizes."""

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copyfile

from tests.helpers import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMED = re.compile(r"# (\S+\.(?:py|yaml))\n")  # the first line of a block that is a file
SMALL = {
    "POPULATION_SIZE": 2, "MAX_GENERATIONS": 2, "INNER_STEPS": 2, "FIRST_INNER_STEPS": 1000, "EVAL_SEQUENCES": 4,
    "TEST_SEQUENCES": 4,
    "VOCAB_SIZE": 300, "SEQ_LENGTH": 16, "BATCH_SIZE": 2, "INITIAL_POPULATION": ["tiny"],
}  # fmt: skip


@dataclass(frozen=True)
class Block:
    page: str
    section: str
    kind: str
    text: str
    line: int

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    text, section = page.read_text(), ""
    for found in re.finditer(r"^## ([^\n]*)$|^ *```(\w*)\n(.*?)^ *```$", text, re.M | re.S):
        if found[1]:
            section = found[1]
        else:
            yield Block(page.name, section, found[2], found[3], text[: found.start()].count("\n") + 1)


ALL = [block for page in PAGES for block in blocks(page)]


def of(page: str, *sections: str) -> list[Block]:
    """The blocks of these sections, in this order; what stands before the first section is in one without a name."""
    return [block for section in sections for block in ALL if (block.page, block.section) == (page, section)]


def commands(text: str) -> list[str]:
    """Of a block of shell, without comments, each on a line."""
    lines = text.replace("\\\n", " ").splitlines()
    cleaned = (" ".join(re.sub(r"(^|\s)#.*", "", line).split()) for line in lines)
    return [line for line in cleaned if line]


def same(shown: str, said: str) -> bool:
    """A line that a page shows; `...` stands for anything, and each number for any other one."""
    parts = (re.sub(r"\d+", r"\\d+", re.escape(part)) for part in shown.strip().split("..."))
    return bool(re.fullmatch(".*".join(parts), said.strip()))


@dataclass
class World:
    """A copy of the project that one may change, and the shared disk of the pages, /mnt/shared."""

    place: Path
    shared: Path
    env: dict[str, str] = field(default_factory=dict)
    edits: dict[str, str] = field(default_factory=dict)  # what a block says, and what is given instead
    said: str = ""
    done: list[Block] = field(default_factory=list)
    used: set[str] = field(default_factory=set)  # edits that applied

    @property
    def root(self) -> Path:
        return self.place / "project"

    def make(self) -> "World":
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                copyfile(ROOT / name, self.root / name)
        self._environment()
        self.shared.mkdir(exist_ok=True)
        self.env = {
            **os.environ, "PATH": f"{self.root / '.venv/bin'}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1",
            "XDG_STATE_HOME": str(self.place / "state"), "GIT_CEILING_DIRECTORIES": str(self.place),
            "PYTHONUNBUFFERED": "1", "COLUMNS": "150", **self.env,
        }  # fmt: skip
        return self

    def _environment(self) -> None:
        """A real one, which `make` finds ready: it sees the packages of the one that runs the tests."""
        folder = self.root / ".venv"
        venv.create(folder, symlinks=True)
        there = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        packages = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        (there / "tests.pth").write_text("\n".join(packages))
        (folder / ".run").touch()

    # -- blocks -------------------------------------------------------------------------------------------------------

    def do(self, block: Block, file: str = "", **smaller: object) -> str:
        """Run it, write it, apply it or compare it, whatever it is; what it says."""
        self.done.append(block)
        text = self.edited(block.text)
        if block.kind == "text":
            return self._shown(block)
        if block.kind == "json":
            value = json.loads(text)
            value = {**value, **SMALL, **smaller} if isinstance(value, dict) else value
            return self.write(file, json.dumps(value))
        if block.kind == "diff":
            return self.sh(f"git apply - <<'END'\n{text}END")
        if named := NAMED.match(text):
            return self.write(named[1], text)
        if block.kind == "yaml":
            return self.write(file, text)
        return self.python(text) if block.kind == "python" else self.sh(text)

    def edited(self, text: str) -> str:
        for old, new in {"/mnt/shared": str(self.shared), **self.edits}.items():
            if old in text:
                self.used.add(old)
                text = text.replace(old, new)
        return text

    def write(self, file: str, text: str) -> str:
        assert file, f"a block needs a name as a file:\n{text}"
        (self.root / file).parent.mkdir(parents=True, exist_ok=True)
        (self.root / file).write_text(text)
        return ""

    def sh(self, script: str, code: int = 0, before: Sequence[str] = ()) -> str:
        return self.run([*before, "bash", "-e", "-c", script], code)

    def python(self, program: str) -> str:
        self.write("example.py", program)
        return self.run(["python", "example.py"])

    def run(self, command: Sequence[str], code: int = 0) -> str:
        done = subprocess.run(
            command, cwd=self.root, env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=300, errors="replace",
        )  # fmt: skip
        assert done.returncode == code, f"{shlex.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}"
        self.said += done.stdout
        return done.stdout

    def _shown(self, block: Block) -> str:
        lines = self.said.splitlines()
        for shown in self.edited(block.text).splitlines():
            assert any(same(shown, line) for line in lines), f"{block}: nobody said {shown!r}, but:\n{self.said}"
        return ""

    def configure(self, file: str = "evolution.json", **keys: object) -> None:
        """A small form of a configuration that lies there."""
        known: Mapping[str, object] = json.loads((self.root / file).read_text())
        self.write(file, json.dumps({**known, **SMALL, **keys}))
