"""Who becomes a parent: the rules that fitness decides by. Pure."""

import numpy as np


def chosen(rule: str, there: int, count: int, size: int, dice: np.random.Generator) -> list[int]:
    """The numbers of so many parents, of those that are there, the fittest of whom is 0. In tournaments, `size` take
    part."""
    count = min(count, there)
    found: np.ndarray | list[int]
    match rule:
        case "rank":
            chances = np.arange(there, 0, -1, dtype=float)
            found = dice.choice(there, count, replace=False, p=chances / chances.sum())
        case "tournament" | "pareto":
            found, left = [], list(range(there))
            for _ in range(count):
                found.append(left.pop(min(dice.choice(len(left), min(size, len(left)), replace=False))))
        case _:
            found = dice.choice(there, count, replace=False)
    return [int(n) for n in found]
