"""Patterns that a file brings along, matched in a time that grows with the text alone.

Python's own `re` may take longer than anybody lives for a pattern that means harm. Here a pattern is a set of places
that one goes through letter by letter; what it may say is what adapters say of modules' names.
"""

from dataclasses import dataclass, field
from typing import Any

from merge.files import UserError

_LONGEST, _DEEPEST = 512, 8
_PLAIN = "_-/ "  # signs that mean themselves
_CLASSES = {"d": "0123456789", "w": "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_"}
_BEGIN, _END, _MATCH, _FORK = "begin", "end", "match", "fork"


@dataclass(frozen=True)
class _Letters:
    """Those that fit at a place."""

    some: str = ""
    but: bool = True  # all but these

    def __contains__(self, letter: str) -> bool:
        return (letter in self.some) != self.but


_Place = tuple[str | _Letters, list[int]]  # what it asks for, and where one may go then
_Part = tuple[str, Any]  # a kind of part, and what it is made of


@dataclass
class Pattern:
    """Of a module's name: of the whole of it, or of its end behind a dot, as PEFT has it."""

    text: str
    at: int = 0
    places: list[_Place] = field(default_factory=list)
    _next: dict[tuple[frozenset[int], str], frozenset[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.text) > _LONGEST:
            raise UserError(f"the pattern {self.text[:40]!r}... is longer than {_LONGEST} characters")
        whole = self._either(0)
        if self.at < len(self.text):
            raise self._refused()
        self._start = self._placed(whole, self._place(_MATCH))

    def matches(self, name: str) -> bool:
        here = self._from({self._start}, _BEGIN)
        for letter in name:
            key = here, letter
            if key not in self._next:
                there = {to for what, out in map(self.places.__getitem__, here) if _fits(what, letter) for to in out}
                self._next[key] = self._from(there | ({self._start} if letter == "." else set()))
            here = self._next[key]
        return any(self.places[n][0] == _MATCH for n in self._from({*here}, _END))

    def _from(self, here: set[int], true: str = "") -> frozenset[int]:
        """With all places that are reached without a letter more."""
        left = [*here]
        while left:
            what, out = self.places[left.pop()]
            if what in (_FORK, true):
                left += (fresh := {n for n in out if n not in here})
                here.update(fresh)
        return frozenset(here)

    # -- its parts -----------------------------------------------------------------------------------------------------

    def _either(self, depth: int) -> _Part:
        several = [self._row(depth)]
        while self._took("|"):
            several.append(self._row(depth))
        return "either", several

    def _row(self, depth: int) -> _Part:
        parts: list[_Part] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            part = self._one(depth)
            sign = next((each for each in "*+?" if self._took(each)), "")
            if sign:
                self._took("?")  # as few as possible: all the same to whoever only asks whether it fits
            if self.text[self.at : self.at + 1] in ("*", "+", "?", "{"):
                raise self._refused()
            parts.append((sign, part) if sign else part)
        return "row", parts

    def _one(self, depth: int) -> _Part:
        if self._took("("):
            if self._took("?") and not self._took(":") or depth == _DEEPEST:
                raise self._refused()
            inner = self._either(depth + 1)
            if not self._took(")"):
                raise self._refused()
            return inner
        for sign, kind in (("^", _BEGIN), ("$", _END), (".", _Letters())):
            if self._took(sign):
                return "one", kind
        return "one", self._letters() if self._took("[") else _Letters(self._letter(), False)

    def _letter(self) -> str:
        """One, or those that an escape stands for."""
        escaped = self._took("\\")
        letter = self.text[self.at : self.at + 1]
        known = not letter.isalnum() or letter in _CLASSES if escaped else letter.isalnum() or letter in _PLAIN
        if not letter or not known:
            raise self._refused()
        self.at += 1
        return _CLASSES.get(letter, letter) if escaped else letter

    def _letters(self) -> _Letters:
        but, some = self._took("^"), ""
        while not self._took("]"):
            first = "." if self._took(".") else self._letter()
            if (
                len(first) == 1
                and self.text[self.at : self.at + 1] == "-"
                and self.text[self.at + 1 : self.at + 2] != "]"
            ):
                self.at += 1
                some += "".join(map(chr, range(ord(first), ord(self._letter()[:1]) + 1)))
            else:
                some += first
        return _Letters(some, but)

    def _took(self, sign: str) -> bool:
        here = self.text.startswith(sign, self.at)
        self.at += here
        return here

    def _refused(self) -> UserError:
        return UserError(
            f"the pattern {self.text[:80]!r} is not understood at {self.text[self.at : self.at + 10]!r}: names, "
            r". \. \d \w [...] (...) | * + ? ^ $ are; write the modules' names instead"
        )

    # -- the places that one goes through ------------------------------------------------------------------------------

    def _place(self, what: str | _Letters, *out: int) -> int:
        self.places.append((what, [*out]))
        return len(self.places) - 1

    def _placed(self, part: _Part, after: int) -> int:
        """Where a part begins that goes on at another place."""
        kind, inner = part
        if kind == "one":
            return self._place(inner, after)
        if kind == "either":
            return self._place(_FORK, *(self._placed(each, after) for each in inner))
        if kind == "row":
            for each in reversed(inner):
                after = self._placed(each, after)
            return after
        fork = self._place(_FORK, after)
        begin = self._placed(inner, after if kind == "?" else fork)
        self.places[fork][1].append(begin)
        return begin if kind == "+" else fork


def _fits(what: str | _Letters, letter: str) -> bool:
    return isinstance(what, _Letters) and letter in what
