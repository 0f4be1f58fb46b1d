"""train_fsdp.py on CPUs: the same curve whatever the ranks share, checkpoints, what it refuses."""

import csv
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.ranks import one
from tests.small import SHAPE, shared
from train.cluster.options import HivemindOptions, TrainingOptions, spelled
from train.cluster.ranks import joined
from train.model import built

ROOT = Path(__file__).parent.parent
WHOLE_OR_PARTS = ("NO_SHARD", "FULL_SHARD")
STRATEGIES = (*WHOLE_OR_PARTS, "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
KEYS = {
    "torch_compile": False, "seq_length": 16, "total_batch_size": 4, "per_device_train_batch_size": 1, "lr": 1e-2,
    "warmup_steps": 2, "total_steps": 8, "precision": "32-true",
}  # fmt: skip


def model(folder: Path, **shape: Any) -> str:
    """A configuration and a tokenizer, without weights."""
    folder.mkdir(parents=True)
    shutil.copytree(shared() / "tokenizer", folder, dirs_exist_ok=True)
    about = {"model_type": "llama", "vocab_size": 258, "tie_word_embeddings": True, "num_key_value_heads": 2, **SHAPE}
    (folder / "config.json").write_text(json.dumps({**about, **shape}))
    return str(folder)


def weights(folder: Path, untied: bool = False) -> None:
    """Such a model with the weights that a training of it begins with."""
    config = model(folder)
    made = built(config, 258, TrainingOptions().seed)
    made.save_pretrained(folder)
    if untied:  # its configuration says otherwise, and transformers believes the file
        file = folder / "model.safetensors"
        known = load_file(file)
        known["lm_head.weight"] = known["model.embed_tokens.weight"].flip(0).contiguous()
        save_file(known, file, {"format": "pt"})


def training(folder: Path, name: str, **keys: Any) -> dict[str, Any]:
    data = str(shared() / "text.jsonl")
    known = {"path_model": str(folder / "model"), "dataset_name_or_path": data, **KEYS, "ckpt": {"interval": 4}}
    return {**known, "out": str(folder / name), **keys}


def torchrun(folder: Path, plan: list[dict[str, Any]], count: int, over: str = "gloo") -> list[str]:
    (folder / "plan.json").write_text(json.dumps(plan))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    words = ["-m", "tests.ranks", str(folder / "plan.json"), str(folder / "said.json")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **({"CUDA_VISIBLE_DEVICES": ""} if over == "gloo" else {})}
    done = subprocess.run([*command, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "said.json").read_text())


def curve(folder: Path) -> list[float]:
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, len(rows) + 1))
    return [float(row["loss"]) for row in rows]


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module", params=["gloo", "nccl"])
def over(request: pytest.FixtureRequest) -> str:
    if request.param == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("fewer than two GPUs here: that two ranks give the same over NCCL is not tested")
    return str(request.param)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, over: str) -> tuple[Path, dict[str, str]]:
    """All that two ranks do, in one start of them."""
    folder = tmp_path_factory.mktemp("two")
    model(folder / "model")
    model(folder / "other", hidden_size=48)
    plan = [training(folder, each, sharding_strategy=each) for each in STRATEGIES]
    for each in WHOLE_OR_PARTS:
        again = training(folder, f"again-{each}", sharding_strategy=each)
        plan += [{**again, "stop_at": 3}, {**again, "ckpt": {"resume": "true"}}]
        for precision in ("bf16-mixed", "fp16-mixed"):
            plan.append(training(folder, f"{precision}-{each}", sharding_strategy=each, precision=precision))
    moved = training(folder, "moved", sharding_strategy="FULL_SHARD")
    plan.append({**moved, "ckpt": {"resume": str(folder / "NO_SHARD" / "step-00000004")}})
    plan += [training(folder, f"muon-{each}", sharding_strategy=each, optimizer="muon") for each in STRATEGIES[:4]]
    plan += [training(folder, f"plus-{each}", sharding_strategy=each, optimizer="muon+") for each in WHOLE_OR_PARTS]
    moved = training(folder, "muon-moved", sharding_strategy="FULL_SHARD", optimizer="muon")
    plan.append({**moved, "ckpt": {"resume": str(folder / "muon-NO_SHARD" / "step-00000004")}})
    plan.append(training(folder, "kept", ckpt={"interval": 2, "topk": 2}))
    plan.append(training(folder, "uneven", total_batch_size=6, per_device_train_batch_size=2))
    weights(folder / "weights")
    weights(folder / "two-heads", untied=True)
    for each in WHOLE_OR_PARTS:
        plan += [training(folder, f"{name}-{each}", path_model=str(folder / name), sharding_strategy=each)
                 for name in ("weights", "two-heads")]  # fmt: skip
    resume = {"resume": str(folder / "NO_SHARD" / "step-00000004")}
    plan.append(training(folder, "other-model", path_model=str(folder / "other"), ckpt=resume))
    plan.append(training(folder, "other-lr", lr=1e-3, ckpt=resume))
    said = torchrun(folder, plan, 2, over)
    return folder, {
        f"{Path(each['out']).name}{each['ckpt'].get('resume', '')}": what for each, what in zip(plan, said, strict=True)
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, over: str) -> Path:
    """The same training in one process."""
    folder = tmp_path_factory.mktemp("alone")
    model(folder / "model")
    both = [training(folder, "out"), *(training(folder, each, optimizer=each) for each in ("muon", "muon+"))]
    if torch.cuda.device_count():  # which another process does not see, or does
        said = torchrun(folder, both, 1, over)
    else:
        with joined() as ranks:
            said = [one(each, ranks) for each in both]
    assert {*said} == {"0"}
    return folder / "out"


