"""Pins: who owns them, what releasing does, when they expire, and what they count as."""

import queue
import threading

import pytest
import torch
from builders import CPU, evict, keys, order, put_all
from fakes import FakeClock

from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import AdHocMemoryAllocator
from lmcache.v1.pin_table import PinTable

TIMEOUT_SECONDS = 300


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def table(clock):
    made = PinTable(TIMEOUT_SECONDS, clock)
    yield made
    made.check_integrity()


@pytest.fixture
def pool():
    return AdHocMemoryAllocator()


def pinned(pool):
    """A live object that carries one pin, as `add` takes it over."""
    obj = pool.allocate(torch.Size([8]), torch.uint8)
    obj.pin()
    return obj


@pytest.fixture
def stored(make_manager):
    """Four resident chunks in a pool of four."""
    sm = make_manager(num_chunks=4)
    put_all(sm, keys(4))
    return sm


def pins_of(sm):
    return sm.local_cpu_backend.pins.num_pins


def test_one_request_cannot_release_anothers_pin_on_a_shared_chunk(stored):
    key = keys(1)[0]
    stored.contains(key, pin=True, owner="A")
    stored.contains(key, pin=True, owner="B")

    for _ in range(3):
        stored.batched_unpin([key], owner="A")

    assert stored.local_cpu_backend.hot_cache[key].pin_count == 1
    assert evict(stored, 3) == [2, 3, 4]
    stored.batched_unpin([key], owner="B")
    assert evict(stored) == [1]


def test_releasing_twice_is_a_counted_no_op(stored):
    key = keys(1)[0]
    stored.contains(key, pin=True, owner="A")

    stored.batched_unpin([key], owner="A")
    stored.batched_unpin([key], owner="A")

    obj = stored.local_cpu_backend.hot_cache[key]
    assert (obj.pin_count, obj.get_ref_count()) == (0, 1)
    assert stored.local_cpu_backend.pins.num_unmatched_releases == 1


def test_the_owner_less_unpin_releases_only_owner_less_pins(stored):
    backend, key = stored.local_cpu_backend, keys(1)[0]
    stored.contains(key, pin=True, owner="A")
    backend.pin(key)

    assert backend.unpin(key)
    assert not backend.unpin(key)

    assert backend.hot_cache[key].pin_count == 1
    stored.batched_unpin([key], owner="A")


def test_an_owner_less_unpin_from_another_thread_releases_the_pin(stored):
    backend, key = stored.local_cpu_backend, keys(1)[0]
    thread = threading.Thread(target=backend.pin, args=(key,))
    thread.start()
    thread.join(timeout=30)

    assert backend.unpin(key)

    assert pins_of(stored) == 0


def test_owner_less_pins_are_counted_one_by_one(stored):
    backend, key = stored.local_cpu_backend, keys(1)[0]
    backend.pin(key)
    backend.pin(key)

    assert backend.unpin(key)
    assert backend.hot_cache[key].is_pinned
    assert backend.unpin(key)
    assert not backend.hot_cache[key].is_pinned
    assert not backend.unpin(key)


def test_a_lookup_id_pins_a_key_once_however_often_it_asks(stored):
    for _ in range(5):
        assert stored.batched_contains(keys(4), pin=True, owner="A")[0] == 4

    assert pins_of(stored) == 4
    stored.batched_unpin(keys(4), owner="A")
    assert pins_of(stored) == 0


def test_a_repeated_lookup_counts_as_one_use(make_manager):
    sm = make_manager("LFU", num_chunks=3)
    put_all(sm, keys(3))
    for _ in range(5):
        sm.contains(keys(1)[0], pin=True, owner="waiting")
        sm.touch_cache("waiting")
    sm.batched_unpin(keys(1), owner="waiting")
    for _ in range(2):
        sm.touch(keys(1, first=2))

    assert order(sm) == [3, 1, 2]


def test_a_pinned_lookup_moves_nothing_until_it_is_counted_or_released(stored):
    stored.batched_contains(keys(2), pin=True, owner="A")
    assert order(stored) == [1, 2, 3, 4]

    stored.touch_cache("A")
    assert order(stored) == [3, 4, 2, 1]

    stored.batched_unpin(keys(2), owner="A")
    assert order(stored) == [3, 4, 2, 1]


def test_a_lookup_that_is_never_touched_counts_when_it_is_released(stored):
    stored.batched_contains(keys(2), pin=True, owner="A")

    stored.batched_unpin(keys(2), owner="A")

    assert order(stored) == [3, 4, 2, 1]


def test_an_unpinned_lookup_moves_nothing(stored):
    assert stored.contains(keys(1)[0]) == CPU
    assert stored.batched_contains(keys(4)) == (4, {CPU: keys(4)})
    stored.touch_cache()

    assert order(stored) == [1, 2, 3, 4]


def test_only_the_prefix_that_is_held_is_pinned(stored):
    given = [*keys(2), keys(1, first=9)[0], *keys(1, first=3)]

    assert stored.batched_contains(given, pin=True, owner="A")[0] == 2

    assert pins_of(stored) == 2
    stored.batched_unpin(given, owner="A")


def test_a_pin_outlives_the_removal_of_its_key(stored):
    key = keys(1)[0]
    stored.contains(key, pin=True, owner="A")
    obj = stored.local_cpu_backend.hot_cache[key]

    stored.remove(key)
    assert obj.is_valid()
    assert obj.raw_tensor[0] == 1

    stored.batched_unpin([key], owner="A")
    assert not obj.is_valid()


