"""A tokenizer as GGUF settings, and what transformers leaves out where it reads them."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet.untrusted_model import check_words_in
from merge.gguf.header import Gguf
from merge.json_files import read_json, write_json
from merge.tensor_files import UserError
from merge.vocabulary import PLAIN_TOKEN, pair_of

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_NO_MERGE = -1e6  # the score of a piece that no merge makes


@dataclass(frozen=True)
class Tokenizer:
    """What transformers made of a folder's tokenizer files."""

    made: Any
    file: Mapping[str, Any]  # as tokenizer.json

    @property
    def added(self) -> Mapping[Any, Mapping[str, Any]]:
        return {each["id"]: each for each in self.file.get("added_tokens", ())}

    @property
    def merges(self) -> list[tuple[str, str]]:
        return [pair_of(each) for each in self.file["model"]["merges"]]


def add_tokens(writer: Any, folder: Path, config: Any, pre: str | None = None) -> list[str]:
    """Everything that llama.cpp must know of the tokenizer; notes on what it does otherwise."""
    tokenizer = _opened(folder)
    by_bytes = not tokenizer.file["model"].get("byte_fallback")
    tokens, types = _listed(tokenizer, config.vocab_size)
    writer.add_tokenizer_model("gpt2" if by_bytes else "llama")
    notes = _add_byte_level(writer, tokenizer, pre) if by_bytes else _add_pieces(writer, tokenizer, tokens)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    _add_special(writer, tokenizer, config)
    template = tokenizer.made.chat_template
    if isinstance(template, str):
        writer.add_chat_template(template)
    elif template:
        notes.append(f"of its chat templates ({', '.join(template)}) only the default one is kept")
        writer.add_chat_template(template.get("default") or next(iter(template.values())))
    return notes


def _opened(folder: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    check_words_in(folder)
    try:
        made = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        file = json.loads(made.backend_tokenizer.to_str())
    except Exception as error:  # whatever transformers can come up with
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{folder}: a GGUF file needs a tokenizer, and there is none that can be read: {why}") from None
    if file["model"].get("type") != "BPE":
        raise UserError(
            f"{folder}: its tokenizer is a {file['model'].get('type')}; only BPE can be written to GGUF here"
        )
    return Tokenizer(made, file)


def _listed(tokenizer: Tokenizer, rows: int) -> tuple[list[str], list[int]]:
    """A token and its kind for each row of the embedding; rows without a token are padding."""
    by_id = {id: token for token, id in tokenizer.made.get_vocab().items()}
    if max(by_id) >= rows:
        raise UserError(f"its tokenizer has a token number {max(by_id)}, its embedding {rows} rows")
    unknown, added = tokenizer.file["model"].get("unk_token") or tokenizer.made.unk_token, tokenizer.added
    bytewise = tokenizer.file["model"].get("byte_fallback")
    tokens, types = [], []
    for id in range(rows):
        token = by_id.get(id)
        if token is None:
            token, kind = f"[PAD{id}]", UNUSED
        elif id in added:
            kind = CONTROL if added[id]["special"] else USER_DEFINED
            kind = UNKNOWN if bytewise and token == unknown else kind
        elif bytewise and re.fullmatch("<0x[0-9A-F]{2}>", token):
            kind = BYTE
        else:
            kind = UNKNOWN if bytewise and token == unknown else NORMAL
        tokens.append(token)
        types.append(kind)
    if len(set(tokens)) < rows:
        raise UserError("its tokenizer has tokens like [PAD7], which name the rows without a token in a GGUF file")
    return tokens, types


def _add_byte_level(writer: Any, tokenizer: Tokenizer, pre: str | None) -> list[str]:
    name = pre or _cut_of(tokenizer.file)
    writer.add_tokenizer_pre(name)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer.merges])
    if bool(tokenizer.file["model"].get("ignore_merges")) == (_SAME.get(name, name) in _WHOLE_WORDS_FIRST):
        return []
    return [f"llama.cpp treats words that are tokens otherwise: {name} does not go with its ignore_merges"]


def _add_pieces(writer: Any, tokenizer: Tokenizer, tokens: list[str]) -> list[str]:
    """llama.cpp joins neighbours to the token with the highest score, so scores fall as merges come later."""
    scores: dict[str, float] = {}
    for n, (left, right) in enumerate(tokenizer.merges):
        scores.setdefault(left + right, -float(n))
    writer.add_tokenizer_pre("default")
    writer.add_token_scores([scores.get(token, _NO_MERGE) for token in tokens])
    steps = json.dumps([tokenizer.file.get("normalizer"), tokenizer.file.get("pre_tokenizer")])
    spaces = ('"Prepend"', '"prepend_scheme": "first"', '"prepend_scheme": "always"')
    writer.add_add_space_prefix(any(each in steps for each in spaces))
    notes = []
    if '"prepend_scheme": "first"' in json.dumps(tokenizer.file.get("pre_tokenizer")):
        notes.append("llama.cpp also puts a space before the text behind a special token")
    pairs, all_of = set(tokenizer.merges), set(tokens)
    splits = {(token[:n], token[n:]) for token in scores for n in range(1, len(token))}
    beside = sum(left in all_of and right in all_of and (left, right) not in pairs for left, right in splits)
    if beside:
        writer.add_token_merges([" ".join(pair) for pair in tokenizer.merges])  # for transformers alone
        notes.append(f"llama.cpp also joins {beside} pairs of pieces that are no merges of the tokenizer")
    return notes


