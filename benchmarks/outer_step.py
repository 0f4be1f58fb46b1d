"""The exchange of one DiLoCo round for 2 to 32 replicas: bytes per worker, time beside copying the same bytes, memory.

python -m benchmarks.outer_step [--quick] [--place FOLDER]
"""

import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from cyclopts import App
from rich.console import Console

from benchmarks.figures import goal, table
from fleet.disk import Disk
from fleet.disk_store import DiskStore
from fleet.host import Host
from fleet.payload import Files, Payload, PayloadWriter
from fleet.store import FOLDERS
from merge.outer_step import OuterOptimizer, means, ranges
from merge.wire import pieces, received, send, sender

SIZE, QUICK_SIZE = 60_000_000, 6_000_000
REPLICAS = (2, 4, 8, 16, 32)
MB = 1e6
app = App(name="python -m benchmarks.outer_step", help=__doc__, version_flags=[])


class Exchange:
    """One round of so many replicas and as many shards, on the real payloads, by one process after the other."""

    def __init__(self, place: Path, size: int, replicas: int) -> None:
        for folder in FOLDERS:
            (place / folder).mkdir(parents=True)
        self.store = DiskStore(Disk(place), Host(), "w")
        self.size, self.replicas, self.cuts = size, replicas, ranges(size, replicas)
        self.vector = torch.randn(size, generator=torch.Generator().manual_seed(1))
        self.files: dict[str, Files] = {}
        self.shards = [self._first(s) for s in range(replicas)]
        self.changes: list[str] = []

    def run(self) -> None:
        """Every replica reads the global model and publishes its change; every shard takes the outer step."""
        for k in range(self.replicas):
            for s, shard in enumerate(self.shards):
                self._load(shard, "weights", self.vector[self.cuts[s].start : self.cuts[s].stop])
            cut = {f"change-{s}": self.vector[c.start : c.stop] for s, c in enumerate(self.cuts)}
            self._publish(f"replica-{k}", cut)
        self.new = [self.shard(s) for s in range(self.replicas)]

    def shard(self, s: int) -> str:
        count, name = len(self.cuts[s]), f"shard-{s}.new"
        writer, old = PayloadWriter(self.store, name), self._payload(self.shards[s])
        with contextlib.ExitStack() as stack:
            state = [received(stack.enter_context(old.open(n)), count) for n in ("weights", "momentum")]
            several = [self._payload(f"replica-{k}") for k in range(self.replicas)]
            changes = [received(stack.enter_context(each.open(f"change-{s}")), count) for each in several]
            both = [sender(stack.enter_context(writer.create(n)), count) for n in ("weights", "momentum")]
            for *before, change in zip(*state, means(changes), strict=True):
                for put, piece in zip(both, OuterOptimizer().step(before, change), strict=True):
                    put(piece)
        self.files[name] = writer.seal()
        return name

    def _first(self, s: int) -> str:
        piece = self.vector[self.cuts[s].start : self.cuts[s].stop]
        return self._publish(f"shard-{s}.old", {"weights": piece, "momentum": torch.zeros_like(piece)})

    def _publish(self, name: str, vectors: dict[str, torch.Tensor]) -> str:
        writer = PayloadWriter(self.store, name)
        for file, vector in vectors.items():
            with writer.create(file) as sink:
                send(sink, len(vector), pieces(vector))
        self.files[name] = writer.seal()
        return name

    def _load(self, name: str, file: str, into: torch.Tensor) -> None:
        begin = 0
        with self._payload(name).open(file) as source:
            for piece in received(source, len(into)):
                into[begin : begin + len(piece)] = piece
                begin += len(piece)

    def _payload(self, name: str) -> Payload:
        return Payload(self.store, name, self.files[name])


def copied(place: Path, made: list[str], read: int) -> float:
    """Seconds that cp and sync take for the files that the exchange wrote, and cat for what it read beyond that."""
    target, began = place / "copy", time.perf_counter()
    target.mkdir()
    subprocess.run(["cp", "-r", *(place / "run" / "files" / name for name in made), target], check=True)
    subprocess.run(["sync", "-f", target], check=True)
    seconds = time.perf_counter() - began
    files = [file for file in target.rglob("*") if file.is_file()]
    size, began = sum(file.stat().st_size for file in files), time.perf_counter()
    subprocess.run(["cat", *files], check=True, stdout=subprocess.DEVNULL)
    return seconds + max(0, read - size) / size * (time.perf_counter() - began)


@app.default
def main(quick: bool = False, place: Path | None = None, memory_of: int = 0) -> None:
    torch.set_num_threads(1)
    if memory_of:
        print(_memory(memory_of))
        return
    size, counts = (QUICK_SIZE, REPLICAS[:3]) if quick else (SIZE, REPLICAS)
    names = ("replicas", "MB read a worker", "MB written", "seconds in all", "cp + sync of as much", "ratio", "goal")
    title = f"One exchange of a model of {size / 1e6:.0f} million numbers"
    shown = table(title, *names, note="one process does it all")
    for count in counts:
        base = Path(tempfile.mkdtemp(dir=place))
        try:
            exchange = Exchange(base / "run", size, count)
            before, began = exchange.store.bytes_read, time.perf_counter()
            exchange.run()
            seconds = time.perf_counter() - began
            read = exchange.store.bytes_read - before
            made = [name for name in exchange.files if not name.endswith(".old")]
            written = sum(size for name in made for size, _ in exchange.files[name].values())
            plain = copied(base, made, read)
        finally:
            shutil.rmtree(base)
        ratio = seconds / plain
        shown.add_row(
            str(count), f"{read / count / MB:.0f}", f"{written / count / MB:.0f}", f"{seconds:.1f}", f"{plain:.1f}",
            f"{ratio:.2f}", goal(ratio <= 1.5, "at most 1.5"),
        )  # fmt: skip
    Console(width=150).print(shown)
    for each in (size // 4, size):
        command = [sys.executable, "-m", "benchmarks.outer_step", "--memory-of", str(each)]
        peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        words = goal(peak < 256 * MB, f"{peak / MB:.0f} MB above what was there before (goal: under 256)")
        Console(width=150).print(f"Peak memory of a shard of {each / 1e6:.0f} million numbers, 8 replicas: {words}")


def _memory(size: int) -> int:
    """Bytes that one shard needs beyond the interpreter's and torch's own."""
    with tempfile.TemporaryDirectory() as base:
        exchange = Exchange(Path(base) / "run", size, 1)
        exchange.replicas = 8
        for k in range(8):
            exchange._publish(f"replica-{k}", {"change-0": exchange.vector})
        exchange.vector = torch.empty(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        exchange.shard(0)
        return _status("VmHWM") - before


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(key)))


if __name__ == "__main__":
    app()
