"""What a manager tells of itself: touches, events, waits, pins and the pool."""

import os
import threading
from collections import OrderedDict

import pytest
from builders import (
    CHUNK_BYTES,
    CPU,
    allocate,
    hold,
    keys,
    make_config,
    make_metadata,
    put,
    put_all,
)
from event_fakes import BoundedPlugin, run_together
from fakes import FakeClock, OldPlugin, RaisingPlugin, StoredBytes

from lmcache.v1.gauges import CpuTierGauges, PinTotals
from lmcache.v1.pin_table import PinOwner
from lmcache.v1.storage_backend.cache_events import RemovalReason
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.manager_gauges import ManagerGaugesReader
from lmcache.v1.storage_backend.residency_ledger import ResidencyLedger
from lmcache.v1.storage_backend.residency_moves import ResidencyMoves
from lmcache.v1.storage_backend.storage_manager import StorageManager
from lmcache.v1.storage_backend.tier_set import TierSet
from lmcache.v1.storage_backend.tier_walk import TierWalk

NO_TOUCHES = {"refreshed": 0, "present": 0, "gone": 0}


def allocate_waiting(sm):
    template = hold(sm, keys(1)[0])
    made = sm.allocate(template.get_shapes(), template.get_dtypes(), template.get_memory_format())
    template.ref_count_down()
    return made


def test_a_new_manager_has_counted_nothing(manager):
    gauges = manager.gauges()

    assert gauges.touches == NO_TOUCHES
    assert gauges.stored == {CPU: 0}
    assert gauges.removed == {(CPU, reason.value): 0 for reason in RemovalReason}
    assert (gauges.events_lost, gauges.events_pending, gauges.event_lag_seconds) == (0, 0, 0)
    assert gauges.cpu == CpuTierGauges(
        capacity_bytes=8 * CHUNK_BYTES, largest_free_bytes=8 * CHUNK_BYTES
    )


# --- touches -------------------------------------------------------------------------------------
def test_touched_keys_are_counted_by_verdict(make_manager):
    sm = make_manager(num_chunks=2, tiers={"low": BoundedPlugin})
    put_all(sm, keys(3))

    result = sm.touch(keys(6))

    assert (result.refreshed, result.present, result.gone) == (2, 1, 3)
    assert sm.gauges().touches == {"refreshed": 2, "present": 1, "gone": 3}


def test_a_demotion_a_lookup_and_a_refused_touch_are_no_touches(manager):
    put_all(manager, keys(2))

    manager.demote(keys(2))
    manager.batched_contains(keys(2), pin=True)
    manager.touch_cache()
    manager.batched_unpin(keys(2))
    with pytest.raises(TypeError):
        manager.touch(["no key"])

    assert manager.gauges().touches == NO_TOUCHES


def test_touch_errors_and_tier_errors_are_gauges(make_manager):
    sm = make_manager(tiers={"broken": RaisingPlugin})
    put_all(sm, keys(2))

    sm.touch(keys(2))

    assert sm.gauges().touch_errors == sm.touch_errors == 2
    assert sm.gauges().tier_errors == 0


def test_a_call_of_a_tier_that_raised_is_counted(make_manager):
    sm = make_manager(tiers={"old": OldPlugin})
    sm.storage_backends["old"].data = None
    put(sm, keys(1)[0])

    assert sm.gauges().tier_errors == 1


# --- events --------------------------------------------------------------------------------------
def test_events_wait_until_they_are_taken_and_the_lost_are_counted(manager):
    first, second = manager.subscribe(), manager.subscribe(capacity=2)
    put_all(manager, keys(5))

    assert manager.gauges().events_lost == manager.num_events_lost == 3
    assert manager.gauges().events_pending == 5 + 2 + 1  # a LOST stands before the two

    first.take()
    second.take()

    assert manager.gauges().events_lost == 3
    assert (manager.gauges().events_pending, manager.gauges().event_lag_seconds) == (0, 0)


