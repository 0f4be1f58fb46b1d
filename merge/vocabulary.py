"""Models with different vocabularies: which tokens the result has, and where each of its embeddings comes from."""

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fleet.untrusted_model import check_words
from merge.donor import Donor, LazyTensor
from merge.json_files import read_json
from merge.merge_recipe import Token, TokenizerSettings
from merge.tensor_files import UserError

_MOST = 1 << 24  # tokens
PLAIN_TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
Place = tuple[tuple[str, int], ...]  # rows of models


@dataclass(frozen=True)
class Words:
    """A tokenizer.json, and each token's number."""

    file: Mapping[str, Any]
    ids: Mapping[str, int]

    @cached_property
    def used(self) -> set[int]:
        return set(self.ids.values())


class Vocabulary:
    def __init__(self, said: TokenizerSettings, models: Sequence[Donor], leader: Donor) -> None:
        names = [donor.reference for donor in models]
        if said.source not in ("union", "base", *names):
            known = ", ".join(["union", "base", *names])
            raise UserError(f"tokenizer_source is {said.source!r}; one of {known} is possible")
        self.rules, self.models, self.leader = said.tokens, models, leader
        self.words = {donor.reference: words_of(donor.folder) for donor in models}
        self.source = next((donor for donor in models if donor.reference == said.source), leader)
        made = copy.deepcopy(dict(self.words[self.source.reference].file))
        if said.source == "union":
            for donor in models:
                _add_all(made, self.words[donor.reference])
        _add_tokens(made, [{"content": token} for token in self.rules])
        self.result = Words(made, _ids(made))
        self.tokens = {id: token for token, id in self.result.ids.items()}
        self.told = {
            token: self._by_rule(rule, token)
            for token, rule in self.rules.items()
            if rule.source or rule.kind == "zero"
        }
        multiple = said.pad_to_multiple_of or 1
        self.size = -(-max(1 + max(self.tokens), self.source.vocabulary_size) // multiple) * multiple
        self.notes = self._notes()
        self._known: dict[tuple[Any, ...], list[Place]] = {}

    @cached_property
    def digest(self) -> str:
        """Of the tokenizer itself: a union's depends on the order of its models."""
        return hashlib.sha256(json.dumps(self.result.file, sort_keys=True).encode()).hexdigest()

    def aligned(self, model: str, tensors: Mapping[str, LazyTensor]) -> LazyTensor:
        """A model's tensor, row by row that of the result's tokens; some rows come from other models."""
        mine = tensors[model]
        self._check_rows(tensors)

        def rows(begin: int, end: int) -> Tensor:
            places = self._places(model, {name: each.shape[0] for name, each in tensors.items()})[begin:end]
            return torch.cat([_read(tensors, run, mine.shape[1:]) for run in _runs(places)])

        if len(mine.shape) > 1:
            return LazyTensor((self.size, *mine.shape[1:]), mine.dtype, rows)
        return LazyTensor(
            (self.size,), mine.dtype, lambda begin, end: rows(0, self.size).view(1, -1)
        )  # a bias: one row

    def _places(self, model: str, sizes: Mapping[str, int]) -> list[Place]:
        key = (model, *sizes.items())
        if key not in self._known:
            self._known[key] = [self._place(model, row, sizes) for row in range(self.size)]
        return self._known[key]

    def _place(self, model: str, row: int, sizes: Mapping[str, int]) -> Place:
        """The rows whose mean a row of the result is."""
        if (token := self.tokens.get(row)) is None:  # padding: its own, or that of the tokenizer's model
            padded = (name for name in (model, self.source.reference, *sizes) if row < sizes.get(name, 0))
            return tuple((name, row) for name in padded if row not in self.words[name].used)[:1]
        have = {name: id for name in sizes if (id := self.words[name].ids.get(token, sizes[name])) < sizes[name]}
        if model in have and not (token in self.rules and self.rules[token].force):
            return ((model, have[model]),)
        if token in self.told:
            return self.told[token]
        if len(have) > 1 and self.leader.reference in have:
            return ((self.leader.reference, have[self.leader.reference]),)
        return tuple(have.items())  # the mean of those that have it; of none: nothing

    def _by_rule(self, rule: Token, token: str) -> Place:
        """Where a rule says that the row of a token comes from; nowhere: it is zero."""
        if rule.source is None:
            return ()
        if rule.source not in self.words:
            raise UserError(f"tokenizer.tokens[{token!r}]: {rule.source} is not one of the models")
        ids, wanted = self.words[rule.source].ids, token if rule.token is None else rule.token
        if rule.token_id is None and wanted not in ids:
            raise UserError(f"tokenizer.tokens[{token!r}]: {rule.source} has no token {wanted!r}")
        return ((rule.source, ids[wanted] if rule.token_id is None else rule.token_id),)

    def _check_rows(self, tensors: Mapping[str, LazyTensor]) -> None:
        """What a rule takes from a model must be there."""
        for token, ((model, row),) in ((token, place) for token, place in self.told.items() if place):
            rows = tensors[model].shape[0] if model in tensors else 0
            if row >= rows:
                raise UserError(f"tokenizer.tokens[{token!r}]: {model} has {rows} embeddings, not number {row}")

    def _notes(self) -> list[str]:
        known = {token for words in self.words.values() for token in words.ids}
        zero = [token for token in self.result.ids if token not in known and not self.rules[token].source]
        return [f"the token {token!r} is in no model: its embedding is zero" for token in zero]


def _runs(places: Sequence[Place]) -> Iterator[tuple[Place, int]]:
    """Rows that lie one after the other in the same model are read at once: where they begin, and how many."""
    begin, count = places[0], 0
    for place in places:
        if count and len(place) == len(begin) == 1 and place == ((begin[0][0], begin[0][1] + count),):
            count += 1
            continue
        if count:
            yield begin, count
        begin, count = place, 1
    yield begin, count


def _read(tensors: Mapping[str, LazyTensor], run: tuple[Place, int], rest: tuple[int, ...]) -> Tensor:
    places, count = run
    if not places:
        return torch.zeros(count, *rest)
    return torch.stack([_some(tensors[name], row, row + count).float() for name, row in places]).mean(0)


def _some(stored: LazyTensor, begin: int, end: int) -> Tensor:
    return stored.read_rows(begin, end) if len(stored.shape) > 1 else stored.read_rows(0, 1).view(-1)[begin:end]


# -- tokenizer.json ----------------------------------------------------------------------------------------------------


def words_of(folder: Path) -> Words:
    try:
        file = read_json(folder / "tokenizer.json")
        check_words(file, f"{folder}/tokenizer.json")
        ids = _ids(file)
        for merge in file["model"].get("merges", ()):
            pair_of(merge)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder}: vocabularies need a tokenizer.json that can be read: {error!r}") from None
    if not ids or not all(isinstance(token, str) and type(id) is int and 0 <= id < _MOST for token, id in ids.items()):
        raise UserError(f"{folder}: a tokenizer.json with tokens, each with its number, is expected")
    return Words(file, ids)


