"""How many workers would have nothing to do in a round, and which POPULATION_SIZE would keep all of them busy."""

import math


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
