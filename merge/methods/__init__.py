"""The ways to merge tensors. Each is a pure function of a group and its parameters; what it yields is the result.

The table knows functions by their names: torch is imported by whoever merges, and not by whoever reads or proposes
recipes.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from merge.methods.checks import check_della, check_shares

if TYPE_CHECKING:
    from torch import Tensor

    from merge.tensor_group import Group

REQUIRED = object()  # a parameter without a default


@dataclass(frozen=True)
class Param:
    default: Any = REQUIRED
    each: bool = False  # every model has its own; else the tensor has one
    kind: type = float
    low: float | None = None
    high: float | None = None
    far: float = 100.0  # where it has no limit, evolution goes so far: most numbers beyond overflow in a model


@dataclass(frozen=True)
class MergeMethod:
    qualified_name: str  # of its function: the module in this folder, and the name there
    params: Mapping[str, Param] = field(default_factory=dict)
    base: Literal["none", "optional", "required"] = "none"  # none: a base is a model like the others
    least: int = 1  # models beside the base
    most: int | None = None
    check: Callable[[Mapping[str, Any]], None] = lambda p: None

    def load(self) -> "Callable[[Group, Mapping[str, Any]], Iterator[Tensor]]":
        """The function that merges a group; this imports its module, and torch."""
        module, _, name = self.qualified_name.partition(".")
        found: Callable[[Group, Mapping[str, Any]], Iterator[Tensor]]
        found = getattr(importlib.import_module(f"merge.methods.{module}"), name)
        return found


def _delta_method(name: str, normalize: bool, rescale: bool | None = None, **more: Param) -> MergeMethod:
    params = {"weight": Param(each=True), "lambda": Param(1.0), "normalize": Param(normalize, kind=bool), **more}
    if rescale is not None:
        params |= {"density": Param(1.0, each=True, low=0, high=1), "rescale": Param(rescale, kind=bool)}
    check = check_della if "epsilon" in more else lambda p: None
    return MergeMethod(f"task_vectors.{name}", params, "required", check=check)


_GAMMA = {"gamma": Param(0.01, each=True, low=0, high=1)}
_EPSILON = {"epsilon": Param(0.15, each=True, low=0, high=1)}
_MOVED = {"epsilon": Param(1e-5, low=0)}
_T = {"t": Param()}

METHODS: Mapping[str, MergeMethod] = {
    "linear": MergeMethod(
        "weighted_sums.linear",
        {"weight": Param(each=True), "normalize": Param(True, kind=bool)},
        check=check_shares,
    ),
    "slerp": MergeMethod("weighted_sums.slerp", _T, "required", most=1),
    "nuslerp": MergeMethod(
        "weighted_sums.nuslerp",
        {
            "weight": Param(each=True),
            "nuslerp_flatten": Param(True, kind=bool),
            "nuslerp_row_wise": Param(False, kind=bool),
        },
        "optional",
        least=2,
        most=2,
    ),
    "multislerp": MergeMethod(
        "weighted_sums.multislerp",
        {"weight": Param(each=True), "normalize_weights": Param(True, kind=bool), "eps": Param(1e-8, low=0, far=1e-3)},
        "optional",
        check=check_shares,
    ),
    "karcher": MergeMethod(
        "weighted_sums.karcher",
        {
            "weight": Param(1.0, each=True, low=0),
            "max_iter": Param(10, kind=int, low=0, far=10_000),
            "tol": Param(1e-5, low=0),
        },
        check=check_shares,
    ),
    "task_arithmetic": _delta_method("task_arithmetic", normalize=False),
    "ties": _delta_method("ties", normalize=True, rescale=False),
    "dare_linear": _delta_method("dare_linear", normalize=False, rescale=True),
    "dare_ties": _delta_method("dare_ties", normalize=False, rescale=True),
    "breadcrumbs": _delta_method("breadcrumbs", normalize=False, rescale=False, **_GAMMA),
    "breadcrumbs_ties": _delta_method("breadcrumbs_ties", normalize=False, rescale=False, **_GAMMA),
    "della": _delta_method("della", normalize=True, rescale=True, **_EPSILON),
    "della_linear": _delta_method("della_linear", normalize=False, rescale=True, **_EPSILON),
    "model_stock": MergeMethod(
        "weighted_sums.model_stock", {"filter_wise": Param(False, kind=bool)}, "required", least=2
    ),
    "sce": MergeMethod("fusion.sce", {"select_topk": Param(1.0, low=0, high=1)}, "required"),
    "ram": MergeMethod("fusion.ram", _MOVED, "required"),
    "ramplus_tl": MergeMethod("fusion.ramplus_tl", {"r": Param(0.1), "alpha": Param(0.2, low=0), **_MOVED}, "required"),
    "nearswap": MergeMethod("fusion.nearswap", {"t": Param(low=0)}, "required", most=1),
    "arcee_fusion": MergeMethod("fusion.arcee_fusion", {}, "required", most=1),
    "passthrough": MergeMethod(
        "weighted_sums.passthrough", {"scale": Param(1.0, each=True), "residual": Param(1.0, each=True)}, most=1
    ),
}

IGNORED = ("int8_mask",)  # stands in many recipes; it saves memory that is not used here