# -- curves -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_whatever_ranks_share_the_curve_is_that_of_one_process(two, alone, strategy):
    folder, said = two
    assert said[strategy] == "0"
    assert curve(folder / strategy) == pytest.approx(curve(alone), abs=2e-5)
    assert curve(alone)[-1] < curve(alone)[0] - 1


@pytest.mark.parametrize("strategy", STRATEGIES[:4])
def test_each_rank_makes_its_share_of_muons_matrices_orthogonal(two, alone, strategy):
    folder, said = two
    assert said[f"muon-{strategy}"] == "0"
    wanted = curve(alone.with_name("muon"))
    assert curve(folder / f"muon-{strategy}") == pytest.approx(wanted, abs=2e-5)
    assert wanted[-1] < wanted[0] - 1 and wanted != pytest.approx(curve(alone), abs=1e-2)


@pytest.mark.parametrize("strategy", WHOLE_OR_PARTS)
def test_rows_are_equally_long_wherever_they_are(two, alone, strategy):
    folder, said = two
    assert said[f"plus-{strategy}"] == "0"
    wanted = curve(alone.with_name("muon+"))
    assert curve(folder / f"plus-{strategy}") == pytest.approx(wanted, abs=2e-5)
    assert wanted[-1] < wanted[0] - 1 and wanted != pytest.approx(curve(alone.with_name("muon")), abs=1e-3)


def test_muons_one_moment_moves_from_copies_to_parts(two):
    folder, _ = two
    found = [float(x) for x in _after(folder / "muon-moved", 4)]
    assert found == pytest.approx(curve(folder / "muon-NO_SHARD")[4:], abs=2e-5)


@pytest.mark.parametrize("strategy", WHOLE_OR_PARTS)
def test_weights_that_are_there_are_handed_out_and_heads_that_are_not_tied_stay_so(two, alone, strategy):
    folder, said = two
    assert said[f"weights-{strategy}"] == said[f"two-heads-{strategy}"] == "0"
    assert curve(folder / f"weights-{strategy}") == pytest.approx(curve(alone), abs=2e-5)
    found = load_file(folder / f"two-heads-{strategy}" / "model" / "model.safetensors")
    assert not torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    assert curve(folder / f"two-heads-{strategy}") == pytest.approx(curve(folder / "two-heads-NO_SHARD"), abs=2e-5)


