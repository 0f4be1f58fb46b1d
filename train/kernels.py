"""Which kernels a process computes with: sums in a fixed order while it learns, the fastest while it looks."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fleet.errors import first_line
from fleet.run_config import UserError
from train.fixed_order import in_fixed_order as in_fixed_order

MIXED = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
_MORE = ("dropout", "softcap", "position_bias")  # that flash attention of several texts does not know
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


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **asked: Any
) -> tuple[Tensor, Tensor | None]:
    """Told where texts begin, flash attention goes from one to the next, and computes nothing of what a mask hides."""
    if (bounds := asked.pop("text_bounds", None)) is None:
        return sdpa_attention_forward(module, query, key, value, mask, **asked)
    if mask is not None or any(asked.get(key) for key in _MORE):
        raise ValueError("texts are told apart here, and nothing else is")
    kind, (rows, heads, width, _) = query.device.type, query.shape
    narrow = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype
    flat = [each.transpose(1, 2).flatten(0, 1).to(narrow) for each in (query, key, value)]
    found = _from_text_to_text(flat, bounds, width, heads != key.shape[1], asked.get("scaling"))
    return found.unflatten(0, (rows, width)), None


def _from_text_to_text(flat: list[Tensor], bounds: Tensor, width: int, groups: bool, scale: float | None) -> Any:
    from torch.nn.attention import varlen  # only GPUs need what it loads

    how: dict[str, Any] = {"scale": scale, "window_size": (-1, 0)}
    if "enable_gqa" in signature(varlen.varlen_attn).parameters:  # older versions of torch need not be told
        how["enable_gqa"] = groups
    return varlen.varlen_attn(flat[0], flat[1], flat[2], bounds, bounds, width, width, **how)


masking_utils.AttentionMaskInterface.register("sdpa", _mask)
AttentionInterface.register("sdpa", _attention)


def sent(numbers: Tensor, device: torch.device | str, non_blocking: bool = True) -> Tensor:
    """To a device. A GPU fetches them from pinned memory when it gets there, so that who sends them need not wait for
    what it does before."""
    pinned = non_blocking and torch.device(device).type == "cuda" and numbers.device.type == "cpu"
    return (numbers.pin_memory() if pinned else numbers).to(device, non_blocking=non_blocking)
