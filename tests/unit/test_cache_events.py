"""Every way in and out of the CPU tier gives exactly one event, with the right reason."""

import time

import pytest
import torch
from builders import CHUNK_BYTES, CPU, allocate, evict, hold, keys, put, put_all, put_batch
from event_fakes import (
    CLOSED,
    REMOVED,
    STORED,
    Mirror,
    brief,
    follow,
    removed,
    stored,
)

from lmcache.v1.memory_format import MemoryFormat
from lmcache.v1.memory_metadata import MemoryObjMetadata
from lmcache.v1.memory_object import TensorMemoryObj
from lmcache.v1.storage_backend.cache_events import RemovalReason
from lmcache.v1.storage_backend.placement import Placement

CAPACITY, EXPLICIT, CLEAR, REPLACED = (
    RemovalReason.CAPACITY,
    RemovalReason.EXPLICIT,
    RemovalReason.CLEAR,
    RemovalReason.REPLACED,
)


@pytest.fixture
def heard(manager):
    """Takes the events of a pool of eight chunks; in the end their replay must be the truth."""
    subscription, mirror = follow(manager)

    def take():
        taken = subscription.take()
        mirror.apply(taken)
        return taken

    yield take
    take()
    assert mirror.residents == manager.snapshot().residents
    assert mirror.keys_in(CPU) == set(manager.local_cpu_backend.hot_cache)


# --- in --------------------------------------------------------------------------------------
def test_a_put_gives_one_stored_event_that_names_the_copy(manager, heard):
    key = keys(1)[0]
    before_s = time.monotonic()
    put(manager, key)

    (event,) = heard()
    assert (event.kind, event.key, event.tier, event.reason) == (STORED, key, CPU, None)
    assert (event.size_bytes, event.generation) == (CHUNK_BYTES, event.seq)
    assert event.still_in == frozenset({CPU})
    assert event.incarnation == manager.snapshot().incarnation
    assert before_s <= event.monotonic_s <= time.monotonic()
    assert (event.first_lost, event.last_lost, event.num_lost) == (0, 0, 0)


def test_a_stored_key_can_be_read(manager, heard):
    put_all(manager, keys(3))

    for event in heard():
        manager.get(event.key).ref_count_down()


@pytest.mark.parametrize("placement", list(Placement))
def test_a_put_of_any_placement_gives_one_stored_event(manager, heard, placement):
    put(manager, keys(1)[0], placement=placement)

    assert brief(heard()) == [stored(1)]


def test_a_batch_gives_one_stored_event_per_key(manager, heard):
    put_batch(manager, keys(3))

    assert sorted(event.key.chunk_hash for event in heard()) == [1, 2, 3]


def test_a_put_while_the_hot_cache_is_off_gives_no_event(manager, heard):
    manager.set_hot_cache(False)
    put(manager, keys(1)[0])

    assert heard() == []


def test_a_put_that_meets_the_switching_off_of_the_hot_cache_leaves_nothing_behind(manager, heard):
    class SwitchesOff(TensorMemoryObj):
        """A foreign object, so the put copies it first: that is when the cache is switched off."""

        __slots__ = ()

        def get_shapes(self):
            manager.set_hot_cache(False)
            return super().get_shapes()

    metadata = MemoryObjMetadata(torch.Size([64]), torch.uint8, 0, 64, 1)
    obj = SwitchesOff(torch.zeros(64, dtype=torch.uint8), metadata, None)

    manager.batched_put(keys(1), [obj])

    assert not manager.is_hot_cache_enabled()
    assert len(manager.local_cpu_backend.hot_cache) == 0
    assert heard() == []


def test_a_spare_put_that_needs_a_copy_evicts_nothing_for_it(manager, heard):
    put_all(manager, keys(8))
    obj = manager.get(keys(1)[0])
    heard()

    manager.batched_put(keys(1, first=9), [obj], placement=Placement.SPARE)

    assert heard() == []


# --- neither ---------------------------------------------------------------------------------
def test_what_moves_or_holds_an_entry_gives_no_event(manager, heard):
    k1, k2, k3 = keys(3)
    put_all(manager, (k1, k2, k3))
    heard()

    manager.touch([k1, k2])
    manager.demote([k3])
    manager.contains(k1, pin=True)
    manager.touch_cache()
    manager.batched_unpin([k1])
    hold(manager, k2).ref_count_down()
    manager.get(k3).ref_count_down()
    manager.snapshot()

    assert heard() == []


