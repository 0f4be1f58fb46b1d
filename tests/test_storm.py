"""The protocol under simulated storms, in short; `make storm` is the long version."""

import pytest

from tests.storm import proofs


@pytest.fixture(autouse=True)
def quiet() -> None:
    proofs.quiet()


@pytest.mark.parametrize("block", range(2))
def test_storms_end_with_the_bytes_of_a_calm_day(block: int) -> None:
    """The first of those that `make storm` sends."""
    for seed in range(8 * block, 8 * (block + 1)):
        proofs.storm(seed)


@pytest.mark.parametrize("seed", [1657, 2202, 4639])
def test_a_storm_ends_in_which_dozens_were_killed(seed: int) -> None:
    """Who judged a failure looked at all pulses anew for each word about it, and always claimed too late."""
    proofs.storm(seed)


@pytest.mark.parametrize("shape", proofs.TINY)
def test_a_crash_at_any_call_changes_nothing(shape: str) -> None:
    points = proofs.crash_points(proofs.TINY[shape])
    for number in points[3::14]:  # all of them in `make storm`
        proofs.crash_everywhere(proofs.TINY[shape], number)


@pytest.mark.parametrize("shape", proofs.TINY)
def test_a_crash_at_any_request_changes_nothing(shape: str) -> None:
    """The same in a bucket, where a crash is an outage."""
    points = proofs.crash_points(proofs.TINY[shape], kind=proofs.WatchedBucket)
    for number in points[5::11]:
        proofs.crash_everywhere(proofs.TINY[shape], number, kind=proofs.WatchedBucket)


def test_a_bucket_and_a_disk_give_the_same_bytes() -> None:
    for config in proofs.CONFIGS.values():
        assert proofs.Storm(1, config, proofs.CALM, kind=proofs.WatchedBucket).run() == proofs.undisturbed(config)


@pytest.mark.parametrize("rule", proofs.MUTANTS)
def test_each_rule_of_the_protocol_is_needed(rule: str) -> None:
    assert proofs.caught(proofs.MUTANTS[rule], seeds=40), f"the storms do not notice: {proofs.MUTANTS[rule].about}"


def test_a_storm_is_a_function_of_its_seed() -> None:
    config = proofs.CONFIGS["rank"]
    first, second = (proofs.Storm(11, config, proofs.STORM) for _ in range(2))
    assert first.run() == second.run()
    assert (first.world.now, first.server.calls) == (second.world.now, second.server.calls)


def test_a_second_lane_costs_no_time() -> None:
    """Not even where a round ends with an outcome that the first one publishes by itself."""
    for config in proofs.CONFIGS.values():
        one, two = (proofs.Storm(seed, config, proofs.CALM, workers=1) for seed in (0, 1))  # every second one has two
        assert one.run() == two.run() and two.world.now < 1.1 * one.world.now
