"""How many workers would have nothing to do in a round, and which POPULATION_SIZE would keep all of them busy."""

import math

from fleet.plain import several


def crowded(workers: int, threads: int, processors: int) -> str:
    """Where workers without a device of their own are more than there are processors for."""
    fit = max(1, processors // threads)
    if workers <= fit:
        return ""
    shared = several(processors, "processor")
    return f"{workers} workers share {shared}: {fit} of them (--workers) make the same as soon, in less memory"


def idle(workers: int, slots: int) -> str:
    """What keeps some of them waiting, and how many slots would not; nothing where all have the same to do.
    Without a number of slots, it differs from round to round."""
    if not slots:
        return ""
    if (few := workers - slots) > 0:
        return f"{several(few, 'worker')} {'has' if few == 1 else 'have'} nothing to do: POPULATION_SIZE {workers}"
    turns = math.ceil(slots / workers)
    if workers * turns == slots:
        return ""
    share = 1 - slots / (workers * turns)
    return f"{share:.0%} of the workers wait for the last ones of each round: POPULATION_SIZE {turns * workers}"