def test_the_model_at_the_end_is_one_that_others_load(two, alone):
    folder, _ = two
    asked = AutoTokenizer.from_pretrained(alone / "model")("the cat sat", return_tensors="pt")["input_ids"]
    wanted = AutoModelForCausalLM.from_pretrained(alone / "model")(asked).logits
    names = {*load_file(alone / "model" / "model.safetensors")}
    for strategy in STRATEGIES:
        found = AutoModelForCausalLM.from_pretrained(folder / strategy / "model")
        assert type(found).__name__ == "LlamaForCausalLM"
        assert torch.allclose(found(asked).logits, wanted, atol=2e-3)
        assert {*load_file(folder / strategy / "model" / "model.safetensors")} == names


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed"])
def test_half_precision_is_the_same_in_copies_and_in_parts(two, alone, precision):
    folder, _ = two
    copies, parts = (curve(folder / f"{precision}-{each}") for each in WHOLE_OR_PARTS)
    assert copies == pytest.approx(parts, abs=2e-2) and copies == pytest.approx(curve(alone), abs=0.1)
    assert copies != curve(folder / "NO_SHARD")


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", WHOLE_OR_PARTS)
def test_stopped_and_resumed_it_is_the_same_to_the_bit(two, strategy):
    folder, said = two
    assert said[f"again-{strategy}"] == "130" and said[f"again-{strategy}true"] == "0"
    assert curve(folder / f"again-{strategy}") == curve(folder / strategy)
    assert digest(folder / f"again-{strategy}") == digest(folder / strategy)


def test_it_goes_on_where_another_strategy_ended(two):
    folder, _ = two
    assert [float(x) for x in _after(folder / "moved", 4)] == pytest.approx(curve(folder / "NO_SHARD")[4:], abs=2e-5)


def test_it_goes_on_with_another_number_of_ranks(two, tmp_path):
    folder, _ = two
    for strategy in WHOLE_OR_PARTS:
        keys = training(folder, f"alone-{strategy}", sharding_strategy=strategy)
        place = folder / "FULL_SHARD" / "step-00000004"
        with joined() as ranks:
            assert one({**keys, "ckpt": {"resume": str(place)}}, ranks) == "0"
        assert _after(folder / f"alone-{strategy}", 4) == pytest.approx(curve(folder / "FULL_SHARD")[4:], abs=2e-5)


def _after(folder: Path, step: int) -> list[float]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file) if int(row["step"]) > step]


def test_only_the_newest_checkpoints_stay(two):
    folder, _ = two
    assert sorted(each.name for each in (folder / "kept").glob("*step*")) == ["step-00000006", "step-00000008"]


@pytest.mark.parametrize("harm", ["gone", "shorter", "other", "state"])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_named(two, tmp_path, harm):
    folder, _ = two
    place = tmp_path / "step-00000008"
    shutil.copytree(folder / "FULL_SHARD" / "step-00000008", place)
    file = sorted(place.glob("*.safetensors"))[0]
    data = bytearray(file.read_bytes())
    if harm == "gone":
        file.unlink()
    elif harm == "state":
        (place / "state.json").write_text("{}")
    else:
        data[-5] ^= 1
        file.write_bytes(data[:-1] if harm == "shorter" else data)
    with joined() as ranks:
        said = one({**training(folder, "damaged"), "ckpt": {"resume": str(place)}}, ranks)
    assert (
        "no checkpoint of this program"
        if harm == "state"
        else "; resume from an older checkpoint (--ckpt.resume FOLDER)"
    ) in said


def test_nothing_that_is_not_complete_counts(two, tmp_path):
    folder, _ = two
    for name in ("step-00000004", "step-00000008"):
        shutil.copytree(folder / "FULL_SHARD" / name, tmp_path / "out" / name)
    (tmp_path / "out" / "step-00000008" / "state.json").unlink()
    (tmp_path / "out" / ".step-00000012.unfinished").mkdir()
    with joined() as ranks:
        keys = training(folder, "x", out=str(tmp_path / "out"), ckpt={"resume": "true"})
        assert one({**keys, "path_model": str(folder / "model")}, ranks) == "0"
    assert len(_after(tmp_path / "out", 0)) == 4
    assert not (tmp_path / "out" / ".step-00000012.unfinished").exists()


# -- settings ---------------------------------------------------------------------------------------------------------


