"""Bytes on the wire of an outer step between two Hivemind peers, for a compression: counted by the system, in a network
that holds nothing else. Part of benchmarks.train_fsdp.

python -m benchmarks.peers COMPRESSION FOLDER
"""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

COMPRESSIONS = ("none", "fp16", "scaled-fp16", "uniform8bit", "quantile8bit")
_FIRST, _LAST = 1, 4  # outer steps between which bytes are counted
_ROOT = Path(__file__).parent.parent
_PATIENCE = 300.0


def measured(compression: str, folder: Path, preset: str) -> dict[str, float]:
    """In a network namespace of its own; bytes of an outer step of both peers together, and the model's."""
    apart = ["unshare", "--net"] if os.getuid() == 0 else ["unshare", "--net", "--map-root-user"]
    words = [*apart, sys.executable, "-m", "benchmarks.peers", compression, str(folder), preset]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=_ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr else f"code {done.returncode}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def inside(compression: str, folder: Path, preset: str) -> dict[str, float]:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with (folder / "dht").open("w") as said:
        dht = [str(Path(sys.executable).with_name("hivemind-dht")), "--host_maddrs", "/ip4/127.0.0.1/tcp/0"]
        processes = [subprocess.Popen(dht, stdout=said, stderr=said)]
    try:
        where = waited(lambda: re.findall(r"/ip4/\S+/p2p/\w+", (folder / "dht").read_text()))[0]
        processes += [peer(number, where, compression, folder, preset) for number in range(2)]
        begin = waited(lambda: at_round(folder, _FIRST, processes))
        end = waited(lambda: at_round(folder, _LAST, processes))
        size = re.search(r"([\d,]+) numbers", (folder / "log0").read_text())
        assert size
        return {"bytes": (end - begin) / (_LAST - _FIRST), "model": 4 * int(size[1].replace(",", ""))}
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def peer(number: int, where: str, compression: str, folder: Path, preset: str) -> "subprocess.Popen[bytes]":
    keys = {
        "path-model": preset, "seq-length": 16, "total-batch-size": 1, "per-device-train-batch-size": 1,
        "precision": "32-true", "total-steps": 100, "warmup-steps": 1, "ckpt.path": folder / f"peer{number}",
        "hv.initial-peers": where, "hv.host-maddrs": "/ip4/127.0.0.1/tcp/0", "hv.galaxy-size": 2,
        "hv.world-rank": number, "hv.local-steps": 1, "hv.average-state-every": 0, "hv.matchmaking-time": 3,
        "hv.hivemind-compression": compression,
    }  # fmt: skip
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, str(_ROOT / "train" / "train_fsdp.py"), "--no-torch-compile", "--fake-data", *words]
    with (folder / f"log{number}").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def at_round(folder: Path, wanted: int, processes: "list[subprocess.Popen[bytes]]") -> int:
    """What has been sent once both have taken so many outer steps; 0: not yet."""
    if any(process.poll() is not None for process in processes):
        raise SystemExit((folder / "log0").read_text() + (folder / "log1").read_text())
    for number in range(2):
        file = folder / f"peer{number}" / "metrics.csv"
        rows = list(csv.DictReader(file.open())) if file.is_file() else []
        if not any(float(row.get("outer_round") or 0) >= wanted for row in rows):
            return 0
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[9])


def waited(condition):  # type: ignore[no-untyped-def]
    end = time.monotonic() + _PATIENCE
    while not (found := condition()):
        if time.monotonic() > end:
            raise SystemExit("the peers do not get on")
        time.sleep(0.02)
    return found


def why_not() -> str:
    """Why it cannot be measured here."""
    for command in ("unshare", "ip"):
        if not shutil.which(command):
            return f"{command} is not here"
    flags = [] if os.getuid() == 0 else ["--map-root-user"]
    tried = subprocess.run(["unshare", "--net", *flags, "true"], capture_output=True, text=True)
    return f"no network namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


if __name__ == "__main__":
    print(json.dumps(inside(sys.argv[1], Path(sys.argv[2]), sys.argv[3])))