def test_event_lag_is_the_age_of_the_oldest_event_over_all_subscriptions():
    clock = FakeClock()
    ledger = ResidencyLedger(clock)
    page = ledger.register_tier("tier")
    slow, fast = (ledger.subscribe(None, None, None, 8) for _ in range(2))

    page.stored(keys(1)[0], StoredBytes(1))
    clock.advance(3)
    fast.take()
    page.removed(keys(1)[0], StoredBytes(1), RemovalReason.EXPLICIT)
    clock.advance(4)

    assert ledger.event_gauges().lag_seconds == 7
    slow.take()
    assert ledger.event_gauges().lag_seconds == 4
    fast.take()
    assert ledger.event_gauges() == (0, 0, 0)


def test_a_subscription_that_was_dropped_or_closed_is_not_waited_for(manager):
    closed = manager.subscribe()
    dropped = manager.subscribe()
    put(manager, keys(1)[0])

    closed.close()
    del dropped

    assert (manager.gauges().events_pending, manager.gauges().event_lag_seconds) == (0, 0)


def test_gauges_can_be_read_while_others_subscribe(manager):
    def subscribe():
        kept = [manager.subscribe() for _ in range(200)]
        assert len(kept) == 200

    def read():
        for _ in range(200):
            manager.gauges()

    run_together([subscribe, subscribe, read, read])


# --- memory --------------------------------------------------------------------------------------
def test_pool_and_object_gauges_follow_what_is_held_and_return_to_zero(manager):
    objs = [allocate(manager) for _ in range(3)]
    manager.batched_put(keys(2), objs[:2])

    now = manager.gauges().cpu
    assert (now.used_bytes, now.largest_free_bytes) == (3 * CHUNK_BYTES, 5 * CHUNK_BYTES)
    assert (now.num_entries, now.num_memory_objs) == (2, 3)

    objs[2].ref_count_down()
    manager.clear()

    now = manager.gauges().cpu
    assert (now.used_bytes, now.num_entries, now.num_memory_objs) == (0, 0, 0)


def test_pins_are_counted_by_object_by_pin_and_until_their_use_is_in_the_order(manager):
    put_all(manager, keys(3))
    manager.batched_contains(keys(3), pin=True, owner="a")
    manager.batched_contains(keys(2), pin=True, owner="b")

    now = manager.gauges().cpu
    assert (now.num_pinned_objs, now.num_pins, now.num_keys_in_request) == (3, 5, 5)

    manager.touch_cache("a")
    assert manager.gauges().cpu.num_keys_in_request == 2

    manager.batched_unpin(keys(3), owner="a")
    manager.batched_unpin(keys(2), owner="b")
    now = manager.gauges().cpu
    assert (now.num_pinned_objs, now.num_pins, now.num_keys_in_request) == (0, 0, 0)


def test_keys_in_request_are_seen_from_any_thread(manager):
    put_all(manager, keys(2))
    pinning = threading.Thread(target=manager.batched_contains, args=(keys(2), None, True))
    pinning.start()
    pinning.join()

    assert manager.gauges().cpu.num_keys_in_request == 2
    manager.batched_unpin(keys(2))


def test_forced_and_unmatched_releases_of_pins_are_counted(make_manager):
    sm = make_manager(pin_timeout_sec=5)
    clock = sm.local_cpu_backend.pins.clock = FakeClock()
    put_all(sm, keys(2))
    sm.batched_contains(keys(2), pin=True, owner="a")
    clock.advance(6)

    sm.local_cpu_backend.pins.expire()
    sm.batched_unpin(keys(2), owner="a")

    now = sm.gauges().cpu
    assert (now.forced_releases, now.unmatched_releases) == (2, 2)


def test_pins_in_tiers_that_know_no_owners_are_counted_beside_the_cpu_tier_s():
    """Plug-ins written for 0.5.6: their pins have tables of the tier set's."""
    low, lower = OldPlugin(), OldPlugin()
    low.data.update(dict.fromkeys(keys(3)))
    lower.data.update(dict.fromkeys(keys(2, first=9)))
    tiers = TierSet(OrderedDict(low=low, lower=lower), ResidencyLedger(), CPU, 5.0, 3600.0)
    walk, moves = TierWalk(tiers, CPU), ResidencyMoves(tiers, CPU)
    reader = ManagerGaugesReader(tiers.ledger, walk, moves, tiers)
    assert reader.read(None).plugin_pins == PinTotals()
    walk.batched_contains(keys(3), None, True, PinOwner("a"))
    walk.batched_contains(keys(2, first=9), None, True, PinOwner("b"))
    assert reader.read(None).plugin_pins == PinTotals(num_pins=5)

    clock = tiers.tier("low").pins.clock = FakeClock()
    clock.advance(1e9)
    tiers.tier("low").pins.expire()
    walk.release_pins(keys(1), ["low"], PinOwner("a"))

    now = reader.read(None)
    assert (now.plugin_pins.num_pins, now.plugin_pins.forced_releases) == (2, 3)
    assert now.plugin_pins.unmatched_releases == 1
    assert now.cpu == CpuTierGauges()
    walk.release_lookup(PinOwner("b"))


