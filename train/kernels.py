"""Which kernels a process computes with: sums in a fixed order while it learns, the fastest while it looks."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from fleet.errors import first_line
from fleet.run_config import UserError
from train.fixed_order import in_fixed_order as in_fixed_order

MIXED = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
_NONE = "does not have a deterministic implementation"  # in torch's words


@contextmanager
def learning() -> Iterator[None]:
    """Around forward and backward, where sums are in a fixed order. Only where nothing else is allowed, flash and
    memory-efficient attention sum their gradients in one, and cuDNN's attention, which cannot, is not chosen. Nothing
    that only looks is in here: without gradients all of them say the same each time."""
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        if _NONE not in str(error):
            raise
        advice = "DETERMINISTIC false lets it be, in a run with another PROJECT_NAME"
        raise UserError(f"this model's gradient has no fixed order: {first_line(error)}; {advice}") from error
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warns)


def looking(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Around what only looks at a model of fp32 numbers: a GPU multiplies them as it does while it learns; a CPU, which
    gains little by it, in full."""
    if device.type == "cuda" and precision in MIXED:
        return torch.autocast(device.type, MIXED[precision])
    return nullcontext()


@contextmanager
def told_where_texts_begin(packed: bool) -> Iterator[None]:
    """Around a model that is asked about rows of one text each, or of several. By itself transformers looks at
    positions whether they begin again, for which it waits for the device; and where it cannot look, within
    torch.compile, it takes a mask for granted, with which there is no flash attention."""
    looks = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = _texts if packed else _one_text
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = looks


def _texts(position_ids: Tensor) -> Tensor | None:
    """The number of each token's text in its row; of rows of one text, too, whose mask then says no more."""
    return (position_ids.diff(prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)


def _one_text(position_ids: Tensor) -> Tensor | None:
    return None


def _mask(batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, **asked: Any) -> Tensor | None:
    """None where the kernel's own causal order says it all. While something is compiled, transformers knows so with
    newer versions of torch only, and flash attention takes no mask: an attention four times as slow on an H200."""
    narrow, skips = asked.get("local_size"), asked.get("allow_is_causal_skip", True)
    square = q_length == kv_length and isinstance(q_offset, int) and not q_offset
    if skips and square and asked.get("attention_mask") is None and (narrow is None or kv_length < narrow):
        return None
    found: Tensor | None = masking_utils.sdpa_mask(batch_size, q_length, kv_length, q_offset, **asked)
    return found


masking_utils.AttentionMaskInterface.register("sdpa", _mask)


def sent(numbers: Tensor, device: torch.device | str, non_blocking: bool = True) -> Tensor:
    """To a device. A GPU fetches them from pinned memory when it gets there, so that who sends them need not wait for
    what it does before."""
    pinned = non_blocking and torch.device(device).type == "cuda" and numbers.device.type == "cpu"
    return (numbers.pin_memory() if pinned else numbers).to(device, non_blocking=non_blocking)
