"""Pictures of the pages of real runs: `python -m tests.screenshots FOLDER [RUN_DIR ...]`; without runs, of toys."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.browser import CHROMIUM, FAULTS, Browser
from tests.helpers import ROOT, TOY

LOOKS = {"light-1600": (1600, False), "dark-1600": (1600, True), "light-400": (400, False), "dark-400": (400, True)}


def toy_runs(place: Path) -> list[Path]:
    """One of each kind, each made by two workers."""
    for kind in ("rank", "matching", "diloco", "search", "tournament"):
        keys = {"algorithm": kind, "project_name": kind, "population_size": 6, "max_generations": 10, "sleep": 0.1}
        file = place / f"{kind}.json"
        file.write_text(json.dumps({**keys, "base_dir": "runs", "cliff": 2.0}))
        subprocess.run([*TOY, "--config", str(file), "--workers", "2"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return sorted(file.parent for file in place.glob("runs/*/run.json"))


def pages(runs: list[Path], place: Path) -> list[Path]:
    report = [sys.executable, "-m", "fleet.report"]
    made = [place / f"{run.name}.html" for run in runs]
    for run, file in zip(runs, made, strict=True):
        subprocess.run([*report, str(run), "--out", str(file)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    if len(runs) > 1:
        made.append(place / "compared.html")
        names = [str(run) for run in runs[:8]]
        subprocess.run([*report, "compare", *names, "--out", str(made[-1])], cwd=ROOT, check=True)
    return made


def main(folder: Path, runs: list[Path]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place, Browser() as browser:
        for page in pages(runs or toy_runs(Path(place)), Path(place)):
            for look, (width, dark) in LOOKS.items():
                browser.open(f"file://{page}", width, dark=dark)
                high = min(8000, browser.say("document.documentElement.scrollHeight"))
                browser.open(f"file://{page}", width, high, dark)
                browser.picture(folder / f"{page.stem}-{look}.png")
                print(folder / f"{page.stem}-{look}.png", *browser.say(FAULTS), *browser.complaints)


if __name__ == "__main__":
    if not CHROMIUM:
        sys.exit("Chromium is needed, and is not here (apt install chromium)")
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), [Path(each) for each in sys.argv[2:]])
