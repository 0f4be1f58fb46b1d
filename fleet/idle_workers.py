"""How many workers would have nothing to do in a round, and which POPULATION_SIZE would keep all of them busy."""

import math


def crowded(workers: int, threads: int, processors: int) -> str:
    """Where workers without a device of their own are more than there are processors for."""
    fit = max(1, processors // threads)
    if workers <= fit:
        return ""
    shared = "1 processor" if processors == 1 else f"{processors} processors"
    return f"{workers} workers share {shared}: {fit} of them (--workers) make the same as soon, in less memory"


def idle(workers: int, slots: int) -> str:
    """What keeps some of them waiting, and how many slots would not; nothing where all have the same to do.
    Without a number of slots, it differs from round to round."""
    if not slots:
        return ""
    if workers > slots:
        return f"{workers - slots} workers have nothing to do: POPULATION_SIZE {workers}"
    turns = math.ceil(slots / workers)
    if workers * turns == slots:
        return ""
    share = 1 - slots / (workers * turns)
    return f"{share:.0%} of the workers wait for the last ones of each round: POPULATION_SIZE {turns * workers}"