@pytest.mark.parametrize("placement", list(Placement))
def test_a_duplicate_put_gives_no_event(manager, heard, placement):
    put(manager, keys(1)[0])
    heard()

    put(manager, keys(1)[0], placement=placement)

    assert heard() == []


def test_an_allocation_that_cannot_succeed_gives_no_event(manager, heard):
    put_all(manager, keys(8))
    heard()

    assert allocate(manager, nbytes=9 * CHUNK_BYTES) is None

    assert heard() == []


def test_removing_what_is_not_there_gives_no_event(manager, heard):
    assert manager.remove(keys(1)[0]) == 0
    manager.clear()

    assert heard() == []


# --- out -------------------------------------------------------------------------------------
def test_overfilling_by_five_gives_exactly_five_removed_events(manager, heard):
    put_all(manager, keys(8))
    heard()

    put_all(manager, keys(5, first=9))

    gone = [event for event in heard() if event.kind is REMOVED]
    assert brief(gone) == [removed(n, CAPACITY) for n in range(1, 6)]
    assert {event.size_bytes for event in gone} == {CHUNK_BYTES}
    assert {event.still_in for event in gone} == {frozenset()}


@pytest.mark.parametrize("policy", ["LRU", "LFU", "FIFO", "MRU"])
def test_every_policy_reports_whom_it_evicts(make_manager, policy):
    sm = make_manager(policy, num_chunks=4)
    subscription, mirror = follow(sm)
    put_all(sm, keys(4))

    gone = evict(sm, 2)

    taken = subscription.take()
    assert brief(taken[4:]) == [removed(n, CAPACITY) for n in gone]
    mirror.apply(taken)
    assert mirror.residents == sm.snapshot().residents


def test_one_large_allocation_reports_every_victim(manager, heard):
    put_all(manager, keys(8))
    heard()

    allocate(manager, nbytes=3 * CHUNK_BYTES).ref_count_down()

    assert brief(heard()) == [removed(n, CAPACITY) for n in (1, 2, 3)]


def test_a_forced_remove_is_explicit(manager, heard):
    put_all(manager, keys(3))
    heard()

    manager.remove(keys(2)[1])
    manager.batched_remove(keys(3))

    assert brief(heard()) == [removed(n, EXPLICIT) for n in (2, 1, 3)]


def test_a_removal_of_a_key_held_by_a_reader_and_pinned_is_told_at_once(manager, heard):
    k1, k2 = keys(2)
    put_all(manager, (k1, k2))
    reader = hold(manager, k1)
    manager.contains(k2, pin=True)
    heard()

    manager.batched_remove([k1, k2])

    assert brief(heard()) == [removed(1, EXPLICIT), removed(2, EXPLICIT)]
    reader.ref_count_down()
    manager.batched_unpin([k2])
    assert heard() == []


def test_a_caller_that_makes_room_itself_under_the_lock_gives_a_capacity_event(manager, heard):
    key = keys(1)[0]
    put(manager, key)
    heard()

    with manager.local_cpu_backend.cpu_lock:
        assert manager.local_cpu_backend.remove(key, force=False)

    assert brief(heard()) == [removed(1, CAPACITY)]


def test_a_clear_tells_of_what_left_and_not_of_what_is_pinned_or_read(manager, heard):
    put_all(manager, keys(5))
    k1, k2 = keys(2)
    manager.contains(k1, pin=True)
    reader = hold(manager, k2)
    heard()

    manager.clear()

    told = heard()
    assert sorted(brief(told), key=lambda b: b[1]) == [removed(n, CLEAR) for n in (3, 4, 5)]
    assert set(manager.local_cpu_backend.get_keys()) == {k1, k2}
    reader.ref_count_down()
    manager.batched_unpin([k1])


def test_switching_the_hot_cache_off_tells_of_everything_held_or_not(manager, heard):
    put_all(manager, keys(3))
    reader = hold(manager, keys(1)[0])
    heard()

    manager.set_hot_cache(False)

    assert sorted(brief(heard()), key=lambda b: b[1]) == [removed(n, CLEAR) for n in (1, 2, 3)]
    reader.ref_count_down()
    manager.set_hot_cache(True)
    assert heard() == []


def test_closing_the_manager_tells_of_everything_before_it_says_closed(manager, heard):
    put_all(manager, keys(2))
    heard()

    manager.close()

    *told, last = heard()
    assert sorted(brief(told), key=lambda b: b[1]) == [removed(n, CLEAR) for n in (1, 2)]
    assert last.kind is CLOSED