def test_an_allocation_that_waits_in_vain_is_a_wait_and_a_failed_one(make_manager):
    sm = make_manager(num_chunks=2)
    put_all(sm, keys(2))
    sm.batched_contains(keys(2), pin=True)

    assert allocate_waiting(sm) is None

    now = sm.gauges().cpu
    assert (now.allocation_waits, now.failed_waits) == (1, 1)
    assert (now.failed_allocations, now.failed_evictions) == (1, 1)
    sm.batched_unpin(keys(2))


def test_a_wait_that_ends_well_is_no_failed_one(make_manager):
    sm = make_manager(num_chunks=2, blocking_timeout_secs=60)
    put_all(sm, keys(2))
    sm.batched_contains(keys(2), pin=True, owner="a")
    made = []
    waiting = threading.Thread(target=lambda: made.append(allocate_waiting(sm)), daemon=True)
    waiting.start()
    while not sm.gauges().cpu.allocation_waits:
        assert waiting.is_alive(), "the allocation did not wait"
        os.sched_yield()
    sm.batched_unpin(keys(2), owner="a")
    waiting.join(60)

    now = sm.gauges().cpu
    assert (now.allocation_waits, now.failed_waits, now.failed_allocations) == (1, 0, 0)
    made[0].ref_count_down()


def test_an_allocation_that_need_not_wait_is_no_wait(manager):
    put_all(manager, keys(8))

    allocate_waiting(manager).ref_count_down()

    assert manager.gauges().cpu.allocation_waits == 0


@pytest.mark.parametrize("nbytes", [CHUNK_BYTES, 9 * CHUNK_BYTES])
def test_an_allocation_without_eviction_fails_without_a_failed_eviction(manager, nbytes):
    put_all(manager, keys(8))

    assert allocate(manager, nbytes, eviction=False) is None

    now = manager.gauges().cpu
    assert (now.failed_allocations, now.failed_evictions) == (1, 0)


# --- managers that lack something -----------------------------------------------------------------
def test_a_scheduler_without_a_cpu_tier_reads_zeros():
    sm = StorageManager(make_config(), make_metadata(role="scheduler"))
    sm.touch(keys(3))

    assert sm.local_cpu_backend is None
    assert sm.gauges().cpu == CpuTierGauges()
    assert (sm.gauges().stored, sm.gauges().removed) == ({}, {})
    assert sm.gauges().touches == {"refreshed": 0, "present": 0, "gone": 3}
    sm.close()


def test_a_backend_built_without_its_init_reads_zeros(make_manager):
    class Bare(LocalCPUBackend):
        def __init__(self):
            pass

    sm = make_manager()
    cpu, sm.local_cpu_backend = sm.local_cpu_backend, Bare()
    assert sm.gauges().cpu == CpuTierGauges()
    sm.local_cpu_backend = cpu


def test_a_closed_manager_can_still_be_read(make_manager):
    sm = make_manager()
    put_all(sm, keys(3))
    sm.close()

    assert sm.gauges().stored == {CPU: 3}
    assert sm.gauges().removed[CPU, "clear"] == 3
    assert sm.gauges().cpu.num_entries == 0


def test_two_managers_count_apart(make_manager):
    first, second = make_manager(), make_manager()
    put_all(first, keys(2))
    second.touch(keys(1))

    assert (first.gauges().stored, second.gauges().stored) == ({CPU: 2}, {CPU: 0})
    assert first.gauges().touches == NO_TOUCHES
    assert first.gauges().source is first.gauges().source is not second.gauges().source
