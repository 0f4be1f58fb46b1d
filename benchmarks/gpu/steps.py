"""What is to be found out, in order of worth."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.running import ROOT, Step, say_row
from fleet import gpus

# Each test that is skipped where there is no GPU.
TESTS = (
    "tests/test_gpu.py",
    "tests/test_merge_methods.py",
    "tests/test_fsdp.py",
)
WHICH = "gpu or accelerator or nccl"  # the last ones of test_fsdp.py, for two GPUs


@dataclass(frozen=True)
class Made(Step):
    make: Callable[[bool], None]


def tests(dry: bool) -> None:
    """One line for each, and what it came to."""
    words = [sys.executable, "-m", "pytest", *TESTS, "-k", WHICH, "-rA", "--show-capture=no", "-p", "no:cacheprovider"]
    how = ["--collect-only"] if dry else ["-n", "8"]  # most of their time is a processor's
    done = subprocess.run([*words, *how], cwd=ROOT, capture_output=True, text=True)
    print(done.stdout, done.stderr, file=sys.stderr)
    for outcome, name in re.findall(r"^(PASSED|FAILED|ERROR) (tests/\S+::\S+)", done.stdout, re.M):
        say_row(test=name, outcome=outcome.lower())
    if dry:
        say_row(
            test="collected, and not run", outcome=str(len(re.findall(r"<Function |^tests/.*::", done.stdout, re.M)))
        )
    if done.returncode:
        sys.exit(f"pytest ended with code {done.returncode}")


def digests(dry: bool) -> None:
    from benchmarks.gpu import rounds

    rounds.digests(dry)


def speed(preset: str, length: int, compiles: bool = True) -> Callable[[bool], None]:
    def make(dry: bool) -> None:
        from benchmarks.gpu import speed

        # A toy is compiled once: on a CPU that takes longer than all the rest.
        speed.run(preset, length, dry, compiles and (not dry or (preset, length) == ("150m", 1024)))

    return make


def rows_of_several(dry: bool) -> None:
    from benchmarks.gpu import rows

    rows.run("150m", 2048, dry)


def answers(dry: bool) -> None:
    from benchmarks.gpu import answers

    answers.run("150m", dry)


def waiting(algorithm: str) -> Callable[[bool], None]:
    def make(dry: bool) -> None:
        from benchmarks.gpu import rounds

        rounds.waiting(algorithm, dry)

    return make


def merging(dry: bool) -> None:
    """The same recipes on both, and whether the files are the same."""
    from benchmarks.merge import recipe
    from benchmarks.models import llamas
    from merge.engine import MergeOptions
    from merge.merge_recipe import parse
    from merge.merging import merge

    hidden, layers, words = (64, 1, 256) if dry else (2048, 8, 32000)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        llamas(folder, "bfloat16", hidden, layers, words)
        for method in ("linear", "slerp", "ties", "dare_ties"):
            text, sizes, seconds = recipe(method, folder).read_text(), list[bytes](), dict[Path, float]()
            for device in ("cpu", "cpu" if dry else "cuda"):
                out, began = folder / f"{method}-{len(seconds)}", time.monotonic()
                merge(parse(text), out, how=MergeOptions(device=device))
                seconds[out] = time.monotonic() - began
                sizes.append((out / "model.safetensors").read_bytes())
            (here, there), gigabytes = seconds.values(), len(sizes[0]) / 1e9
            say_row(method=method, GB=gigabytes, same=sizes[0] == sizes[1], **{"CPU, s": here, "GPU, s": there})


def searching(dry: bool) -> None:
    """A merge search, scored by lm-eval's harness: beside merging to disk, loading and asking for each candidate."""
    from benchmarks import evolve

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        evolve.prepared(folder, 3 if dry else 20)
        sequence = () if dry else evolve.plain(folder, rounds=1)
        if sequence:
            row = zip(("merge, s", "load, s", "ask, s"), sequence, strict=True)
            say_row(what="one after the other", **{"candidates a minute": 60 / sum(sequence), **dict(row)})
        for what, more in (("our search", []), ("our search, merged on the GPU", ["--merge-cuda"])):
            if dry and more:
                continue  # which needs one
            rate, first = evolve.search(folder, 6 if dry else 84, more)
            say_row(what=what, **{"candidates a minute": rate, "first one, s": first})


def several(dry: bool) -> None:
    import torch

    from benchmarks.train_fsdp import of_all_gpus

    if (count := torch.cuda.device_count()) < 2:
        return say_row(what=f"not measured: {count} GPUs here")
    for name, tokens, _, share in of_all_gpus(count):
        say_row(model=name, GPUs=count, **{"tokens/s": tokens, "MFU": share})


_ABOUT = "bf16; tokens a second, beside a bare loop and transformers.Trainer; MFU of the largest product of matrices"
_WAITS = "two workers on one GPU: what share of a round it waits"
STEPS: list[Step] = [
    Made("tests", "the tests that are skipped without a GPU", 150, tests),
    Made("digests", "the same bytes by one worker, warm, by two, and with one killed", 120, digests),
    Made("speed 150m 1024", _ABOUT, 120, speed("150m", 1024)),
    Made("speed 1b 2048", _ABOUT, 150, speed("1b", 2048)),
    Made("speed 60m 1024", _ABOUT, 90, speed("60m", 1024)),
    Made("rows", "tokens a second where rows hold several examples, by a mask or by their bounds", 90, rows_of_several),
    Made("answers", "what learning from rewards is made of: tokens a second that are drawn, and learned", 60, answers),
    Made("merging", "on the processor and on the GPU", 60, merging),
    Made("waiting diloco", _WAITS, 240, waiting("diloco")),
    Made("waiting edt", _WAITS, 160, waiting("edt")),
    Made("searching", "merge-search candidates a minute", 90, searching),
    Made("several", "one model on all GPUs, FSDP2 (FULL_SHARD)", 120, several),
    Made("speed 150m 2048", _ABOUT, 120, speed("150m", 2048)),
    Made("speed 60m 2048", _ABOUT, 90, speed("60m", 2048)),
    Made("speed 1b 1024", _ABOUT, 150, speed("1b", 1024)),
]


def run(name: str, dry: bool) -> None:
    """Mostly on the first GPU: transformers.Trainer would take all that it sees."""
    if name not in ("tests", "several"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus.visible()[:1])
    next(each for each in STEPS if isinstance(each, Made) and each.name == name).make(dry)


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