# --- replaced --------------------------------------------------------------------------------
@pytest.mark.parametrize("placement", [Placement.YOUNG, Placement.COLD])
def test_a_put_of_another_size_gives_removed_and_stored_in_one_hold(manager, heard, placement):
    key = keys(1)[0]
    put(manager, key)
    (first,) = heard()

    put(manager, key, nbytes=CHUNK_BYTES // 2, placement=placement)

    old, new = heard()
    assert brief([old, new]) == [removed(1, REPLACED), stored(1)]
    assert new.seq == old.seq + 1
    assert (old.generation, new.generation) == (first.seq, new.seq)
    assert (old.size_bytes, new.size_bytes) == (CHUNK_BYTES, CHUNK_BYTES // 2)
    assert old.still_in == new.still_in == frozenset({CPU})


def test_a_put_of_another_dtype_replaces(manager, heard):
    key = keys(1)[0]
    put(manager, key)
    heard()

    obj = manager.allocate(torch.Size([CHUNK_BYTES]), torch.uint8, MemoryFormat.BINARY)
    manager.batched_put([key], [obj])

    assert brief(heard()) == [removed(1, REPLACED), stored(1)]


def test_replacing_a_copy_that_a_reader_holds_is_told_at_once(manager, heard):
    key = keys(1)[0]
    put(manager, key)
    reader = hold(manager, key)
    heard()

    put(manager, key, nbytes=2 * CHUNK_BYTES)

    assert brief(heard()) == [removed(1, REPLACED), stored(1)]
    reader.ref_count_down()
    assert heard() == []


def test_the_copy_that_replaced_another_is_the_one_that_a_later_removal_names(manager, heard):
    key = keys(1)[0]
    put(manager, key)
    put(manager, key, nbytes=CHUNK_BYTES // 2)
    replacing = heard()[-1]

    manager.remove(key)

    (event,) = heard()
    assert event.generation == replacing.seq
    assert event.size_bytes == CHUNK_BYTES // 2


# --- failures --------------------------------------------------------------------------------
def test_a_batch_of_which_a_part_finds_no_room_tells_exactly_what_became_resident(manager, heard):
    put_all(manager, keys(7))
    readers = [hold(manager, key) for key in keys(7)]
    obj = allocate(manager)
    obj.ref_count_up()
    heard()

    manager.batched_put(keys(2, first=8), [obj, obj])  # the second needs a copy, and has no room

    (event,) = heard()
    assert set(manager.local_cpu_backend.hot_cache) == {*keys(7), event.key}
    for reader in readers:
        reader.ref_count_down()


def test_a_key_given_twice_in_one_batch_gives_one_stored_event(manager, heard):
    key = keys(1)[0]

    manager.batched_put([key, key], [allocate(manager), allocate(manager)])

    assert brief(heard()) == [stored(1)]


def test_a_key_given_twice_with_two_sizes_is_stored_once_and_replaced_once(manager, heard):
    key = keys(1)[0]

    manager.batched_put([key, key], [allocate(manager), allocate(manager, CHUNK_BYTES // 2)])

    assert brief(heard()) == [stored(1), removed(1, REPLACED), stored(1)]


def test_a_refused_put_gives_no_event(manager, heard):
    obj = allocate(manager)
    obj.ref_count_down()

    with pytest.raises(ValueError):
        manager.batched_put(keys(1), [obj])
    with pytest.raises(ValueError):
        manager.batched_put(keys(2), [])

    assert heard() == []


# --- the whole -------------------------------------------------------------------------------
def test_replaying_the_events_from_a_snapshot_gives_the_residents_at_every_moment(manager, heard):
    put_all(manager, keys(6))
    mirror = Mirror(manager.snapshot())
    heard()
    k1, k2, k3 = keys(3)
    steps = [
        lambda: put_all(manager, keys(4, first=7)),
        lambda: manager.remove(k3),
        lambda: put(manager, k3, nbytes=CHUNK_BYTES // 4),
        lambda: put(manager, k3),
        lambda: manager.clear(),
        lambda: put_batch(manager, [k1, k2]),
        lambda: manager.set_hot_cache(False),
    ]
    for step in steps:
        step()
        mirror.apply(heard())
        assert mirror.residents == manager.snapshot().residents
        assert mirror.keys_in(CPU) == set(manager.local_cpu_backend.hot_cache)
