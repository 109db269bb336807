"""Stores and removals are counted in the ledger, by tier and reason, whoever listens."""

import random
from collections import Counter

import pytest
from builders import CHUNK_BYTES, CPU, allocate, keys, put, put_all
from event_fakes import REMOVED, STORED, BoundedPlugin, in_child, run_together
from fakes import OldPlugin

from lmcache.v1.storage_backend.placement import Placement

NUM_THREADS = 8


def removals(sm, tier=CPU):
    """Reason to number, without those that did not occur."""
    found = sm.gauges().removed.items()
    return {reason: n for (name, reason), n in found if name == tier and n}


def test_stores_and_removals_are_counted_without_a_subscriber(manager):
    put_all(manager, keys(4))
    manager.batched_remove(keys(1))
    put(manager, keys(1, first=2)[0], nbytes=CHUNK_BYTES // 2)
    manager.clear()

    assert manager.gauges().stored == {CPU: 5}
    assert removals(manager) == {"explicit": 1, "replaced": 1, "clear": 3}


def test_a_refresh_is_no_store(manager):
    put_all(manager, [*keys(2), *keys(2)])

    assert manager.gauges().stored == {CPU: 2}


def test_evictions_are_counted_by_entry_and_by_how_often_room_was_made(manager):
    put_all(manager, keys(8))
    allocate(manager, 3 * CHUNK_BYTES).ref_count_down()

    assert removals(manager) == {"capacity": 3}
    assert (manager.gauges().cpu.evictions, manager.gauges().cpu.evicted_entries) == (1, 3)


def test_an_eviction_asked_for_by_a_caller_counts_like_our_own(manager):
    put_all(manager, keys(2))
    backend = manager.local_cpu_backend
    with backend.cpu_lock:
        assert backend.remove(keys(1)[0], force=False)

    assert (manager.gauges().cpu.evictions, manager.gauges().cpu.evicted_entries) == (1, 1)


def test_tiers_are_counted_apart_and_a_closed_one_stays_counted(make_manager):
    sm = make_manager(tiers={"low": BoundedPlugin, "old": OldPlugin})
    put_all(sm, keys(5))
    sm.close_backend("low")

    assert sm.gauges().stored == {CPU: 5, "low": 5}
    assert removals(sm, "low") == {"capacity": 1, "clear": 4}
    assert removals(sm) == {}


def counted(events):
    """(stores by tier, removals by tier and reason) of a list of events."""
    stored = Counter(e.tier for e in events if e.kind is STORED)
    removed = Counter((e.tier, e.reason.value) for e in events if e.kind is REMOVED)
    return stored, removed


def random_step(sm, rng):
    """One call out of all that make transitions."""
    some = rng.sample(keys(14), rng.randint(1, 4))
    step = rng.randrange(8)
    if step <= 3:
        size = rng.choice([CHUNK_BYTES, CHUNK_BYTES // 2, 2 * CHUNK_BYTES])
        put(sm, some[0], size, rng.choice(list(Placement)))
    elif step == 4:
        obj = allocate(sm, rng.choice([1, 2, 3]) * CHUNK_BYTES)
        if obj is not None:
            obj.ref_count_down()
    elif step == 5:
        sm.batched_remove(some)
    elif step == 6:
        for obj in sm.batched_get(some):
            if obj is not None:
                obj.ref_count_down()
    elif rng.random() < 0.2:
        sm.set_hot_cache(False)
        sm.set_hot_cache(True)
    else:
        sm.clear()


@pytest.mark.parametrize("policy", ["LRU", "LFU", "FIFO", "MRU"])
def test_the_counts_are_those_of_a_subscriber_over_a_random_run(make_manager, policy):
    rng = random.Random(42)
    sm = make_manager(policy, num_chunks=6, tiers={"low": BoundedPlugin})
    subscription = sm.subscribe()
    for _ in range(600):
        random_step(sm, rng)

    stored, removed = counted(subscription.take())
    gauges = sm.gauges()
    assert gauges.stored == stored
    assert {reason: n for reason, n in gauges.removed.items() if n} == removed
    assert {reason for _, reason in removed} == {"capacity", "explicit", "clear", "replaced"}
    assert gauges.cpu.evicted_entries == removed[CPU, "capacity"]


def test_counts_from_many_threads_are_exact(make_manager):
    sm = make_manager(num_chunks=NUM_THREADS * 4)
    sets = [keys(4, first=1 + 4 * number) for number in range(NUM_THREADS)]

    def work(some_keys):
        for _ in range(50):
            put_all(sm, some_keys)
            sm.touch(some_keys)
            sm.batched_remove(some_keys)
            sm.touch(some_keys)

    run_together([lambda some=some: work(some) for some in sets])

    number = NUM_THREADS * 4 * 50
    assert sm.gauges().stored == {CPU: number}
    assert removals(sm) == {"explicit": number}
    assert sm.gauges().touches == {"refreshed": number, "present": 0, "gone": number}


def test_a_removal_reason_out_of_range_is_refused_before_anything_changes(manager):
    put_all(manager, keys(1))
    index = manager.local_cpu_backend.hot.index

    with pytest.raises(ValueError, match="removal reason"):
        index.remove(tuple(keys(1)), 6)
    with pytest.raises(ValueError, match="removal reason"):
        index.clear(False, False, 200)

    assert len(index) == 1
    assert removals(manager) == {}


def test_the_child_of_a_fork_goes_on_counting(manager):
    put_all(manager, keys(2))

    def check():
        put_all(manager, keys(1, first=3))
        assert manager.gauges().stored == {CPU: 3}
        assert manager.gauges().events_pending == 0

    in_child(check)
    assert manager.gauges().stored == {CPU: 2}
