"""What a run asks of its bucket, counted where the real code runs on a simulated one."""

from tests.storm.counted import requests, waiting


def test_who_waits_asks_at_most_twenty_times_a_minute_whatever_others_hold() -> None:
    for held in (3, 24):
        assert max(waiting(held)[1:]) <= 20, "after a first minute, in which it learns what there is"


def test_workers_and_slots_do_not_multiply() -> None:
    """What a round costs is so much a slot, a worker, and a minute that somebody works or waits."""
    few, many = ({slots: total(slots, workers) for slots in (12, 36)} for workers in (4, 12))
    more = {slots: many[slots] - few[slots] for slots in few}
    assert more[36] - more[12] < (36 - 12) * (12 - 4) / 2, "each worker reads what is made in each slot"


def total(slots: int, workers: int) -> float:
    """Requests of a round."""
    return sum(requests(slots, workers, 300.0, rounds := 2, algorithm="rank")[0].values()) / rounds
