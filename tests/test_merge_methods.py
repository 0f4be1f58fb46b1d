"""Each merge method against its formula in float64, on all the tensors that such things fail on."""

import inspect
import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from merge import tensor_group as group_module
from merge.methods import METHODS
from merge.methods.magnitude_ranks import Largest, cuts
from merge.tensor_files import UserError
from merge.tensor_group import Group, in_memory
from tests import formulas

RANDOM = {"dare_linear", "dare_ties", "della", "della_linear"}
OWN_TEST = {"passthrough"}
SHAPES = [(700, 300), (1,), (5, 3), (64,), (3, 4, 5), (2, 70001)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tensors(count: int, shape=(5, 3), dtype=torch.float32, seed=0, near=0.1) -> list[Tensor]:
    """A base, and others that differ from it a little."""
    rng = torch.Generator().manual_seed(seed)
    base = torch.randn(shape, generator=rng)
    return [base.to(dtype), *((base + near * torch.randn(shape, generator=rng)).to(dtype) for _ in range(count - 1))]


def merged(
    name: str, others, base=None, *, seed=0, key="model.layers.0.mlp.up_proj.weight", models=None, **given
) -> Tensor:
    method, n = METHODS[name], len(others)
    full = {k: (p.default,) * n if p.each else p.default for k, p in method.params.items()} | given
    models = models or tuple(f"model-{k}" for k in range(n))
    rows = [in_memory(each) for each in others]
    made = Group(tuple(others[0].shape), rows, None if base is None else in_memory(base), key, models, seed)
    method.check(full)
    return torch.cat([block.reshape(-1) for block in method.load()(made, full)]).view(others[0].shape)


def formula(name: str, others, base=None, **given) -> Tensor:
    wide = [each.double() for each in others]
    call = getattr(formulas, name)
    renamed = {{"lambda": "lam"}.get(key, key): value for key, value in given.items()}
    if "base" in inspect.signature(call).parameters and base is not None:
        renamed["base"] = base.double()
    return call(wide, **renamed)


CASES = [
    ("linear", 3, False, {"weight": (0.7, 0.2, 0.4)}),
    ("linear", 3, False, {"weight": (0.7, -0.2, 0.4), "normalize": False}),
    ("linear", 2, False, {"weight": (0.5, -0.5), "normalize": False}),
    *(("slerp", 2, True, {"t": t}) for t in (0.0, 0.3, 1.0, 1.4)),
    ("nuslerp", 2, False, {"weight": (0.3, 0.9)}),
    ("nuslerp", 2, False, {"weight": (0.3, -0.3)}),
    ("nuslerp", 3, True, {"weight": (0.3, 0.9)}),
    ("nuslerp", 2, False, {"weight": (0.3, 0.9), "nuslerp_flatten": False}),
    ("nuslerp", 2, False, {"weight": (0.3, 0.9), "nuslerp_flatten": False, "nuslerp_row_wise": True}),
    ("nuslerp", 3, True, {"weight": (0.3, 0.9), "nuslerp_flatten": False, "nuslerp_row_wise": True}),
    ("multislerp", 3, False, {"weight": (0.7, 0.2, 0.4)}),
    ("multislerp", 4, True, {"weight": (0.7, 0.2, 0.4)}),
    ("multislerp", 3, False, {"weight": (0.7, 0.2, 0.4), "normalize_weights": False}),
    ("karcher", 3, False, {"weight": (1.0, 1.0, 1.0)}),
    ("karcher", 3, False, {"weight": (1.0, 0.0, 3.0), "max_iter": 3}),
    ("task_arithmetic", 3, True, {"weight": (0.7, 0.5)}),
    ("task_arithmetic", 3, True, {"weight": (0.7, -0.7), "normalize": True, "lambda": 0.5}),
    ("task_arithmetic", 3, True, {"weight": (0.7, 0.9), "normalize": True}),
    ("ties", 3, True, {"weight": (0.7, 0.5), "density": (0.3, 0.6)}),
    ("ties", 3, True, {"weight": (0.7, -0.5), "density": (0.0, 1.0)}),
    ("ties", 4, True, {"weight": (0.75, 0.5, -1.25), "density": (0.5, 0.2, 1.0), "normalize": False, "lambda": 1.5}),
    ("ties", 3, True, {"weight": (0.7, 0.5), "density": (0.3, 0.6), "rescale": True}),
    ("breadcrumbs", 3, True, {"weight": (0.7, 0.5), "density": (0.3, 0.6), "gamma": (0.1, 0.01)}),
    ("breadcrumbs", 3, True, {"weight": (0.7, 0.5), "density": (0.9, 0.6), "gamma": (0.3, 0.5), "rescale": True}),
    ("breadcrumbs_ties", 3, True, {"weight": (0.7, 0.5), "density": (0.3, 1.0), "gamma": (0.1, 0.2)}),
    ("model_stock", 3, True, {}),
    ("model_stock", 5, True, {}),
    ("model_stock", 4, True, {"filter_wise": True}),
    *(("sce", 4, True, {"select_topk": share}) for share in (1.0, 0.3, 0.0)),
    ("sce", 2, True, {}),
    ("ram", 4, True, {}),
    *(("ram", n, True, {"epsilon": 0.08}) for n in (2, 4)),
    ("ramplus_tl", 3, True, {}),
    *(("ramplus_tl", n, True, {"epsilon": 0.08, "r": 0.5, "alpha": alpha}) for n in (2, 5) for alpha in (0.1, 9.0)),
    *(("nearswap", 2, True, {"t": t}) for t in (0.0, 0.05, 3.0)),
    ("arcee_fusion", 2, True, {}),
]  # fmt: skip
NAMES = [f"{n}-{name}" for n, (name, *_) in enumerate(CASES)]


def agree(name: str, found: Tensor, others, base, given, atol=3e-6):
    wanted = formula(name, others, base, **given)
    assert found.dtype == torch.float32
    scale = max(1.0, float(wanted.abs().max()))
    assert torch.allclose(found.double(), wanted, atol=atol * scale, rtol=0), float((found - wanted).abs().max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name, count, has_base, given", CASES, ids=NAMES)
def test_values(name, count, has_base, given, dtype):
    for shape in SHAPES[:5]:
        base, *others = all_of = tensors(count, shape, dtype, seed=len(shape))
        others, base = (others, base) if has_base else (all_of, None)
        if name == "karcher" and math.prod(shape) == 1:
            continue  # two numbers have one direction, or opposite ones: see below
        agree(name, merged(name, others, base, **given), others, base, given)


@pytest.mark.parametrize("name, count, has_base, given", CASES, ids=NAMES)
def test_several_blocks_that_end_anywhere(name, count, has_base, given, monkeypatch):
    monkeypatch.setattr(group_module, "_BLOCK", 50)
    base, *others = all_of = tensors(count, (37, 11), seed=5)
    others, base = (others, base) if has_base else (all_of, None)
    agree(name, merged(name, others, base, **given), others, base, given)


@pytest.mark.parametrize("name, count, has_base, given", CASES, ids=NAMES)
def test_zeros_and_equal_numbers(name, count, has_base, given, monkeypatch):
    """Tensors of nothing, equal ones, and numbers that occur so often that the choice among equals shows."""
    monkeypatch.setattr(group_module, "_BLOCK", 20)
    zero = torch.zeros(6, 7)
    rng = torch.Generator().manual_seed(3)
    steps = [torch.randint(-3, 4, (40, 7), generator=rng).float() / 4 for _ in range(count)]
    for all_of in ([zero] * count, [steps[0]] * count, steps, [zero.new_zeros(40, 7), *steps[1:]]):
        base, *others = all_of
        others, base = (others, base) if has_base else (list(all_of), None)
        agree(name, merged(name, others, base, **given), others, base, given)


@pytest.mark.parametrize("name, count, given", [("sce", 2, {"select_topk": 0.3}), ("arcee_fusion", 1, {})])
@pytest.mark.parametrize("broken", [math.nan, -math.nan, math.inf])
def test_a_number_that_is_none_stays_one_among_ranks(name, count, given, broken):
    base, *others = tensors(count + 1)
    others[0][2, 1] = broken
    assert not merged(name, others, base, **given).isfinite().all()


def test_every_method_has_a_formula_or_a_test_of_its_own():
    assert {name for name, *_ in CASES} | RANDOM | OWN_TEST == set(METHODS)


# -- what must hold whatever the formula -------------------------------------------------------------------------------


def sensible(name: str, n: int) -> dict:
    params = METHODS[name].params
    return {
        **({"weight": (1.0 / n,) * n} if "weight" in params else {}),
        **({"density": (0.6,) * n} if "density" in params else {}),
        **({"t": 0.3} if "t" in params else {}),
    }


@pytest.mark.parametrize("name", METHODS)
def test_merging_a_model_with_itself_gives_it_back(name):
    n = METHODS[name].most or 3
    for shape in SHAPES:
        (x,) = tensors(1, shape)
        found = merged(name, [x] * n, None if METHODS[name].base == "none" else x, **sensible(name, n))
        assert torch.allclose(found, x, rtol=1e-6, atol=1e-7), shape
        assert METHODS[name].base != "required" or name == "slerp" or torch.equal(found, x), shape


@pytest.mark.parametrize("name", [name for name in METHODS if name not in RANDOM and METHODS[name].most != 1])
def test_the_order_of_models_does_not_matter(name):
    n = METHODS[name].most or 3
    base, *others = tensors(n + 1, (30, 8))
    params = {key: p for key, p in METHODS[name].params.items() if p.each and p.default != 0.01}
    given = {key: tuple(0.2 + 0.2 * k for k in range(n)) for key in params if key != "gamma"}
    base = None if METHODS[name].base == "none" else base
    first = merged(name, others, base, **given)
    for order in itertools.permutations(range(n)):
        other = {key: tuple(values[k] for k in order) for key, values in given.items()}
        assert torch.allclose(merged(name, [others[k] for k in order], base, **other), first, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_weight_of_one_gives_the_model_back_to_the_bit(dtype):
    a, b = tensors(2, (50, 20), dtype)
    a[0, 0], b[0, 1] = -0.0, float("inf")
    found = merged("linear", [a, b], weight=(1.0, 0.0)).to(dtype)
    assert torch.equal(found.view(torch.uint8), a.view(torch.uint8))


def test_slerp_goes_straight_where_there_is_no_arc():
    a = torch.tensor([[3.0, 4.0]])
    assert torch.allclose(merged("slerp", [2 * a], a, t=0.5), 1.5 * a)
    assert torch.allclose(merged("slerp", [-a], a, t=0.25), 0.5 * a)
    assert torch.equal(merged("slerp", [a], torch.zeros(1, 2), t=0.5), 0.5 * a)


def test_the_mean_of_opposite_directions_is_one_of_them_or_an_error():
    a = torch.tensor([[3.0, 4.0]])
    assert torch.allclose(merged("karcher", [a, -a]).abs(), a)
    assert torch.equal(merged("karcher", [0 * a, 0 * a]), 0 * a)
    assert torch.allclose(merged("multislerp", [a, -a], weight=(0.5, 0.5)), 0 * a)
    turned = [torch.tensor([[math.cos(w), math.sin(w)]]) for w in (0, 2 * math.pi / 3, 4 * math.pi / 3)]
    with pytest.raises(UserError, match="cancel each other out"):
        merged("multislerp", turned, weight=(1.0, 1.0, 1.0), eps=1e-6)


@pytest.mark.parametrize("name", ["linear", "multislerp", "karcher"])
def test_weights_that_cannot_be_normalized_are_an_error(name):
    a, b = tensors(2)
    with pytest.raises(UserError, match="sum to 0"):
        merged(name, [a, b], weight=(0.0, 0.0) if name == "karcher" else (0.5, -0.5))


def test_passthrough_scales_all_or_what_is_added_to_the_residual_stream():
    (x,) = tensors(1)
    assert torch.equal(merged("passthrough", [x]), x)
    assert torch.equal(merged("passthrough", [x], scale=(0.5,)), 0.5 * x)
    for part, factor in (
        ("self_attn.o_proj", 0.5),
        ("mlp.down_proj", 0.5),
        ("mlp.up_proj", 1.0),
        ("input_layernorm", 1.0),
    ):
        assert torch.equal(merged("passthrough", [x], residual=(0.5,), key=f"model.layers.1.{part}.weight"), factor * x)


# -- exact thresholds --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_the_k_largest_are_found_without_sorting(seed):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 400))
    kind = seed % 4
    numbers = torch.from_numpy(rng.standard_normal(size).astype(np.float32)).abs()
    numbers = [numbers, numbers.bfloat16().float(), (numbers * 3).floor(), numbers * 1e-42][kind]
    blocks = numbers.split(int(rng.integers(1, size + 1)))
    wanted = [0, 1, size // 3, size - 1, size, size + 1]
    (found,) = cuts(lambda: ([block] for block in blocks), size, [wanted])
    for k, cut in zip(wanted, found, strict=True):
        says = Largest(cut)
        mask = torch.cat([says(block) for block in blocks])
        assert torch.equal(mask, formulas.largest(numbers, k)), (k, cut)
        keeps = Largest(cut)
        kept = torch.cat([keeps.kept(-block) for block in blocks])
        assert torch.equal(kept, -numbers * mask)


# -- random drops ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(RANDOM))
def test_drops_depend_on_seed_name_and_model_alone(name, monkeypatch):
    base, a, b = tensors(3, (60, 41))
    given = {"weight": (0.5, 0.5), "density": (0.5, 0.4)}
    first = merged(name, [a, b], base, **given)
    assert torch.equal(merged(name, [a, b], base, **given), first)
    monkeypatch.setattr(group_module, "_BLOCK", 41 * 7)  # an odd number of numbers
    assert torch.equal(merged(name, [a, b], base, **given), first)
    assert not torch.equal(merged(name, [a, b], base, **given, seed=1), first)
    assert not torch.equal(merged(name, [a, b], base, **given, key="other"), first)
    assert not torch.equal(merged(name, [a, b], base, **given, models=("x", "y")), first)
    swapped = merged(name, [b, a], base, weight=(0.5, 0.5), density=(0.4, 0.5), models=("model-1", "model-0"))
    assert torch.allclose(swapped, first, atol=1e-6)


@pytest.mark.parametrize("density", [0.1, 0.5, 0.9])
def test_dare_keeps_its_share_and_makes_up_for_the_rest(density):
    base, a = torch.zeros(400, 500), torch.ones(400, 500)
    given = {"weight": (1.0,), "density": (density,)}
    found = merged("dare_linear", [a], base, **given)
    assert set(found.unique().tolist()) == {0.0, float(torch.tensor(1 / density))}
    n = found.numel()
    assert abs(int(found.count_nonzero()) - density * n) < 4 * math.sqrt(n * density * (1 - density))
    kept = merged("dare_linear", [a], base, **given, rescale=False)
    assert torch.equal(kept, (found > 0).float())
    assert torch.equal(merged("dare_ties", [a], base, **given), found)


def test_dare_of_all_or_of_nothing():
    base, a, b = tensors(3)
    all_of_it = merged("task_arithmetic", [a, b], base, weight=(0.3, 0.4))
    assert torch.equal(merged("dare_linear", [a, b], base, weight=(0.3, 0.4)), all_of_it)
    assert torch.equal(merged("dare_linear", [a, b], base, weight=(0.3, 0.4), density=(0.0, 0.0)), base)


def test_della_keeps_the_large_more_often_and_each_by_its_own_chance():
    rows, columns = 4000, 9
    base = torch.zeros(rows, columns)
    a = torch.arange(1, columns + 1).float().repeat(rows, 1) * torch.tensor([1, -1]).repeat(rows // 2)[:, None]
    found = merged("della_linear", [a], base, weight=(1.0,), density=(0.5,), epsilon=(0.2,))
    for rank in range(columns):
        chance = 0.5 - 0.2 + 0.4 * rank / (columns - 1)
        column = found[:, rank]
        assert abs(int(column.count_nonzero()) / rows - chance) < 4 * math.sqrt(chance * (1 - chance) / rows)
        assert torch.allclose(column[column != 0].abs(), torch.tensor((rank + 1) / chance), rtol=1e-6)
    plain = merged("della_linear", [a], base, weight=(1.0,), density=(0.5,), epsilon=(0.2,), rescale=False)
    assert torch.equal(plain != 0, found != 0) and torch.equal(plain[plain != 0], a[plain != 0])
    assert torch.equal(merged("della", [a], base, weight=(1.0,), density=(0.0,)), base)
    with pytest.raises(UserError, match="epsilon"):
        merged("della", [a], base, weight=(1.0,), density=(0.1,))


def test_on_a_gpu_the_numbers_are_the_same():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here: merging on a GPU is not tested")
    for name, count, has_base, given in CASES + [
        (n, 3, True, {"weight": (0.5, 0.5), "density": (0.5, 0.4)}) for n in RANDOM
    ]:
        base, *others = all_of = tensors(count, (300, 70))
        others, base = (others, base) if has_base else (all_of, None)
        here = merged(name, others, base, **given)
        params = {
            k: (p.default,) * len(others) if p.each else p.default for k, p in METHODS[name].params.items()
        } | given
        rows = [in_memory(each) for each in others]
        models = tuple(f"model-{k}" for k in range(len(others)))
        there = Group(
            (300, 70),
            rows,
            in_memory(base) if has_base else None,
            "model.layers.0.mlp.up_proj.weight",
            models,
            0,
            "cuda",
        )
        found = torch.cat([block.cpu() for block in METHODS[name].load()(there, params)])
        assert torch.allclose(found, here, atol=1e-5), name
