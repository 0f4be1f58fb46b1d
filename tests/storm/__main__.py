"""The long proof: many storms, every crash point, and every rule broken on purpose."""

import sys
from collections.abc import Callable, Iterable
from itertools import count, islice
from multiprocessing import get_context
from multiprocessing.pool import Pool

from cyclopts import App
from rich.progress import track

from tests.storm import proofs

_CHUNKS, _CHUNK = 10, 8  # what a storm leaves suspended stays in memory, so a process has so many chunks of storms
PLACES = (("on a disk", proofs.Watched, ()), ("in a bucket", proofs.WatchedBucket, (1,)))

app = App(help=__doc__, version_flags=[])


@app.default
def main(
    seeds: int = 2000,
    first: int = 0,
    jobs: int = 2,
    crashes: bool = True,
    mutants: bool = True,
    every: int = 1,
    bucket: bool = False,
) -> int:
    """Run simulated storms over the real protocol code, every fourth in a bucket; a broken promise comes with its seed.

    For example:

        python -m tests.storm --seeds 100 --no-crashes

    Parameters
    ----------
    seeds
        How many storms.
    first
        The first seed.
    jobs
        Processes to use.
    crashes
        Also let a worker die before and after each single call of a run, and the server crash there.
    mutants
        Also break each rule of the protocol on purpose, and see that the storms notice.
    every
        Of the calls at which a worker may die, only every N-th.
    bucket
        Only in a bucket: of the seeds from the first one on, so many as are of such storms.
    """
    broken = 0
    with get_context("spawn").Pool(jobs, proofs.quiet, maxtasksperchild=_CHUNKS) as pool:
        some = islice(filter(proofs.over_a_bucket, count(first)) if bucket else count(first), seeds)
        broken += each(pool, f"{seeds} storms", proofs.storm_problem, some)
        for name, config in proofs.TINY.items() if crashes else ():
            for where, kind, more in PLACES[bucket:]:
                points = proofs.crash_points(config, kind=kind)[::every]
                cases = ((name, point, *more) for point in points)
                broken += each(pool, f"{name}, {where}: {3 * len(points)} crashes", proofs.crash_problem, cases)
    for name, mutant in proofs.MUTANTS.items() if mutants else ():
        if bucket and issubclass(mutant.kind, proofs.Watched):
            continue
        found = proofs.caught(mutant, 40)
        print(f"{name}: {'noticed: ' + found[:160] if found else 'NOT NOTICED'}", flush=True)
        broken += not found
    print(f"{broken} broken promises")
    return 1 if broken else 0


def each(pool: Pool, title: str, test: Callable[..., str], cases: Iterable[object]) -> int:
    cases = list(cases)
    found = [problem for problem in track(pool.imap(test, cases, _CHUNK), title, len(cases)) if problem]
    for problem in found[:10]:
        print(problem, flush=True)
    print(f"{title}: {len(found)} went wrong", flush=True)
    return len(found)


if __name__ == "__main__":
    sys.exit(app(result_action="return_value"))
