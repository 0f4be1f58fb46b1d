"""Machines with too little memory: what does not fit is left to others, and the result is what it would have been."""

import errno
import json
import subprocess
import sys

import pytest
import torch

from fleet import faults
from fleet.context import Spent, WorkerOptions
from fleet.digest import digest
from fleet.errors import Lacking
from fleet.host import Host
from fleet.recipe import NotYet, Recipe
from fleet.run import create_run
from fleet.run_config import UserError
from fleet.scratch import passing
from fleet.work import Failed, NotOnThisMachine
from fleet.worker import Worker
from tests.chat_rows import of
from tests.helpers import LONG, until
from tests.small import config, finished, worker
from train.verdicts import short_memory, with_verdicts

ROOMY = {
    "batch_size": 256, "seq_length": 128, "population_size": 2, "max_generations": 1, "max_epochs": 1e6,
    "inner_steps": 1, "held_out": 0.2,
}  # fmt: skip

# A worker that may use 20 MB more than it uses when it begins to train: a step needs several times as much.
POOR = """
import resource, sys
from pathlib import Path
from tests import small
from tests.test_short_memory import ROOMY
from train.member.pretraining_tasks import maker

c = small.config(tokenizer=sys.argv[2] + "/tokenizer", datasets=({"source": sys.argv[2] + "/text.jsonl"},), **ROOMY)
make = maker(c)

def poor(work):
    if not work.recipe.args.get("steps"):
        return make(work)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (20 << 20), resource.RLIM_INFINITY))
    try:
        return make(work)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

sys.exit(small.worker(Path(sys.argv[1]), c, "poor", poor).run() != "over")
"""


def test_a_poor_worker_leaves_to_a_rich_one_what_does_not_fit_and_nothing_else_changes(tmp_path):
    """The memory runs out for real, in the middle of a step."""
    from tests.small import shared

    wanted = digest(finished(tmp_path / "calm", **ROOMY))
    (tmp_path / "tight").mkdir()
    command = [sys.executable, "-c", POOR, str(tmp_path / "tight"), str(shared())]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stderr=log, stdout=log) as poor:
        events = tmp_path / "tight" / "run" / "workers" / "poor.events"
        said = until(
            lambda: (
                poor.poll() is not None
                or events.exists()
                and "leaves to others" in (text := events.read_text())
                and text
            ),
            f"words of {poor.pid}",
            LONG,
        )
        assert said is not True, (tmp_path / "log").read_text()
        rich = worker(tmp_path / "tight", config(**ROOMY), "rich")
        assert rich.run() == "over" and poor.wait(60) == 0, (tmp_path / "log").read_text()
    assert digest(rich.history) == wanted
    left = {event["id"] for event in map(json.loads, said.splitlines()) if "leaves to others" in json.dumps(event)}
    assert left and all(rich.history.outcome(id).by == "rich" for id in left)
    assert rich.history.outcome("0/init-0").by == "poor"
    for words in ("1/m", "MB more are needed, of ", " GB that this process may use at most", "BATCH_SIZE"):
        assert words in said, said


def test_after_it_ran_out_of_memory_a_worker_begins_afresh():
    """Nothing of a half-changed model is used again, and nothing keeps its memory."""
    import weakref

    class Tools:
        def __init__(self):
            self.model = torch.zeros(3)

    made, gone = [], []

    def tools():
        made.append(weakref.ref(one := Tools()))
        return one

    def make(tools, work):
        half = torch.ones(3)
        gone.append(weakref.ref(half))
        if work == "large":
            tools.model += half
            torch.empty(1 << 50)
        return {"model": float(tools.model.sum())}

    making = with_verdicts(tools, make, "less of this needs less")
    assert making("small") == {"model": 0.0}
    with pytest.raises(NotOnThisMachine, match="4503599.63 GB more are needed, of .* less of this needs less") as error:
        making("large")
    assert error.value.__context__ is None and made[0]() is None and gone[1]() is None
    assert making("small") == {"model": 0.0} and len(made) == 2


def chained(first: Exception, then: Exception) -> Exception:
    try:
        try:
            raise first
        except Exception:
            raise then from None
    except Exception as error:
        return error


