"""Adapters made of what fine-tuning has changed, and adapters merged as adapters."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from merge.donors import Donors
from merge.engine import MergeOptions
from merge.lora.adapter_merging import opened, plan_adapters
from merge.lora.adapter_writing import write_adapter
from merge.lora.extracting import plan_extraction
from merge.lora.low_rank import Change, least_error, low_rank
from merge.merge_recipe import parse, text_of
from merge.tensor_files import UserError
from tests import formulas
from tests.commands import answer
from tests.merging import SHAPE, llama, run, weights

peft = pytest.importorskip("peft", reason="peft is not installed: adapters are not loaded by it")
TOKENS = torch.arange(16)[None]


# -- matrices of low rank ----------------------------------------------------------------------------------------------


def change(matrix: torch.Tensor, name: str = "w", rows: int = 7) -> Change:
    return Change(name, tuple(matrix.shape), lambda: iter(matrix.split(rows)))


def falling(rows: int, columns: int, power: float, seed: int = 0) -> torch.Tensor:
    """A matrix whose singular values fall as n ** -power."""
    rng = torch.Generator().manual_seed(seed)
    u, v = (torch.linalg.qr(torch.randn(n, min(rows, columns), generator=rng).double()).Q for n in (rows, columns))
    return (u * torch.arange(1, min(rows, columns) + 1) ** -power @ v.T).float()


@pytest.mark.parametrize("shape", [(90, 60), (60, 90), (200, 40), (5, 300), (1, 4)], ids=str)
@pytest.mark.parametrize("power", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("rank", [1, 4, 16])
def test_no_matrix_of_that_rank_is_much_nearer(shape, power, rank):
    matrix = falling(*shape, power)
    found = low_rank(change(matrix), rank)
    wide, best = matrix.double(), least_error(change(matrix), found.rank)
    error = float((wide - found.left @ found.right).norm())
    assert found.rank == min(rank, *shape) and found.left.shape == (shape[0], found.rank)
    assert best <= error + 1e-9 and error <= 1.02 * best + 1e-7
    assert float(torch.linalg.svdvals(wide)[found.rank :].norm()) == pytest.approx(best, abs=1e-9)
    assert found.energy == pytest.approx(float(wide.square().sum()), rel=1e-9)
    assert found.energy - found.kept == pytest.approx(error * error, abs=1e-6 * found.energy)


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99, 0.999999])
@pytest.mark.parametrize("power", [0.3, 1.0])
def test_as_many_ranks_as_keep_a_share_of_the_energy(share, power):
    matrix = falling(120, 80, power, 3)
    values = torch.linalg.svdvals(matrix.double()).square()
    needed = int((values.cumsum(0) < share * values.sum()).sum()) + 1
    found = low_rank(change(matrix), 1 << 30, share)
    assert needed <= found.rank <= needed + 1 and found.kept >= share * found.energy
    assert low_rank(change(matrix), 3, share).rank == min(3, needed)


def test_a_matrix_of_low_rank_is_found_whole_and_in_any_blocks():
    rng = torch.Generator().manual_seed(1)
    matrix = torch.randn(300, 4, generator=rng).double() @ torch.randn(4, 200, generator=rng).double()
    one, other = (low_rank(change(matrix, rows=rows), 4) for rows in (300, 11))
    assert torch.allclose(one.left @ one.right, matrix, atol=1e-9)
    assert torch.allclose(one.left @ one.right, other.left @ other.right, atol=1e-9)
    again = low_rank(change(matrix, rows=11), 4)
    assert torch.equal(again.left, other.left) and torch.equal(again.right, other.right)


# -- extraction --------------------------------------------------------------------------------------------------------


def made(kind: str, folder: Path, seed: int) -> Path:
    """A model: of one seed, moved a little by another; its matrices by low ranks, the rest by anything."""
    common = {key: SHAPE[key] for key in ("vocab_size", "num_hidden_layers", "tie_word_embeddings")}
    torch.manual_seed(0)
    if kind == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_positions=32, n_embd=32, n_layer=2, n_head=2))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**{**SHAPE, **common, "tie_word_embeddings": "tied" in kind}))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if seed and not ("tied" in kind and "embed" in name) and not (kind == "gpt2" and "wte" in name):
                low = each.ndim == 2
                step = torch.randn(len(each), 3) @ torch.randn(3, each.shape[1]) if low else torch.randn_like(each)
                each.add_(0.02 * step)
    model.save_pretrained(folder)
    return folder


def extracted(tuned: Path, base: Path, out: Path, rank: int = 3, linear_only: bool = False, **more):
    with Donors() as donors:
        plan = plan_extraction(donors[str(tuned)], donors[str(base)], rank, linear_only)
        return write_adapter(plan, out, **more)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["qwen2", "qwen2, tied", "gpt2"])
def test_base_and_adapter_are_the_tuned_model(kind, tmp_path):
    """Norms and biases have changed, too; as peft loads it, applies it and merges it, and as we merge it."""
    base, tuned, out = made(kind, tmp_path / "base", 0), made(kind, tmp_path / "tuned", 1), tmp_path / "lora"
    stats = extracted(tuned, base, out)
    assert stats.error < 1e-3 and not stats.notes and {*stats.ranks.values()} == {3}
    wanted = logits(AutoModelForCausalLM.from_pretrained(tuned))
    far = (logits(AutoModelForCausalLM.from_pretrained(base)) - wanted).abs().max()
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out)
    assert (logits(model) - wanted).abs().max() < 1e-3 * far
    assert (logits(model.merge_and_unload()) - wanted).abs().max() < 1e-3 * far
    copy = {"merge_method": "passthrough", "models": [f"{base}+{out}"]}
    found, there = run(tmp_path / "merged", copy), weights(tuned)
    assert found.keys() == there.keys() and all(torch.allclose(found[name], there[name], atol=1e-6) for name in found)


def test_only_linear_layers_and_by_energy(tmp_path):
    base, tuned = llama(tmp_path / "base", 0), llama(tmp_path / "tuned", 1)
    stats = extracted(tuned, base, tmp_path / "lora", 1 << 30, True, share=0.8, optimum=True)
    settings = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert len(stats.ranks) == 4 * 7 == len(settings["target_modules"]) and settings["modules_to_save"] is None
    assert not any("embed" in name or "head" in name or "norm" in name for name in stats.ranks)
    ranks = {**dict.fromkeys(settings["target_modules"], settings["r"]), **settings["rank_pattern"]}
    assert ranks == stats.ranks and len({*ranks.values()}) > 1 and 0.8 <= stats.kept / stats.energy < 0.9
    there = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    assert {f"base_model.model.{name}.lora_A.weight" for name in ranks} < there.keys() and len(there) == 56
    before, after, left, whole = weights(base), weights(tuned), 0.0, 0.0
    for name, rank in ranks.items():
        step = (after[f"{name}.weight"] - before[f"{name}.weight"]).double()
        a, b = (there[f"base_model.model.{name}.lora_{each}.weight"].double() for each in "AB")
        assert a.shape[0] == rank
        left, whole = left + float((step - b @ a).square().sum()), whole + float(step.square().sum())
    assert stats.error == pytest.approx((left / whole) ** 0.5, rel=1e-4)
    assert stats.best <= stats.error * whole**0.5 * (1 + 1e-9) and stats.best > 0.99 * stats.error * whole**0.5


def test_the_same_bytes_with_any_number_of_threads(tmp_path):
    base, tuned = llama(tmp_path / "base", 0), llama(tmp_path / "tuned", 1)
    files = []
    for n in (1, 2, 5):
        extracted(tuned, base, tmp_path / f"{n}", 5, share=0.6, how=MergeOptions(n))
        files.append((tmp_path / f"{n}" / "adapter_model.safetensors").read_bytes())
    assert files[0] == files[1] == files[2]


def test_what_an_adapter_has_no_place_for_is_named(tmp_path):
    base, tuned = (llama(tmp_path / f"m{n}", n, tie_word_embeddings=True) for n in (0, 1))
    stats = extracted(tuned, base, tmp_path / "lora")
    (note,) = stats.notes
    assert note.startswith("left out, though changed: model.embed_tokens: the output head is the same matrix")
    assert "model.embed_tokens" not in stats.ranks
    assert not extracted(tuned, base, tmp_path / "linear", linear_only=True).notes


def test_what_cannot_be_extracted(tmp_path):
    base, other = llama(tmp_path / "base", 0), llama(tmp_path / "other", 1, vocab_size=100)
    with pytest.raises(UserError, match=r"\[96, 32\] in the base, \[100, 32\]; --linear-only leaves"):
        extracted(other, base, tmp_path / "out")
    extracted(other, base, tmp_path / "linear", linear_only=True)
    with pytest.raises(UserError, match="no matrix differs from"):
        extracted(base, base, tmp_path / "out")
    with pytest.raises(UserError, match="energy of 1.5"):
        extracted(other, base, tmp_path / "out", linear_only=True, share=1.5)
    tied = llama(tmp_path / "tied", 1, tie_word_embeddings=True)
    with pytest.raises(UserError, match="has one of its own"):
        extracted(tied, base, tmp_path / "out")
    broken = llama(tmp_path / "broken", 1)
    tensors = weights(broken)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"layers.1.mlp.up_proj.weight changes by numbers that are not finite"):
        extracted(broken, base, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not [*tmp_path.glob(".*")]
    tuned = llama(tmp_path / "tuned", 1)
    extracted(tuned, base, tmp_path / "adapter", linear_only=True)
    with pytest.raises(UserError, match=r"write that one first: python -m merge .*base\+.*adapter merged-model"):
        extracted(tuned, f"{base}+{tmp_path / 'adapter'}", tmp_path / "out")


def test_an_adapter_is_not_replaced_by_what_is_made_of_it(tmp_path):
    base, tuned, adapter = llama(tmp_path / "base", 0), llama(tmp_path / "tuned", 1), tmp_path / "adapter"
    extracted(tuned, base, adapter)
    before = (adapter / "adapter_model.safetensors").read_bytes()
    both = {"merge_method": "passthrough", "models": [f"{base}+{adapter}"]}
    with pytest.raises(UserError, match="adapter is not replaced: .*adapter is in it"):
        run(adapter, both, overwrite=True)
    words = ("-m", "merge.lora", "extract", f"{base}+{adapter}", str(base), str(adapter), "--rank", "1", "--overwrite")
    code, _, errors = answer(*words)
    assert code == 2 and "adapter is not replaced" in errors
    assert (adapter / "adapter_model.safetensors").read_bytes() == before


# -- adapters merged as adapters ---------------------------------------------------------------------------------------

TARGETS = [["q_proj", "down_proj"], ["q_proj", "v_proj"], ["q_proj"]]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> list[str]:
    """Of one model; of other ranks and scales, and not of all the same modules."""
    folder = tmp_path_factory.mktemp("adapters")
    model = llama(folder / "model", 0)
    found = [str(model)]
    for n, targets in enumerate(TARGETS):
        torch.manual_seed(n)
        settings = {"r": 2 + n, "lora_alpha": 8, "use_rslora": n == 1, "target_modules": targets}
        made = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), peft.LoraConfig(**settings))
        with torch.no_grad():
            for each in made.parameters():
                if each.requires_grad:
                    each.copy_(0.3 * torch.randn_like(each))
        made.save_pretrained(folder / f"a{n}")
        found.append(str(folder / f"a{n}"))
    return found


def merged(recipe: dict, out: Path, rank: int = 0, **more):
    said = parse(text_of(recipe))
    with ExitStack() as stack:
        plan = plan_adapters(said, [opened(name, stack) for name in said.models], rank, MergeOptions(2))
        return write_adapter(plan, out, **more)


def changes(model: str, adapter) -> dict[str, torch.Tensor]:
    """What peft makes of a model by an adapter, less the model."""
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter)
    after, before = loaded.merge_and_unload().state_dict(), weights(Path(model))
    return {name: after[name].double() - before[name].double() for name in before}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["linear", "task_arithmetic", "ties", "slerp", "nuslerp", "ram"])
def test_adapters_merge_as_what_they_change(method, adapters, tmp_path):
    model, *files = adapters
    files = files[:2] if method == "nuslerp" else files
    inputs = [{"model": file, "parameters": {"weight": 0.4 + 0.2 * n}} for n, file in enumerate(files)]
    recipe = {"merge_method": method, "models": inputs}
    if method == "ties":
        recipe["parameters"] = {"density": 0.4}
    if method == "slerp":
        recipe = {"merge_method": "slerp", "base_model": files[0], "models": files[1:2], "parameters": {"t": 0.3}}
    if method == "ram":
        recipe["models"] = files
    stats = merged(recipe, tmp_path / "out", 32 if method in ("ties", "ram") else 0)
    theirs, found = [changes(model, file) for file in files], changes(model, tmp_path / "out")
    weight, modules = [0.4, 0.6, 0.8][: len(files)], {f"{name}.weight" for name in stats.ranks}
    assert modules == {name for name in found if any(each[name].any() for each in theirs)}
    for name in modules:
        xs = [each[name] for each in theirs]
        wanted = {
            "linear": lambda xs=xs: formulas.linear(xs, weight),
            "task_arithmetic": lambda xs=xs: formulas.task_arithmetic(xs, torch.zeros_like(xs[0]), weight),
            "ties": lambda xs=xs: formulas.ties(xs, torch.zeros_like(xs[0]), weight, [0.4] * 3),
            "slerp": lambda xs=xs: formulas.slerp(xs[1:2], xs[0], 0.3),
            "nuslerp": lambda xs=xs: formulas.nuslerp(xs, weight),
            "ram": lambda xs=xs: formulas.ram(xs, torch.zeros_like(xs[0])),
        }[method]()
        assert torch.allclose(found[name], wanted, atol=2e-5 * float(wanted.abs().max())), name
    exact = {"q_proj": 9, "v_proj": 3, "down_proj": 2}
    if method in ("linear", "task_arithmetic"):
        assert {name.split(".")[-1]: rank for name, rank in stats.ranks.items()} == exact and stats.error < 1e-6
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == model


def test_an_adapter_of_a_lower_rank(adapters, tmp_path):
    stats = merged({"merge_method": "passthrough", "models": [adapters[3]]}, tmp_path / "out", 1, optimum=True)
    assert {*stats.ranks.values()} == {1} and 0.1 < stats.error < 1
    assert stats.best == pytest.approx(stats.error * stats.energy**0.5, rel=1e-3)


def test_adapters_that_cannot_be_merged(adapters, tmp_path):
    model, one, two, _ = adapters
    head = {"merge_method": "linear", "parameters": {"weight": 1.0}}
    other = llama(tmp_path / "other", 0, hidden_size=64)
    for name, settings in (("large", {}), ("dora", {"use_dora": True}), ("whole", {"modules_to_save": ["lm_head"]})):
        made = AutoModelForCausalLM.from_pretrained(other if name == "large" else model)
        config = peft.LoraConfig(target_modules=["q_proj"], r=2, **settings)
        peft.get_peft_model(made, config).save_pretrained(tmp_path / name)
    cases = [
        ({"models": [one, model]}, "is no adapter: it has no adapter_config.json"),
        ({"models": [one, two], "dtype": "bfloat16"}, "`dtype` says something of models"),
        ({"models": [one, two], "tokenizer_source": "union"}, "`tokenizer` says something of models"),
        ({"models": [one, str(tmp_path / "large")]}, r"\[32, 32\] in .*, \[64, 64\] in .*large"),
        ({"models": [one, str(tmp_path / "dora")]}, "is a DoRA"),
        ({"models": [one, str(tmp_path / "whole")]}, "lm_head.weight as a whole; extract it with --linear-only"),
    ]
    for said, why in cases:
        with pytest.raises(UserError, match=why):
            merged({**head, **said}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- the commands ------------------------------------------------------------------------------------------------------


def test_the_commands(adapters, tmp_path):
    model, one, two, _ = adapters
    tuned = llama(tmp_path / "tuned", 1)
    words = ("-m", "merge.lora", "extract", str(tuned), model, str(tmp_path / "lora"), "--linear-only", "--optimum")
    code, said, errors = answer(*words, "--rank", "8")
    assert code == 0, errors
    assert "28 matrices of rank 8 keep" in said and "(of the best matrices of these ranks: 0." in said
    assert f"peft={tmp_path / 'lora'}" in said
    recipe = {"merge_method": "linear", "parameters": {"weight": 1.0}, "models": [one, two]}
    (tmp_path / "recipe.yml").write_text(text_of(recipe))
    code, said, errors = answer("-m", "merge.lora", "merge", str(tmp_path / "recipe.yml"), str(tmp_path / "both"))
    assert code == 0 and "12 matrices of ranks 2 to 5 keep 100.0000% of the change's energy" in said, errors
    code, _, errors = answer(*words)
    assert code == 2 and "exists; --overwrite" in errors