def _ids(file: Mapping[str, Any]) -> dict[str, int]:
    vocabulary = file["model"]["vocab"]
    pieces = vocabulary if isinstance(vocabulary, dict) else {piece: n for n, (piece, _) in enumerate(vocabulary)}
    return {**pieces, **{each["content"]: each["id"] for each in file.get("added_tokens", ())}}


def _add_all(made: dict[str, Any], words: Words) -> None:
    """What another tokenizer has beside: its tokens, and how they are put together. New ones come last."""
    mine, other = made["model"], words.file["model"]
    known = _ids(made)
    if words.ids.keys() <= known.keys():
        return
    if mine.get("type") != other.get("type") or not isinstance(mine["vocab"], dict):
        raise UserError(
            f"tokenizers of the kinds {mine.get('type')} and {other.get('type')} have no union; "
            "choose one of them as tokenizer_source"
        )
    theirs = sorted(other["vocab"], key=other["vocab"].__getitem__)
    fresh = [token for token in theirs if token not in known]
    number = 1 + max(known.values())
    mine["vocab"] |= {token: known[token] for token in theirs if token in known}  # some were only added to mine
    mine["vocab"] |= {token: number + n for n, token in enumerate(fresh)}
    if "merges" in mine:
        pairs = {pair_of(merge) for merge in mine["merges"]}
        as_text = bool(mine["merges"]) and isinstance(mine["merges"][0], str)
        more = [pair_of(merge) for merge in other.get("merges", ())]
        mine["merges"] += [" ".join(pair) if as_text else list(pair) for pair in more if pair not in pairs]
    _add_tokens(made, words.file.get("added_tokens", ()))


def pair_of(merge: str | Sequence[str]) -> tuple[str, str]:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return str(left), str(right)


def _add_tokens(made: dict[str, Any], tokens: Sequence[Mapping[str, Any]]) -> None:
    """Those that are no pieces of words; a special one may be a piece already."""
    ids, there = _ids(made), made.setdefault("added_tokens", [])
    added = {each["content"] for each in there}
    for token in tokens:
        text = token["content"]
        if text in added or (text in ids and not token.get("special")):
            continue
        ids.setdefault(text, 1 + max(ids.values()))
        added.add(text)
        there.append({**PLAIN_TOKEN, **token, "id": ids[text]})
    there.sort(key=lambda each: each["id"])


def different_words(one: Donor, other: Donor) -> list[str]:
    """Tokens that do not stand for the same row in both; none where a tokenizer does not say."""
    files = [each.folder / "tokenizer.json" for each in (one, other)]
    try:
        if files[0].read_bytes() == files[1].read_bytes():
            return []
        mine, theirs = (words_of(file.parent).ids for file in files)
    except (UserError, OSError):
        return []
    return sorted(word for word in {*mine, *theirs} if mine.get(word) != theirs.get(word))
