"""Small files of what a recipe is made of, read side by side: a slow disk takes longer to answer than to send them."""

import itertools
from collections.abc import Callable, Iterable
from functools import partial

from fleet import faults
from fleet.checksum import checksum
from fleet.payload import InputMember

SMALL = 1 << 20  # bytes of files that are read together
_TOGETHER = 16 << 20  # bytes of all those that a recipe begins with

File = tuple[InputMember, str]


def bring(files: Iterable[File]) -> set[str]:
    """Read them, unless they are at hand already; says which are now. One after the other where the disk is fast."""
    there = [(input, name) for input, name in files if name in input.files and not _is_here(input, name)]
    small = [(input, name) for input, name in there if input.files[name][0] <= SMALL]
    sizes = itertools.accumulate(input.files[name][0] for input, name in small)
    small = small[: sum(size <= _TOGETHER for size in sizes)]
    if small:
        small[0][0].store.host.in_short([partial(_bring, *file) for file in small])
    return {input.place(name) for input, name in small}


def _is_here(input: InputMember, name: str) -> bool:
    return name in input.held or input.store.at_hand.holds(input.place(name))


def _bring(input: InputMember, name: str) -> None:
    """It was read here, by whom it will be taken."""
    if read(input, name):
        input.store.bytes_at_hand -= input.files[name][0]


def read(input: InputMember, name: str, hurry: Callable[[], bool] = lambda: False) -> bool:
    """To be at hand. What is wrong with it, whoever asks for it will see."""
    file, data, seen = input.place(name), bytearray(), checksum(input.files[name][1])
    with input.store.at_hand.coming(file) as bring:
        try:
            for block in input.store.blocks(file):
                if hurry():
                    return False
                data += block
                seen.update(block)
        except faults.Fault:
            return False
        if whole := (len(data), seen.hexdigest()) == input.files[name]:
            bring(bytes(data))
        return whole
