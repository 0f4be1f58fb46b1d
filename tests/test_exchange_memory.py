"""The outer step streams: however large the model, a shard takes the same little memory."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def peak(numbers: int) -> int:
    command = [sys.executable, "-m", "benchmarks.outer_step", "--memory-of", str(numbers)]
    return int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120).stdout)


def test_a_shard_of_any_size_takes_as_little():
    assert peak(24_000_000) < 256e6 / 2, "eight changes of 96 MB each went through it"
