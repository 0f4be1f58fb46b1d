"""Writing GGUF files: what has no place in one is refused, and nothing half-written stands under a name."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
from transformers import AutoModelForCausalLM

from merge.tensor_files import UserError
from tests.gguf_models import ROOT, made
from tests.merging import llama

gguf = pytest.importorskip("gguf", reason="gguf is not installed: GGUF files are not tested")
from merge.gguf.checking import verify_gguf  # noqa: E402
from merge.gguf.writing import export_gguf, gguf_to_hf  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def test_what_cannot_be_written(words, tmp_path):
    model, out = made(tmp_path / "model", words), tmp_path / "m.gguf"
    for said, why in (
        ({"type": "Q3_K"}, "Q3_K is none of the types .* F32, F16, BF16, Q8_0, Q4_0"),
        ({"out": tmp_path / "no" / "m.gguf"}, "no does not exist"),
        ({"out": tmp_path}, "is a folder"),
        ({"model_dir": tmp_path / "nothing"}, "nothing: not a folder"),
        ({"model_dir": llama(tmp_path / "mute", 0)}, "needs a tokenizer"),
    ):
        with pytest.raises(UserError, match=why):
            export_gguf(**{"model_dir": model, "out": out, **said})
    for change, why in (
        ({"model_type": "gpt2"}, "of the kind gpt2 cannot be written; llama, mistral, qwen2, qwen3 can"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type is 'dynamic'"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 2.0, "rope_theta": 1e4}},
            "for .*llama3.*low_freq_factor",
        ),
        ({"num_hidden_layers": 1}, r"layers\.1\..* has no place"),
        ({"intermediate_size": 100}, r"has the shape \[96, 64\]; \[100, 64\] is expected"),
    ):
        other = tmp_path / "other"
        shutil.rmtree(other, ignore_errors=True)
        shutil.copytree(model, other)
        said = json.loads((model / "config.json").read_text())
        (other / "config.json").write_text(json.dumps({**said, **change}))
        with pytest.raises(UserError, match=why):
            export_gguf(other, out)
    assert not [path for path in tmp_path.iterdir() if ".gguf" in path.name]


def test_numbers_that_have_no_place(words, tmp_path):
    model = made(tmp_path / "model", words)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    for number, types in ((1e5, ("F16",)), (float("nan"), ("F32", "F16", "Q8_0"))):
        loaded.model.layers[0].mlp.up_proj.weight.data[3, 3] = number
        loaded.save_pretrained(model)
        for type in types:
            with pytest.raises(
                UserError, match=f"ffn_up.weight has numbers that are not finite, or too large for {type}"
            ):
                export_gguf(model, tmp_path / "m.gguf", type)
    assert not (tmp_path / "m.gguf").exists()


def test_nothing_is_replaced_unasked(words, tmp_path):
    model, out = made(tmp_path / "model", words), tmp_path / "m.gguf"
    out.write_bytes(b"mine")
    with pytest.raises(UserError, match=r"m.gguf exists; --overwrite \(overwrite=True\) replaces it"):
        export_gguf(model, out)
    assert out.read_bytes() == b"mine"
    export_gguf(model, out, overwrite=True)
    assert verify_gguf(out, model) == []
    with pytest.raises(UserError, match="exists"):
        gguf_to_hf(out, model)


SERVER = """
import json, os, resource, signal, sys
import torch, transformers.models.llama.modeling_llama, transformers.models.auto.tokenization_auto
from merge.tensor_files import UserError
from merge.gguf.writing import export_gguf
for line in sys.stdin:
    code, arguments = json.loads(line)
    if not os.fork():
        exec(code)
        sys.stdout.flush()
        os._exit(0)
    status = os.wait()[1]
    print("ended", os.waitstatus_to_exitcode(status), flush=True)
"""


@pytest.fixture(scope="module")
def elsewhere():
    """Runs code in a process of its own, forked from one that waited for torch already: how it ended, what it said."""
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(
        command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=surroundings
    ) as server:

        def run(code: str, *arguments: object) -> tuple[int, str]:
            server.stdin.write(json.dumps([code, [str(each) for each in arguments]]) + "\n")
            server.stdin.flush()
            lines = []
            while not (line := server.stdout.readline()).startswith("ended"):
                assert line, "the server ended"
                lines.append(line)
            return int(line.split()[1]), "".join(lines)

        yield run


KILLED = """
def half(done, total):
    if done > total / 2:
        os.kill(os.getpid(), signal.SIGKILL)
export_gguf(*arguments, overwrite=True, progress=half)
"""


def test_a_killed_export_leaves_nothing_under_the_name(elsewhere, words, tmp_path):
    model, old, new = made(tmp_path / "model", words), tmp_path / "old.gguf", tmp_path / "new.gguf"
    export_gguf(model, old)
    before = old.read_bytes()
    assert elsewhere(KILLED, model, old)[0] == elsewhere(KILLED, model, new)[0] == -signal.SIGKILL
    assert not new.exists() and old.read_bytes() == before
    assert [path.name.startswith(".unfinished-") for path in tmp_path.iterdir()].count(True) == 1  # the last one's
    export_gguf(model, old, overwrite=True)
    export_gguf(model, new)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "old.gguf", "new.gguf"}


FULL = """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    export_gguf(*arguments)
except UserError as error:
    print(error)
"""


def test_a_file_that_cannot_be_written_to_its_end(elsewhere, words, tmp_path):
    model = made(tmp_path / "model", words)
    assert "m.gguf: cannot be written: File too large" in elsewhere(FULL, model, tmp_path / "m.gguf")[1]
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


MEASURED = """
small, large, folder = arguments
export_gguf(small, folder + "/small.gguf", "Q8_0")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
export_gguf(large, folder + "/large.gguf", "Q8_0")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_model_is_never_in_memory_as_a_whole(elsewhere, words, tmp_path):
    small = made(tmp_path / "small", words)
    large = made(tmp_path / "large", words, hidden_size=1024, intermediate_size=8192, head_dim=256)
    size = sum(path.stat().st_size for path in large.glob("*.safetensors"))
    status, said = elsewhere(MEASURED, small, large, tmp_path)
    assert size > 200 << 20 and status == 0 and 0 <= int(said) << 10 < size / 5, said
