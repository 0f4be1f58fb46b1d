"""Seeds that follow from where in a run a step is."""

_WORD, _PRIME = (1 << 64) - 1, (1 << 61) - 1


def mixed(*numbers: int) -> int:
    """A number of 64 bits that follows from these (xxHash's lanes, in the constants of CPython's tuples): seeds of
    dropout are the same in every Python."""
    mixed = first = 2870177450012600261
    for number in numbers:
        mixed = (mixed + number % _PRIME * 14029467366897019727) & _WORD
        mixed = ((mixed << 31 | mixed >> 33) & _WORD) * 11400714785074694791 & _WORD
    return (mixed + (len(numbers) ^ first ^ 3527539)) & _WORD