ACCESS = "CUDA error: an illegal memory access was encountered\nSearch for `cudaErrorIllegalAddress' in ..."
SPOILING = [
    torch.AcceleratorError(ACCESS),
    torch.AcceleratorError("HIP error: unspecified launch failure"),
    RuntimeError("CUDA driver error: device-side assert triggered"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`"),
    RuntimeError("No CUDA GPUs are available"),
    torch.distributed.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error"),
]
GPU = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB."


@pytest.mark.parametrize("error", SPOILING, ids=str)
def test_after_an_error_of_the_device_its_process_makes_nothing_more(error, tmp_path):
    """Whatever a task made of it; the worker says what it came of, and ends."""
    store, _ = create_run(tmp_path, "run", {}, Host())

    class One:
        def plan(self, round, history):
            return [] if round else [Recipe("bad", "x")]

    def make(tools, work):
        try:
            raise error
        except RuntimeError:
            raise UserError("the model cannot be built") from None

    worker = Worker(store, One(), with_verdicts(lambda: None, make, "advice"), WorkerOptions(launch=1))
    with pytest.raises(Spent, match="0/bad: this process can use its device no more"):
        worker.run()
    (left,) = (store.standing(f"rounds/00000/{path.name}") for path in tmp_path.rglob("bad.0.left.*"))
    assert left["why"] == "failed" and str(error)[:9] in left["error"]


def test_who_ends_gives_back_what_waits_for_a_parent(tmp_path):
    """It was not lost while it made that: eight such would end the run."""
    store, _ = create_run(tmp_path, "run", {}, Host())

    class Two:
        def plan(self, round, history):
            return [Recipe(f"m{round}", "x", parents=("0/m0",) * round)] if round < 2 else []

    def make(work):
        if work.id == "1/m1":
            store.settle("rounds/00000/m0.0.void", {"by": "another", "why": "its files are damaged"})
            work.history.reopen("0/m0")
            raise NotYet("0/m0")
        if work.writer.attempt.startswith("00000.m0.1"):
            raise RuntimeError(ACCESS)
        return {}

    with pytest.raises(Spent, match="0/m0: this process can use its device no more"):
        Worker(store, Two(), make, WorkerOptions(launch=1, poll_seconds=0.1)).run()
    assert store.standing("rounds/00000/m0.1.left.0")["why"] == "failed"
    assert store.standing("rounds/00001/m1.0.left.0")["why"] == "released"


@pytest.mark.parametrize("error, meaning, words", [
    (torch.OutOfMemoryError(GPU), NotOnThisMachine, "21.47 GB more are needed"),
    (RuntimeError("CUDA error: out of memory"), NotOnThisMachine, "the memory of the GPU does not suffice"),
    (torch.AcceleratorError("CUDA error: out of memory"), NotOnThisMachine, "the memory of the GPU does not suffice"),
    (RuntimeError("Triton Error [CUDA]: out of memory"), NotOnThisMachine, "the memory of the GPU does not suffice"),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), NotOnThisMachine,
     "the memory of the GPU does not suffice"),
    (chained(torch.OutOfMemoryError(GPU), UserError("the model cannot be built")), NotOnThisMachine, "21.47 GB more"),
    *((error, type(error), str(error)[:9]) for error in SPOILING),
    *((chained(error, UserError("it cannot be built")), type(error), str(error)[:9]) for error in SPOILING),
    (chained(torch.OutOfMemoryError(GPU), torch.AcceleratorError(ACCESS)), torch.AcceleratorError, "illegal memory"),
    (MemoryError(), NotOnThisMachine, "this process may use at most"),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), NotOnThisMachine, "this process may use at most"),
    (chained(MemoryError(), UserError("the model cannot be built")), NotOnThisMachine, "this process may use at most"),
    (chained(FileNotFoundError("a.jsonl"), UserError("a.jsonl cannot be read")), NotOnThisMachine, "cannot be read"),
    (chained(ImportError("gguf"), UserError("pip install gguf")), NotOnThisMachine, "pip install gguf"),
    (chained(ConnectionError("no route"), UserError("the hub does not give it")), NotOnThisMachine, "the hub"),
    (Lacking("a GPU is needed"), NotOnThisMachine, "a GPU is needed"),
    (chained(OSError(errno.ENOSPC, "full"), UserError("needs 9 GB")), OSError, "full"),
    (chained(OSError(errno.EIO, "broken"), UserError("cannot be read")), OSError, "broken"),
    (chained(RuntimeError("CUDA error: unspecified launch failure"), UserError("it says something else")), RuntimeError,
     "unspecified"),
    (RuntimeError("CUDA error: unspecified launch failure"), RuntimeError, "unspecified"),
    (faults.Passing("out of memory"), faults.Passing, "out of memory"),
    (ZeroDivisionError("x"), ZeroDivisionError, "x"),
    (UserError("two models of different shapes"), Failed, "different shapes"),
    (chained(KeyError("x"), UserError("no such field")), Failed, "no such field"),
], ids=str)  # fmt: skip
def test_what_a_makers_error_means(error, meaning, words):
    def make(tools, work):
        raise error

    with pytest.raises(meaning, match=words) as found:
        with_verdicts(lambda: None, make, "advice")(None)
    assert type(found.value) is meaning or meaning in (OSError,)


def test_a_full_disk_of_ones_own_is_nothing_about_the_shared_one(tmp_path):
    with pytest.raises(Lacking, match=f"{tmp_path}: no room for files"), passing("x", tmp_path) as place:
        assert place.is_dir()
        raise OSError(errno.ENOSPC, "full")
    assert not [*tmp_path.iterdir()]
    shared = chained(OSError(errno.ENOSPC, "full"), faults.Full("the shared one"))
    for other in (ZeroDivisionError(), shared):
        with pytest.raises(type(other)), passing("x", tmp_path):
            raise other


def test_a_trial_that_had_no_room_is_no_answer(monkeypatch):
    """Whether a model can be asked in a quicker way must not depend on how much memory its machine has."""
    from train import packing

    def tried(*given):
        raise raised

    model = of("llama")
    monkeypatch.setattr(packing, "_alike", tried)
    raised = RuntimeError("position 9 is out of range")
    assert not packing.can_pack(model, 8)
    for raised in (MemoryError(), torch.OutOfMemoryError(GPU), RuntimeError("CUDA error: launch failure")):
        with pytest.raises(type(raised)):
            packing.can_pack(model, 8)
    assert short_memory(raised) == ""