def test_what_cannot_be_is_said(two):
    _, said = two
    by_name = {name.partition("/")[0]: what for name, what in said.items()}
    assert "is not divided by 2 ranks" in by_name["uneven"] and by_name["uneven"].endswith("the nearest that is: 8")
    assert (
        "another model: weights.model.layers.0.self_attn.q_proj.weight is [32, 32] there, [48, 48] here"
        in by_name["other-model"]
    )
    assert "lr was 0.01, is 0.001" in by_name["other-lr"]


@pytest.mark.parametrize(("keys", "said"), [
    ({"path_model": "/nowhere/here"}, "/nowhere/here"),
    ({"attn_implementation": "quick"}, "--attn-implementation quick"),
    ({"seq_length": 0}, "--seq-length is 0"),
    ({"lr": 1e9}, "--lr"),
    ({"ckpt": {"resume": "/nowhere"}}, "/nowhere: no checkpoint of this program"),
])  # fmt: skip
def test_bad_options_are_refused_in_one_line(two, tmp_path, keys, said):
    folder, _ = two
    with joined() as ranks:
        answer = one({**training(folder, "x", out=str(tmp_path / "x")), **keys}, ranks)
    assert said in answer and "\n" not in answer


def test_peers_are_checked_before_anything_is_met():
    for hv, said in (
        (HivemindOptions(galaxy_size=2, local_steps=3), "no multiple of --hv.local-steps 3; the nearest is 9"),
        (HivemindOptions(galaxy_size=2, world_rank=2, local_steps=4), "there are the ranks 0 to 1"),
    ):
        with pytest.raises(ValueError, match=said):
            TrainingOptions(**{**KEYS, "hv": hv}).check(1)


def test_without_hivemind_the_command_that_installs_it_is_named(tmp_path):
    (tmp_path / "hivemind.py").write_text("raise ImportError('no hivemind here')")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    words = ["--path-model", model(tmp_path / "model"), "--hv.galaxy-size", "2", "--ckpt.path", str(tmp_path / "out")]
    command = [sys.executable, "train/train_fsdp.py", *words]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    install = f"--hv.*: no hivemind here: {sys.executable} -m pip install -r requirements-hivemind.txt"
    assert done.returncode == 2 and install in done.stderr and not (tmp_path / "out").exists()


def test_both_spellings():
    assert spelled(["--total_batch_size", "8", "--ckpt.path=/a_b", "a_b"]) == [
        "--total-batch-size", "8", "--ckpt.path=/a_b", "a_b",
    ]  # fmt: skip


@pytest.mark.parametrize(("where", "script"), [
    (ROOT, ["train/train_fsdp.py"]), (ROOT / "train", ["train_fsdp.py"]), (ROOT, ["-m", "train.train_fsdp"]),
])  # fmt: skip
def test_it_is_found_from_the_root_from_its_folder_and_as_a_module(where, script):
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([sys.executable, *script, "--help"], cwd=where, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "--ckpt.interval" in done.stdout and "--no-torch-compile" in done.stdout, (
        done.stderr
    )


def test_its_folder_hides_no_library_where_the_root_is_found_already():
    """As after `pip install -e`: train/kernels.py has the name of one that transformers looks for."""
    code = "import runpy, sys; sys.path[0] = 'train'; runpy.run_path('train/train_fsdp.py'); print(*sys.path)"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert "train" not in done.stdout.split() and done.stdout.split()[0] == str(ROOT)


@pytest.mark.parametrize("name", ["none", "fp16", "scaled-fp16", "uniform8bit", "quantile8bit"])
def test_what_travels_compressed_arrives(name):
    from hivemind.compression import CompressionInfo, deserialize_torch_tensor

    from train.cluster.averager import compression

    sent = torch.randn(1 << 16, generator=torch.Generator().manual_seed(1))
    message = compression(name).compress(sent, CompressionInfo.from_tensor(sent))
    assert len(message.buffer) <= {"none": 4, "fp16": 2, "scaled-fp16": 2.1}.get(name, 1.1) * sent.numel() + 2048
    got = deserialize_torch_tensor(message)
    assert float((got - sent).abs().mean()) < (0.02 if "8bit" in name else 1e-3)
