"""Pinned lookups through the manager: what their release counts, and who lets old pins go."""

import threading

import pytest
from builders import CPU, keys, order, put, put_all
from fakes import OldPlugin

from lmcache.v1.pin_monitor import PinMonitor

MONITOR_THREAD = "lmcache-pin-monitor"


@pytest.fixture
def no_monitor_runs():
    """The process's pin monitor has no thread until somebody pins."""
    running = [t for t in threading.enumerate() if t.name == MONITOR_THREAD]
    PinMonitor.DestroyInstance()
    for thread in running:
        thread.join(timeout=60)
    yield
    PinMonitor.DestroyInstance()


def monitor_threads():
    return [t.name for t in threading.enumerate() if t.name == MONITOR_THREAD]


@pytest.mark.parametrize("tier", [CPU, "old"])
@pytest.mark.parametrize("owner", ["A", None])
def test_the_first_pin_in_a_tier_starts_the_monitor(make_manager, no_monitor_runs, tier, owner):
    if (tier, owner) == ("old", None):
        return  # a tier of 0.5.6 keeps the pins that nobody owns itself
    sm = make_manager(tiers={"old": OldPlugin})
    put(sm, keys(1)[0], location=tier)
    assert sm.batched_contains(keys(1), [tier]) == (1, {tier: keys(1)})
    assert sm.batched_contains(keys(1, first=9), [tier], pin=True, owner=owner)[0] == 0
    assert monitor_threads() == []

    assert sm.batched_contains(keys(1), [tier], pin=True, owner=owner)[0] == 1

    assert monitor_threads() == [MONITOR_THREAD]
    sm.batched_unpin(keys(1), [tier], owner=owner)


def test_a_lookup_that_was_never_counted_counts_when_its_id_is_released(make_manager):
    sm = make_manager(num_chunks=4)
    put_all(sm, keys(4))
    sm.batched_contains(keys(2), pin=True, owner="A")
    assert order(sm) == [1, 2, 3, 4]

    sm.release_lookup("A")

    assert order(sm) == [3, 4, 2, 1]


def test_a_lookup_that_was_counted_does_not_count_again_when_its_id_is_released(make_manager):
    sm = make_manager(num_chunks=4)
    put_all(sm, keys(4))
    sm.batched_contains(keys(2), pin=True, owner="A")
    sm.touch_cache("A")
    sm.touch(keys(2, first=3))

    sm.release_lookup("A")

    assert order(sm) == [2, 1, 4, 3]
