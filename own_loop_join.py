"""A training loop of your own in a run: what `from diloco import join` and `from edt import join` stand on.

fleet, merge and train are found here, though the script that joins a run is called train.py, or has one beside it.
"""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

_ROOT = Path(__file__).resolve().parent


def _ours_first() -> None:
    sys.path.insert(0, str(_ROOT))
    try:
        for name in ("fleet", "merge", "train"):
            found = getattr(importlib.import_module(name), "__file__", None)
            if found != str(_ROOT / name / "__init__.py"):
                raise ImportError(f"{found}: `join` needs a package of this name: give your module another one")
    finally:
        sys.path.remove(str(_ROOT))


_ours_first()

from fleet.method import Method  # noqa: E402
from fleet.run_config import UserError  # noqa: E402
from train.own_loop_config import OwnLoopConfig  # noqa: E402
from train.recipe_arguments import OFF_DEVICE  # noqa: E402

if TYPE_CHECKING:
    import torch

    from train.own_loop.session import OwnLoopRun

SUFFIX = "-loop"  # of an algorithm's name, where the loop is somebody's own


def joining(algorithm: str, strategy: Any) -> Callable[..., "OwnLoopRun"]:
    """The function that a method's module offers to scripts."""

    def join(
        settings: str | Path | None,
        model: "torch.nn.Module",
        *learning: Any,
        evaluate: Callable[[], Any] | None = None,
        **keys: Any,
    ) -> "OwnLoopRun":
        """Train a model together with other processes of the same script, wherever they run.

        `settings` is a configuration file, or the folder of a run; keys of the configuration may follow by their names.
        `learning` are optimizers, schedulers, a gradient scaler: what has a state_dict. `evaluate` says how good the
        model is as it stands: its loss, or several numbers by name.
        """
        from train.own_loop.own_join import joined  # which takes a while to import

        method = Method(f"{algorithm}{SUFFIX}", "", OwnLoopConfig, strategy, _nobody, off_device=OFF_DEVICE)
        return joined(method, [sys.executable, __file__], settings, model, learning, evaluate, keys)

    return join


def _nobody(config: OwnLoopConfig) -> Any:
    raise UserError("the members of this run are made by a script that joins it: start that")


if __name__ == "__main__":  # as a logger of such a run
    from fleet.start import main

    main(Method("", __doc__ or "", OwnLoopConfig, _nobody, _nobody, prepare=lambda config, where: _nobody(config)))
