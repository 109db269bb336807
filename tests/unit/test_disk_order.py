"""What leaves the disk tier, in which order, and what a put may take."""

import pytest
from builders import (
    CHUNK_BYTES,
    CPU,
    keys,
    put,
    put_all,
    put_batch,
)
from disk_builders import (
    DISK,
    bytes_on_disk,
    check_disk,
    disk_of,
    files_of,
    gate_files,
    order_below,
    read,
    store_below,
)

from lmcache.v1.storage_backend.cache_events import EventKind, RemovalReason
from lmcache.v1.storage_backend.placement import Placement
from lmcache.v1.storage_backend.touch import TouchVerdict


@pytest.mark.parametrize("policy", ["LRU", "LFU", "FIFO", "MRU"])
def test_the_policy_decides_what_leaves_the_disk(make_disk, policy):
    sm = make_disk(4, policy=policy)
    store_below(sm, keys(4))
    sm.touch(keys(1))

    store_below(sm, keys(1, first=9))

    gone = {"LRU": 2, "LFU": 2, "FIFO": 1, "MRU": 4}[policy]
    assert gone not in order_below(sm)
    assert len(order_below(sm)) == 4


def test_a_get_is_a_use_in_the_disk_s_order(make_disk):
    sm = make_disk(3, local_cpu=False)
    store_below(sm, keys(3))

    assert read(sm, keys(1)[0])
    store_below(sm, keys(1, first=9))

    assert order_below(sm) == [3, 1, 9]


def test_the_head_of_a_batch_leaves_last(make_disk):
    sm = make_disk(4)
    put_batch(sm, keys(4))

    assert order_below(sm) == [4, 3, 2, 1]


def test_a_cold_put_leaves_first_and_a_touch_makes_it_ordinary(make_disk):
    sm = make_disk(4)
    store_below(sm, keys(2))
    store_below(sm, keys(2, first=5), placement=Placement.COLD)
    assert order_below(sm) == [6, 5, 1, 2]

    sm.touch(keys(1, first=6))

    assert order_below(sm) == [5, 1, 2, 6]


def test_a_spare_put_takes_only_budget_that_is_free(make_disk):
    sm = make_disk(2)
    store_below(sm, keys(1))
    store_below(sm, keys(1, first=5), placement=Placement.SPARE)
    put(sm, keys(1, first=6)[0], location=DISK, placement=Placement.SPARE)

    assert order_below(sm) == [5, 1]
    assert disk_of(sm).gauges().dropped_no_room == 1


def test_demoted_keys_leave_the_disk_first_tails_before_heads(make_disk):
    sm = make_disk(4)
    store_below(sm, keys(4))

    sm.demote(keys(3, first=2))

    assert order_below(sm) == [4, 3, 2, 1]


def test_a_touched_disk_only_key_survives_eviction_while_older_ones_go(make_disk):
    sm = make_disk(4)
    store_below(sm, keys(4))

    assert sm.touch(keys(1)).verdicts == [TouchVerdict.PRESENT]
    assert sm.touch(keys(1)).locations == [DISK]
    store_below(sm, keys(3, first=10))

    assert order_below(sm) == [1, 10, 11, 12]
    assert read(sm, keys(1)[0])


def test_a_disk_that_evicts_tells_each_loss_and_marks_the_last_copy(make_disk):
    sm = make_disk(2)
    events = sm.subscribe(kinds={EventKind.REMOVED})
    put_all(sm, keys(3))
    (from_disk,) = events.take()
    assert (from_disk.tier, from_disk.reason) == (DISK, RemovalReason.CAPACITY)
    assert from_disk.key.chunk_hash == 1
    assert from_disk.still_in == {CPU}
    assert from_disk.size_bytes == CHUNK_BYTES

    sm.batched_remove(keys(1), [CPU])

    (last,) = events.take()
    assert (last.tier, last.still_in) == (CPU, frozenset())


def test_what_is_pinned_is_not_evicted_from_disk(make_disk):
    sm = make_disk(3)
    store_below(sm, keys(3))
    assert sm.batched_contains(keys(1), pin=True, owner="request") == (1, {DISK: keys(1)})

    store_below(sm, keys(2, first=5))
    assert order_below(sm) == [1, 5, 6]
    sm.release_lookup("request")
    sm.touch(keys(2, first=5))
    store_below(sm, keys(1, first=7))

    assert 1 not in order_below(sm)
    assert disk_of(sm).gauges().num_pins == 0