def _add_special(writer: Any, tokenizer: Tokenizer, config: Any) -> None:
    made = tokenizer.made
    bos = made.bos_token_id
    if bos is None and tokenizer.added.get(getattr(config, "bos_token_id", None), {}).get("special"):
        bos = config.bos_token_id
    for id, add in (
        (bos, writer.add_bos_token_id),
        (made.eos_token_id, writer.add_eos_token_id),
        (made.unk_token_id, writer.add_unk_token_id),
        (made.pad_token_id, writer.add_pad_token_id),
    ):
        if id is not None:
            add(id)
    ids = made("a")["input_ids"]  # what it really does
    writer.add_add_bos_token(bool(ids) and bos is not None and ids[0] == bos)
    writer.add_add_eos_token(bool(ids) and made.eos_token_id is not None and ids[-1] == made.eos_token_id)


# -- and back ----------------------------------------------------------------------------------------------------------


def complete(folder: Path, gguf: Gguf) -> None:
    """Set in tokenizer.json what transformers does not look for: how text is cut, and all added tokens."""
    path = folder / "tokenizer.json"
    file = read_json(path)
    tokens = gguf.metadata["tokenizer.ggml.tokens"]
    types = gguf.metadata.get("tokenizer.ggml.token_type") or (NORMAL,) * len(tokens)
    unused = {f"[PAD{id}]" for id, kind in enumerate(types) if kind == UNUSED}
    file["model"]["vocab"] = {token: id for id, token in enumerate(tokens) if token not in unused}
    if gguf.metadata.get("tokenizer.ggml.model") == "gpt2":
        _set_cut(file, str(gguf.metadata.get("tokenizer.ggml.pre")))
    elif gguf.metadata.get("tokenizer.ggml.model") == "llama":
        _set_pieces(file, bool(gguf.metadata.get("tokenizer.ggml.add_space_prefix", True)))
    _set_added(file, tokens, types)
    write_json(path, file)


def _set_pieces(file: dict[str, Any], space: bool) -> None:
    """As llama.cpp reads text: with a space before it, also behind a special token, or with none."""
    prepend, strip = {"type": "Prepend", "prepend": "▁"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    there = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    file["normalizer"] = {"type": "Sequence", "normalizers": [*([prepend] if space else []), there]}
    file["pre_tokenizer"] = None
    decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *([strip] if space else [])]
    file["decoder"] = {"type": "Sequence", "decoders": decoders}


def _set_added(file: dict[str, Any], tokens: Sequence[str], types: Sequence[int]) -> None:
    """transformers passes over those with letters outside of the byte alphabet, and may add one of its own."""
    there = {each["id"]: each for each in file["added_tokens"] if each["content"] in file["model"]["vocab"]}
    for id, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind in (CONTROL, USER_DEFINED):
            there.setdefault(id, {"id": id, "content": token, **PLAIN_TOKEN, "special": kind == CONTROL})
    file["added_tokens"] = [there[id] for id in sorted(there)]


# -- how byte-level tokenizers cut text into words, under the names that llama.cpp has for these ways ------------------

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


def _cut_of(file: Mapping[str, Any]) -> str:
    """The way of a tokenizer.json."""
    steps, whole = _bare(_flat(file.get("pre_tokenizer"))), bool(file["model"].get("ignore_merges"))
    known = [name for name, each in _STEPS.items() if _bare(each) == steps]
    if not known:
        raise UserError(
            f"its pre_tokenizer is none of {', '.join(_STEPS)}; name llama.cpp's with pre=: {str(steps)[:300]}"
        )
    return next((name for name in known if (name in _WHOLE_WORDS_FIRST) == whole), known[0])


def _set_cut(file: dict[str, Any], name: str) -> None:
    """Give a tokenizer.json the way of this name; unknown ones leave it as it is."""
    name = _SAME.get(name, name)
    if steps := _STEPS.get(name):
        file["pre_tokenizer"] = steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps}
        file["model"]["ignore_merges"] = name in _WHOLE_WORDS_FIRST
        file["normalizer"] = {"type": "NFC"} if name == "qwen2" else None


def _flat(step: Any) -> list[dict[str, Any]]:
    if not isinstance(step, dict):
        return []
    return [each for part in step["pretokenizers"] for each in _flat(part)] if step["type"] == "Sequence" else [step]


def _bare(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what changes no token."""
    return [{key: value for key, value in step.items() if key != "trim_offsets"} for step in steps]
