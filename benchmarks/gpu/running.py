"""Steps one after the other, each a process of its own: what one of them breaks, or how long it hangs, is not another's
trouble. What it has measured by then is kept."""

import json
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any

from fleet.version import code

ROOT = Path(__file__).parents[2]
ROW = "ROW "  # how a line begins that is a result
_LEAST = 10.0  # seconds that are worth to begin with
Row = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """What it is called, what it tells, and the most seconds that it may take."""

    name: str
    about: str
    most: float


def say_row(**row: Any) -> None:
    """One result, at once: nobody knows how much time is left."""
    print(ROW + json.dumps(row), flush=True)


class Session:
    def __init__(self, folder: Path, seconds: float, dry: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.dry, self.until = folder, dry, time.monotonic() + seconds
        self._file = folder / "gpu.json"
        here = machine()
        known = json.loads(self._file.read_text()) if self._file.exists() else {}
        self.known: dict[str, Any] = known if known.get("machine") == here else {"machine": here, "steps": {}}

    def all(self, steps: list[Step]) -> int:
        """How many of them did not end well."""
        for step in steps:
            if self.known["steps"].get(step.name, {}).get("state") == "done":
                print(f"{step.name}: there already", flush=True)
                continue
            self._keep(step, self._made(step))
        bad = [each.name for each in steps if self.known["steps"][each.name]["state"] != "done"]
        print(f"\n{self._file.with_suffix('.md')}", *(f"{each}: not done" for each in bad), sep="\n")
        return min(len(bad), 100)

    def _made(self, step: Step) -> Row:
        left = self.until - time.monotonic()
        if left < _LEAST:
            return {"state": "not reached", "rows": [], "seconds": 0.0, "why": "the same command again makes it"}
        print(f"{step.name}: {step.about}", flush=True)
        rows, began, end = list[Row](), time.monotonic(), min(left, step.most * (3 if self.dry else 1))
        words = [sys.executable, "-m", "benchmarks.gpu", "--step", step.name, *(["--dry-run"] if self.dry else [])]
        with open(self._log(step), "wb") as log:
            process = subprocess.Popen(
                words, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )
            timer = Timer(end, _kill, [process])
            timer.start()
            assert process.stdout
            for line in process.stdout:
                if line.startswith(ROW):
                    rows.append(json.loads(line.removeprefix(ROW)))
                    print(f"  {_line(rows[-1])}", flush=True)
            code = process.wait()
            cut = time.monotonic() - began >= end
            timer.cancel()
            _kill(process)  # what it has left behind goes with it
        state = "cut off" if cut else "failed" if code else "done"
        why = f"after {end:.0f} s" if cut else f"code {code}: {self._last(step)}" if code else ""
        return {"state": state, "rows": rows, "seconds": round(time.monotonic() - began, 1), "why": why}

    def _log(self, step: Step) -> Path:
        return self.folder / f"{step.name.replace(' ', '-')}.log"

    def _last(self, step: Step) -> str:
        lines = self._log(step).read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "it said nothing"

    def _keep(self, step: Step, found: Row) -> None:
        """Whole, or as it was before."""
        self.known["steps"][step.name] = {"about": step.about, **found}
        for file, text in ((self._file, json.dumps(self.known, indent=1)), (self.folder / "gpu.md", page(self.known))):
            draft = file.with_suffix(".draft")
            draft.write_text(text + "\n")
            os.replace(draft, file)
        if found["why"]:
            print(f"  {found['state']}: {found['why']}", flush=True)


def _kill(process: "subprocess.Popen[str]") -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)  # it leads a group of its own
    except ProcessLookupError:
        pass


def machine() -> Row:
    """Results are of one machine, one torch and one state of the code."""
    import torch

    gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    said = {"gpus": gpus, "torch": torch.__version__, "cuda": torch.version.cuda or "", "code": code()}
    return {**said, "python": platform.python_version(), "processors": os.cpu_count()}


# -- for people --------------------------------------------------------------------------------------------------------


def page(known: Row) -> str:
    """gpu.md: a table for each step."""
    here = known["machine"]
    about = ", ".join(f"{key} {value}" for key, value in here.items() if key != "gpus")
    lines = ["# On a GPU", "", f"{', '.join(here['gpus']) or 'no GPU: a dry run'}; {about}."]
    for name, step in known["steps"].items():
        state = step["state"] if not step["why"] else f"{step['state']}, {step['why']}"
        lines += ["", f"## {name[0].upper()}{name[1:]}", "", f"{step['about']} ({state}; {step['seconds']:.0f} s)", ""]
        columns = list(dict.fromkeys(key for row in step["rows"] for key in row))
        if columns:
            lines += [_cells(columns), _cells(["---"] * len(columns))]
            lines += [_cells([_shown(row.get(column, "")) for column in columns]) for row in step["rows"]]
    return "\n".join(lines)


def _cells(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _line(row: Row) -> str:
    return ", ".join(f"{key} {_shown(value)}" for key, value in row.items())


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value).replace("|", "/").replace("\n", " ")