def test_where_everything_is_pinned_a_put_is_dropped_and_nothing_leaves(make_disk):
    sm = make_disk(2)
    store_below(sm, keys(2))
    sm.batched_contains(keys(2), pin=True, owner="request")
    events = sm.subscribe()

    put(sm, keys(1, first=5)[0], location=DISK)

    assert order_below(sm) == [1, 2]
    assert events.take() == []
    assert disk_of(sm).gauges().dropped_no_room == 1
    sm.release_lookup("request")


def test_a_chunk_larger_than_the_budget_evicts_nothing(make_disk):
    sm = make_disk(2)
    store_below(sm, keys(2))

    assert put(sm, keys(1, first=5)[0], nbytes=4 * CHUNK_BYTES, location=DISK)

    assert order_below(sm) == [1, 2]


def test_a_batch_never_evicts_its_own_residents(make_disk):
    sm = make_disk(3)
    store_below(sm, keys(3))

    put_batch(sm, [*keys(1, first=7), *keys(3)])

    assert sorted(order_below(sm)) == [1, 2, 3]


def test_the_head_of_a_batch_that_does_not_fit_is_kept(make_disk):
    sm = make_disk(3)

    put_batch(sm, keys(4))

    assert order_below(sm) == [3, 2, 1]


def test_files_of_evicted_chunks_make_room_before_the_next_is_written(make_disk, monkeypatch):
    gates = gate_files(monkeypatch, is_gated=True)
    sm = make_disk(3)
    seen = []
    gates[0].open_gate(100)
    write = gates[0].write
    gates[0].write = lambda jobs: (write(jobs), seen.append(bytes_on_disk(sm)))[0]

    for key in keys(30):
        put(sm, key, location=DISK)
    sm.drain()

    assert max(seen) <= disk_of(sm).max_cache_size
    check_disk(sm)


def test_a_full_queue_drops_the_tail_of_a_put_counts_it_and_sends_no_event(make_disk, monkeypatch):
    gates = gate_files(monkeypatch, is_gated=True)
    sm = make_disk(16, num_chunks=8)  # four of them may be in flight
    events = sm.subscribe(tiers=[DISK])

    put_batch(sm, keys(6))

    assert sorted(order_below(sm)) == [1, 2, 3, 4]
    assert sorted(event.key.chunk_hash for event in events.take()) == [1, 2, 3, 4]
    assert disk_of(sm).gauges().dropped_queue_full == 2
    gates[0].open_gate(6)
    sm.drain()


def test_one_chunk_larger_than_the_queue_s_bound_is_taken_alone(make_disk):
    sm = make_disk(32, num_chunks=16)

    assert put(sm, keys(1)[0], nbytes=12 * CHUNK_BYTES, location=DISK)
    sm.drain()

    assert order_below(sm) == [1]


def test_objects_are_evictable_again_once_they_are_on_disk(make_disk):
    sm = make_disk()
    put_all(sm, keys(4))
    sm.drain()

    assert all(obj.get_ref_count() == 1 for obj in sm.local_cpu_backend.hot_cache.values())
    assert all(obj.can_evict for obj in sm.local_cpu_backend.hot_cache.values())


def test_clear_takes_what_nobody_holds_and_says_how_many_tokens(make_disk):
    sm = make_disk()
    store_below(sm, keys(4))
    sm.batched_contains(keys(1), pin=True, owner="request")

    assert sm.clear([DISK]) == 3 * 16

    check_disk(sm)
    assert order_below(sm) == [1]
    assert len(files_of(sm)) == 1
    sm.release_lookup("request")


def test_an_eviction_by_the_owner_of_the_lock_is_told_as_capacity(make_disk):
    sm = make_disk()
    store_below(sm, keys(1))
    events = sm.subscribe()

    with disk_of(sm).disk_lock:
        disk_of(sm).remove(keys(1)[0], force=False)

    assert events.take()[0].reason is RemovalReason.CAPACITY
