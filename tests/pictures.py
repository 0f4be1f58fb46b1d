"""The pictures of README and docs/post-training.md, of two real runs: `python -m tests.pictures`; some minutes."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.browser import CHROMIUM, Browser
from tests.helpers import ROOT
from tests.screenshots import pages

FOLDER, WIDTH = ROOT / "docs" / "pictures", 1100
SHOWN = {
    "evolution": ("summary", "fitness", "workers"),
    "posttrain": ("fitness", "family", "genome"),
}  # sections of their pages


def run(place: Path, config: Path) -> Path:
    file = place / config.name
    keys = {**json.loads(config.read_text()), "PROJECT_NAME": config.stem, "BASE_DIR": str(place)}
    file.write_text(json.dumps(keys))
    subprocess.run([sys.executable, "edt_sim.py", "--config", str(file)], cwd=ROOT, check=True)
    return place / config.stem


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place, Browser() as browser:
        runs = [run(Path(place), ROOT / name) for name in ("evolution.json", "configs/posttrain.json")]
        for page in pages(runs, Path(place))[:2]:
            for look in ("light", "dark"):
                browser.open(f"file://{page}", WIDTH, dark=look == "dark")
                hidden = [name for name in browser.say("[...document.querySelectorAll('section')].map((s) => s.id)")
                          if name not in SHOWN[page.stem]]  # fmt: skip
                browser.say(f"{json.dumps(hidden)}.forEach((id) => document.getElementById(id).remove())")
                browser.say("document.querySelectorAll('header .where, nav, details').forEach((e) => e.remove())")
                high = browser.say("document.documentElement.scrollHeight")
                browser(
                    "Emulation.setDeviceMetricsOverride", width=WIDTH, height=high, deviceScaleFactor=1, mobile=False
                )
                browser.picture(FOLDER / f"{page.stem}-{look}.png")


if __name__ == "__main__":
    if not CHROMIUM:
        sys.exit("Chromium is needed, and is not here (apt install chromium)")
    main()
