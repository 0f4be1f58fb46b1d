"""How byte-level tokenizers cut text into words, under the names that llama.cpp has for these ways."""

from collections.abc import Mapping
from typing import Any

from merge.files import UserError

_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3 = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_PATHS}"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}?"
    rf"|\p{{N}}{{1,3}}|{_PATHS}"
)


def _bytes(cut: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": cut}


def _split(pattern: str) -> list[dict[str, Any]]:
    return [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}, _bytes(False)]


_STEPS = {
    "gpt-2": [_bytes(True)],
    "smollm": [{"type": "Digits", "individual_digits": True}, _bytes(True)],
    "qwen2": _split(rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"),
    "llama-bpe": _split(_LLAMA3),
    "smaug-bpe": _split(_LLAMA3),
    "tekken": _split(_TEKKEN),
    "gpt-4o": _split(_GPT4O),
}
_WHOLE_WORDS_FIRST = ("llama-bpe", "tekken")  # a word that is a token is not put together of pieces
_SAME = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2", "starcoder": "smollm"}


def name_of(file: Mapping[str, Any]) -> str:
    """The way of a tokenizer.json."""
    steps, whole = _bare(_flat(file.get("pre_tokenizer"))), bool(file["model"].get("ignore_merges"))
    known = [name for name, each in _STEPS.items() if _bare(each) == steps]
    if not known:
        seen = str(steps)[:300]
        raise UserError(f"its pre_tokenizer is none of {', '.join(_STEPS)}; name llama.cpp's with pre=: {seen}")
    return next((name for name in known if (name in _WHOLE_WORDS_FIRST) == whole), known[0])


def apply(file: dict[str, Any], name: str) -> None:
    """Give a tokenizer.json the way of this name; unknown ones leave it as it is."""
    name = _SAME.get(name, name)
    if steps := _STEPS.get(name):
        file["pre_tokenizer"] = steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps}
        file["model"]["ignore_merges"] = name in _WHOLE_WORDS_FIRST
        file["normalizer"] = {"type": "NFC"} if name == "qwen2" else None


def same_merges(file: Mapping[str, Any], name: str) -> bool:
    """Whether llama.cpp looks for whole words first exactly where the tokenizer does."""
    return bool(file["model"].get("ignore_merges")) == (_SAME.get(name, name) in _WHOLE_WORDS_FIRST)


def _flat(step: Any) -> list[dict[str, Any]]:
    if not isinstance(step, dict):
        return []
    return [each for part in step["pretokenizers"] for each in _flat(part)] if step["type"] == "Sequence" else [step]


def _bare(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what changes no token."""
    return [{key: value for key, value in step.items() if key != "trim_offsets"} for step in steps]
