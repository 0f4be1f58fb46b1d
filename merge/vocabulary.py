"""Models with different vocabularies: which tokens the result has, and where each of its embeddings comes from."""

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from merge.donors import Donor, Stored
from merge.files import Wrong
from merge.recipe import Merge, Token

_VOCABULARY = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|embed_in|lm_head|embed_out)\.(weight|bias)$")


def is_vocabulary(name: str) -> bool:
    """Whether a tensor has a row for each token."""
    return bool(_VOCABULARY.search(name))


@dataclass(frozen=True)
class Words:
    """A tokenizer.json, and each token's number."""

    file: Mapping[str, Any]
    ids: Mapping[str, int]


class Vocabulary:
    def __init__(self, recipe: Merge, models: Sequence[Donor], leader: Donor) -> None:
        assert recipe.tokenizer
        self.rules, self.models, self.leader = dict(recipe.tokenizer.tokens), models, leader
        source, names = recipe.tokenizer.source, [donor.reference for donor in models]
        if source not in ("union", "base", *names):
            raise Wrong(f"tokenizer_source is {source!r}; one of {', '.join(['union', 'base', *names])} is possible")
        self.words = {donor.reference: words_of(donor.folder) for donor in models}
        self.source = next((donor for donor in models if donor.reference == source), leader)
        made = copy.deepcopy(dict(self.words[self.source.reference].file))
        if source == "union":
            for donor in models:
                _add_all(made, self.words[donor.reference])
        for token in self.rules:
            _add_token(made, {"content": token, "normalized": False, "special": False})
        self.result = Words(made, _ids(made))
        self._check_rules()
        tokens = 1 + max(self.result.ids.values())
        multiple = recipe.tokenizer.pad_to_multiple_of or 1
        self.size = -(-max(tokens, self.source.vocabulary) // multiple) * multiple
        self.notes = self._notes()

    @cached_property
    def tokens(self) -> dict[int, str]:
        return {id: token for token, id in self.result.ids.items()}

    def aligned(self, name: str, models: Sequence[str], stored: Sequence[Stored]) -> list[Stored]:
        """The models' tensors, row by row those of the result's tokens."""
        tensors = dict(zip(models, stored, strict=True))
        return [
            Stored((self.size, *each.shape[1:]), each.dtype, self._rows(model, tensors))
            for model, each in tensors.items()
        ]

    def _rows(self, model: str, tensors: Mapping[str, Stored]) -> Any:
        """A reader of rows that come from anywhere."""
        places: list[list[tuple[str, int]]] | None = None

        def rows(begin: int, end: int) -> Tensor:
            nonlocal places
            places = places or self._places(model, {name: each.shape[0] for name, each in tensors.items()})
            width = tensors[model].shape[1] if len(tensors[model].shape) > 1 else 1
            found = [_read(tensors, wanted, width) for wanted in _runs(places[begin:end], width)]
            return torch.cat(found) if width > 1 else torch.cat([each.reshape(-1, 1) for each in found])

        if len(tensors[model].shape) > 1:
            return rows
        return lambda begin, end: rows(0, self.size).view(1, -1)  # a bias is one row of all tokens

    def _places(self, model: str, sizes: Mapping[str, int]) -> list[list[tuple[str, int]]]:
        """For each row of the result: the rows whose mean it is."""
        return [self._place(model, row, self.tokens.get(row), sizes) for row in range(self.size)]

    def _place(self, model: str, row: int, token: str | None, sizes: Mapping[str, int]) -> list[tuple[str, int]]:
        if token is None:  # padding: its own, or that of the model that the tokenizer comes from
            padded = (name for name in (model, self.source.reference, *sizes) if name in sizes and row < sizes[name])
            return [(name, row) for name in padded if row not in self._used(name)][:1]
        have = {name: id for name in sizes if (id := self.words[name].ids.get(token, sizes[name])) < sizes[name]}
        rule = self.rules.get(token)
        if model in have and not (rule and rule.force):
            return [(model, have[model])]
        if rule and (rule.source or rule.kind == "zero"):
            return self._by_rule(rule, token, have)
        if len(have) > 1 and self.leader.reference in have:
            return [(self.leader.reference, have[self.leader.reference])]
        return list(have.items())  # the mean of those that have it; of none: nothing

    def _by_rule(self, rule: Token, token: str, have: Mapping[str, int]) -> list[tuple[str, int]]:
        if rule.kind == "zero":
            return []
        assert rule.source
        if rule.kind == "model":
            return [(rule.source, have[rule.source])]
        id = rule.token_id if rule.token_id is not None else self.words[rule.source].ids[rule.token or ""]
        return [(rule.source, id)]

    def _used(self, model: str) -> set[int]:
        return set(self.words[model].ids.values())

    def _check_rules(self) -> None:
        for token, rule in self.rules.items():
            if rule.source is None:
                continue
            if rule.source not in self.words:
                raise Wrong(f"tokenizer.tokens[{token!r}]: {rule.source} is not one of the models")
            ids, size = (
                self.words[rule.source].ids,
                next(d.vocabulary for d in self.models if d.reference == rule.source),
            )
            wanted = rule.token if rule.kind == "model_token" else token
            if rule.token_id is None and wanted not in ids:
                raise Wrong(f"tokenizer.tokens[{token!r}]: {rule.source} has no token {wanted!r}")
            if rule.token_id is not None and rule.token_id >= size:
                raise Wrong(f"tokenizer.tokens[{token!r}]: {rule.source} has {size} tokens, not number {rule.token_id}")

    def _notes(self) -> list[str]:
        nobody = [t for t in self.result.ids if not any(t in words.ids for words in self.words.values())]
        without = [t for t in nobody if not self.rules[t].source]
        return [f"the token {token!r} is in no model: its embedding is zero" for token in without]

    def save(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text(json.dumps(self.result.file, ensure_ascii=False))


def _runs(places: Sequence[list[tuple[str, int]]], width: int) -> Iterator[list[tuple[str, int, int]]]:
    """Rows that lie one after the other in the same model are read at once: (model, first, behind the last)."""
    run: list[tuple[str, int, int]] = []
    for place in places:
        if len(place) == 1 and len(run) == 1 and (place[0][0], place[0][1]) == (run[0][0], run[0][2]):
            run = [(run[0][0], run[0][1], run[0][2] + 1)]
            continue
        if run:
            yield run
        run = [(name, row, row + 1) for name, row in place]
        if not run:
            yield run
    if run:
        yield run


def _read(tensors: Mapping[str, Stored], run: Sequence[tuple[str, int, int]], width: int) -> Tensor:
    if not run:
        return torch.zeros(1, width)
    if len(run) == 1:
        return _some(tensors[run[0][0]], *run[0][1:]).float()
    return torch.stack([_some(tensors[name], begin, end).float() for name, begin, end in run]).mean(0)


def _some(stored: Stored, begin: int, end: int) -> Tensor:
    return stored.rows(begin, end) if len(stored.shape) > 1 else stored.rows(0, 1).view(-1, 1)[begin:end]


# -- tokenizer.json ----------------------------------------------------------------------------------------------------


def words_of(folder: Path) -> Words:
    try:
        file = json.loads((folder / "tokenizer.json").read_text())
        return Words(file, _ids(file))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Wrong(f"{folder}: it has no tokenizer.json that can be read ({error}); vocabularies need one") from None


def _ids(file: Mapping[str, Any]) -> dict[str, int]:
    vocabulary = file["model"]["vocab"]
    pieces = vocabulary if isinstance(vocabulary, dict) else {piece: n for n, (piece, _) in enumerate(vocabulary)}
    return {**pieces, **{each["content"]: each["id"] for each in file.get("added_tokens", ())}}


def _add_all(made: dict[str, Any], words: Words) -> None:
    """What another tokenizer has beside: its tokens, and how they are put together. New ones come last."""
    mine, other = made["model"], words.file["model"]
    if mine["type"] != other["type"]:
        raise Wrong(f"tokenizers of the kinds {mine['type']} and {other['type']} have no union; choose one of them")
    known = _ids(made)
    special = {each["content"] for each in words.file.get("added_tokens", ())}
    fresh = [
        token for token in sorted(words.ids, key=words.ids.__getitem__) if token not in known | dict.fromkeys(special)
    ]
    if isinstance(mine["vocab"], dict):
        number = 1 + max(known.values())
        mine["vocab"].update({token: number + n for n, token in enumerate(fresh)})
    elif fresh:  # numbered by their place: tokens that were added behind them would be pushed away
        if any(each["id"] >= len(mine["vocab"]) for each in made.get("added_tokens", ())):
            raise Wrong("a union of Unigram tokenizers with added tokens is not possible; choose one of them")
        scores = dict(map(tuple, other["vocab"]))
        mine["vocab"] += [[token, scores[token]] for token in fresh]
    if "merges" in mine:
        pairs = {_pair(merge) for merge in mine["merges"]}
        as_text = bool(mine["merges"]) and isinstance(mine["merges"][0], str)
        more = [_pair(merge) for merge in other.get("merges", ())]
        mine["merges"] += [" ".join(pair) if as_text else list(pair) for pair in more if pair not in pairs]
    for each in words.file.get("added_tokens", ()):
        _add_token(made, each)


def _pair(merge: str | Sequence[str]) -> tuple[str, ...]:
    return tuple(merge.split(" ", 1) if isinstance(merge, str) else merge)


def _add_token(made: dict[str, Any], token: Mapping[str, Any]) -> None:
    ids = _ids(made)
    if any(each["content"] == token["content"] for each in made.get("added_tokens", ())):
        return
    if token["content"] in ids and not token.get("special"):
        return
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    number = ids.get(token["content"], 1 + max(ids.values()))
    made.setdefault("added_tokens", []).append({**plain, **token, "id": number})
    made["added_tokens"].sort(key=lambda each: each["id"])