def test_pinning_an_absent_key_takes_no_pin(stored):
    assert stored.contains(keys(1, first=9)[0], pin=True, owner="A") is None
    assert not stored.local_cpu_backend.pin(keys(1, first=9)[0])

    assert pins_of(stored) == 0


def test_a_pin_expires_after_its_time_out_and_not_before(table, clock, pool):
    obj = pinned(pool)
    table.add("A", keys(1), [obj])

    clock.advance(TIMEOUT_SECONDS - 1)
    assert table.expire() == 0
    clock.advance(1)
    assert table.expire() == 1

    assert (obj.pin_count, table.num_pins, table.num_forced_releases) == (0, 0, 1)


def test_a_repeated_lookup_starts_the_time_out_anew(table, clock, pool):
    obj = pinned(pool)
    table.add("A", keys(1), [obj])
    clock.advance(TIMEOUT_SECONDS - 1)
    obj.pin()
    table.add("A", keys(1), [obj])

    clock.advance(TIMEOUT_SECONDS - 1)

    assert table.expire() == 0
    assert obj.pin_count == 1
    table.release("A", keys(1))


def test_only_the_owner_whose_pin_is_old_loses_it(table, clock, pool):
    obj = pinned(pool)
    table.add("A", keys(1), [obj])
    clock.advance(TIMEOUT_SECONDS - 1)
    obj.pin()
    table.add("B", keys(1), [obj])
    clock.advance(1)

    assert table.expire() == 1

    assert obj.pin_count == 1
    assert table.release("B", keys(1))[0] == 1


def test_releasing_an_expired_pin_is_a_counted_no_op(table, clock, pool):
    table.add("A", keys(1), [pinned(pool)])
    clock.advance(TIMEOUT_SECONDS)
    table.expire()

    assert table.release("A", keys(1)) == (0, [])
    assert table.num_unmatched_releases == 1


def test_expiry_says_how_many_and_which_setting(table, clock, pool, caplog):
    for owner in "AB":
        table.add(owner, keys(1), [pinned(pool)])
    clock.advance(TIMEOUT_SECONDS)

    table.expire()

    assert "2 pins were older than 300 s (pin_timeout_sec)" in caplog.text
    assert len(caplog.records) == 1


def test_a_time_out_of_zero_never_expires(clock, pool):
    table = PinTable(0, clock)
    table.add("A", keys(1), [pinned(pool)])
    clock.advance(10**9)

    assert table.expire() == 0
    table.release("A", keys(1))


def test_all_pins_of_an_owner_are_released_together(table, pool):
    objs = [pinned(pool) for _ in range(4)]
    table.add("A", keys(3), objs[:3])
    table.add("B", keys(1), [objs[3]])

    assert table.release_all("A") == (3, keys(3))

    assert [obj.pin_count for obj in objs] == [0, 0, 0, 1]
    assert table.release_all("A") == (0, [])
    table.release_all("B")


def test_a_key_stored_anew_under_a_pin_moves_the_pin_to_the_newer_copy(table, pool):
    old, new = pinned(pool), pinned(pool)
    table.add("A", keys(1), [old])

    table.add("A", keys(1), [new])

    assert (old.pin_count, new.pin_count) == (0, 1)
    table.release("A", keys(1))
    assert new.pin_count == 0


def test_uses_of_an_owner_are_taken_once_in_the_order_they_were_pinned(table, pool):
    table.add("A", keys(2), [pinned(pool) for _ in range(2)])
    table.add("A", keys(1, first=3), [pinned(pool)])

    assert table.take_uncounted("A") == keys(3)
    assert table.take_uncounted("A") == []
    assert table.take_uncounted("B") == []
    assert table.release("A", keys(3)) == (3, [])


class Breaking:
    """A carrier that cannot be unpinned."""

    pin_count = 1

    def unpin(self):
        raise KeyboardInterrupt


def test_a_carrier_that_raises_does_not_keep_the_others_pinned(table, pool):
    before, after = pinned(pool), pinned(pool)
    table.add("A", keys(3), [before, Breaking(), after])

    with pytest.raises(KeyboardInterrupt):
        table.release_all("A")

    assert (before.pin_count, after.pin_count, table.num_pins) == (0, 0, 0)


@pytest.mark.parametrize("owner", ["A", None])
@pytest.mark.parametrize("is_added", [False, True])
def test_an_interrupted_take_leaves_each_pin_in_the_table_or_nowhere(table, pool, owner, is_added):
    obj = pool.allocate(torch.Size([8]), torch.uint8)

    def pin(wanted, into):
        obj.pin()
        into.append(obj)
        if is_added:
            table.add(owner, wanted, [obj])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        table.take(owner, keys(1), pin)

    assert obj.pin_count == table.num_pins == is_added
    table.release(owner, keys(1))
    assert obj.pin_count == 0


class EmptyAfterAll(queue.SimpleQueue):
    """A queue that another thread empties between a look and a take."""

    def empty(self):
        return False


def test_a_deferred_release_that_another_thread_took_is_not_waited_for(table):
    table._deferred = EmptyAfterAll()

    assert table.num_pins == 0  # returns


def test_pins_of_a_closed_manager_do_not_keep_its_chunks_listed(make_manager):
    sm = make_manager(num_chunks=2)
    put_all(sm, keys(2))
    sm.batched_contains(keys(2), pin=True, owner="A")

    sm.close()

    assert order(sm) == []
    sm.batched_unpin(keys(2), owner="A")
    assert pins_of(sm) == 0
