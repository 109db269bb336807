"""Faults that users of KV-cache offload software reported: each kind must not exist here.

Each docstring begins with the id of the report. The pool is 1 MiB, chunk i is filled with i.
"""

import asyncio
import threading

import pytest
import torch
from builders import (
    CHUNK_SHAPE,
    CHUNK_TOKENS,
    CPU,
    allocate,
    evict,
    gauges,
    hold,
    is_filled,
    keys,
    order,
    put,
    put_all,
)

from lmcache.v1.storage_backend.cache_events import EventKind
from lmcache.v1.storage_backend.touch import TouchVerdict

NUM_CHUNKS = 64  # 1 MiB of 16 KiB chunks


@pytest.fixture
def full(make_manager):
    """A full 1 MiB pool, chunk 1 the oldest."""
    sm = make_manager(num_chunks=NUM_CHUNKS)
    put_all(sm, keys(NUM_CHUNKS))
    return sm


def test_a_hit_answered_elsewhere_keeps_its_chunk_and_a_loss_is_heard_at_once(full):
    """H01: the state image of every turn aged out, and the engine's index kept promising it."""
    k1 = keys(1)[0]
    with full.subscribe(kinds={EventKind.REMOVED}) as removals:
        assert list(full.touch([k1])) == [TouchVerdict.REFRESHED]
        put(full, keys(1, first=100)[0])
        assert [event.key.chunk_hash for event in removals.take()] == [2]

        evict(full, NUM_CHUNKS - 1)
        assert k1 in [event.key for event in removals.take()]
    assert list(full.touch([k1])) == [TouchVerdict.GONE]


def test_a_pinned_lookup_lets_the_tail_of_its_prefix_leave_first(make_manager):
    """H02: the head of a prefix was evicted before its tail."""
    sm = make_manager(num_chunks=12)
    put_all(sm, keys(4, first=100))
    put_all(sm, keys(8))
    prefix = keys(8)
    for key in prefix:
        assert sm.contains(key, pin=True) == CPU

    sm.touch_cache()
    sm.batched_unpin(prefix)

    assert evict(sm, 12) == [100, 101, 102, 103, 8, 7, 6, 5, 4, 3, 2, 1]


def test_a_chunk_stored_again_is_young_again(make_manager):
    """H03: a duplicate put returned early, and the chunk was evicted next."""
    sm = make_manager(num_chunks=NUM_CHUNKS)
    put_all(sm, keys(NUM_CHUNKS - 1))
    first_copy = sm.local_cpu_backend.hot_cache[keys(1)[0]]

    put(sm, keys(1)[0])

    assert sm.local_cpu_backend.hot_cache[keys(1)[0]] is first_copy
    assert order(sm) == [*range(2, NUM_CHUNKS), 1]
    put_all(sm, keys(2, first=100))
    assert order(sm) == [*range(3, NUM_CHUNKS), 1, 100, 101]


def test_interleaved_lookups_in_threads_each_refresh_their_own_keys_in_their_own_order(
    make_manager,
):
    """H04: one shared list of keys; whoever touched first consumed everybody's."""
    sm = make_manager(num_chunks=NUM_CHUNKS)
    put_all(sm, keys(12))
    first, second = keys(3), keys(3, first=4)
    both_looked_up = threading.Barrier(2)
    one_touched = threading.Event()

    def request(given, is_first):
        for key in given:
            sm.contains(key, pin=True)
        both_looked_up.wait(timeout=60)
        if not is_first:
            one_touched.wait(timeout=60)
        sm.touch_cache()
        one_touched.set()

    threads = [
        threading.Thread(target=request, args=(first, True)),
        threading.Thread(target=request, args=(second, False)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)

    assert order(sm) == [*range(7, 13), 3, 2, 1, 6, 5, 4]
    sm.batched_unpin([*first, *second])
    assert order(sm) == [*range(7, 13), 3, 2, 1, 6, 5, 4]


def test_interleaved_lookups_in_asyncio_tasks_each_refresh_their_own_keys(make_manager):
    """H04: the same among the tasks of one event loop."""
    sm = make_manager(num_chunks=NUM_CHUNKS)
    put_all(sm, keys(12))

    async def request(given, my_turn, next_turn):
        for key in given:
            sm.contains(key, pin=True)
        await my_turn.wait()
        sm.touch_cache()
        next_turn.set()

    async def both():
        turns = [asyncio.Event() for _ in range(3)]
        tasks = [
            asyncio.create_task(request(keys(3), turns[1], turns[2])),
            asyncio.create_task(request(keys(3, first=4), turns[0], turns[1])),
        ]
        await asyncio.sleep(0)
        turns[0].set()
        await asyncio.gather(*tasks)

    asyncio.run(both())

    assert order(sm) == [*range(7, 13), 6, 5, 4, 3, 2, 1]
    sm.batched_unpin(keys(6))


def test_ten_thousand_lookups_without_a_touch_leave_nothing_behind(make_manager):
    """H04: the list of looked-up keys grew by one a lookup."""
    sm = make_manager()
    put_all(sm, keys(2))
    pins = sm.local_cpu_backend.pins

    for number in range(10_000):
        owner = None if number % 2 else f"request {number}"
        sm.contains(keys(1)[0], pin=True, owner=owner)
        sm.batched_unpin(keys(1), owner=owner)

    assert pins.num_pins == 0
    assert pins.pins_by_owner() == {}
    assert (len(pins._anonymous._pins), len(pins._anonymous._holders)) == (0, 0)


def test_touch_after_an_eviction_between_lookup_and_touch_refreshes_the_others(make_manager):
    """H05: a touch of an absent key raised, and poisoned every later touch."""
    sm = make_manager()
    put_all(sm, keys(5))
    for key in keys(3):
        sm.contains(key, pin=True)
    sm.batched_unpin(keys(1, first=2))
    sm.remove(keys(1, first=2)[0])

    sm.touch_cache()
    sm.touch_cache()

    assert order(sm) == [4, 5, 3, 1]
    sm.batched_unpin([keys(3)[0], keys(3)[2]])


def test_four_threads_that_put_get_remove_and_touch_raise_nothing(make_manager):
    """H05: 72,192 exceptions in six seconds of the same."""
    sm = make_manager(num_chunks=16)
    start = threading.Barrier(4)
    raised = []
    num_rounds = 1500

    def guarded(work):
        start.wait(timeout=60)
        try:
            for number in range(num_rounds):
                work(keys(4, first=1 + number * 7 % 29), number)
        except Exception as error:  # what the test is about
            raised.append(error)

    def store(given, number):
        for key in given:
            put(sm, key)

    def read(given, number):
        for key, obj in zip(given, sm.batched_get(given), strict=True):
            if obj is not None:
                assert is_filled(obj, key.chunk_hash)
                obj.ref_count_down()

    def remove(given, number):
        sm.batched_remove(given[:2])

    def touch(given, number):
        for key in given:
            sm.contains(key, pin=True)
        sm.touch(given)
        sm.touch_cache()
        sm.batched_unpin(given)

    threads = [
        threading.Thread(target=guarded, args=(work,)) for work in (store, read, remove, touch)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=200)

    assert raised == []
    assert sm.local_cpu_backend.pins.num_pins == 0
    assert all(obj.can_evict for obj in sm.local_cpu_backend.hot_cache.values())


class CountingLock:
    """The tier's lock, with a count of how often it was taken."""

    def __init__(self, lock):
        self.lock = lock
        self.num_taken = 0

    def __enter__(self):
        self.num_taken += 1
        return self.lock.__enter__()

    def __exit__(self, *error):
        return self.lock.__exit__(*error)


def test_a_thousand_keys_are_touched_in_one_round_of_the_lock(make_manager):
    """H06: a lock per key serialised the readers."""
    sm = make_manager(num_chunks=1000)
    put_all(sm, keys(1000))
    counted = CountingLock(sm.local_cpu_backend.order_lock)
    sm.local_cpu_backend.order_lock = counted

    assert sm.touch(keys(1000)).all_refreshed

    assert counted.num_taken == 1


def test_keys_that_were_not_passed_keep_their_order(full):
    """H06: refreshing too widely refreshed keys that nobody used."""
    full.touch(keys(3, first=20))

    untouched = [n for n in range(1, NUM_CHUNKS + 1) if n not in (20, 21, 22)]
    assert order(full) == [*untouched, 22, 21, 20]


def test_a_pinned_old_end_is_walked_once_and_not_for_every_eviction(make_manager):
    """H07: eviction scanned the whole pinned end every time."""
    sm = make_manager(num_chunks=2000)
    put_all(sm, keys(2000))
    sm.batched_contains(keys(1000), pin=True, owner="A")

    assert evict(sm) == [1001]
    assert gauges(sm)["num_parked"] == 1000

    assert evict(sm, 100) == list(range(1002, 1102))
    assert gauges(sm)["num_parked"] == 1000
    sm.batched_unpin(keys(1000), owner="A")


@pytest.mark.parametrize("local_cpu", [True, False], ids=["all pinned", "no hot cache"])
def test_an_allocation_that_finds_nothing_to_evict_ends(make_manager, caplog, local_cpu):
    """H08: the engine froze, repeating "no eviction candidates" for ever."""
    sm = make_manager(num_chunks=4, local_cpu=local_cpu, blocking_timeout_secs=0.05)
    objs = [allocate(sm) for _ in range(4)]
    if local_cpu:
        sm.batched_put(keys(4), objs)
        sm.batched_contains(keys(4), pin=True, owner="A")
    answers = []
    thread = threading.Thread(
        target=lambda: answers.append(sm.allocate(CHUNK_SHAPE, torch.bfloat16, busy_loop=True)),
        daemon=True,
    )
    thread.start()
    thread.join(timeout=60)

    assert answers == [None]
    assert caplog.text.count("blocking_timeout_secs=0.05") == 1
    if local_cpu:
        sm.batched_unpin(keys(4), owner="A")
    else:
        for obj in objs:
            obj.ref_count_down()


def test_releasing_too_often_never_frees_what_the_cache_lists(make_manager):
    """H12: one release too many freed the memory while the key stayed listed."""
    sm = make_manager(num_chunks=2)
    put_all(sm, keys(1))
    key = keys(1)[0]
    obj = sm.get(key)
    for _ in range(3):
        obj.ref_count_down()
        sm.batched_unpin([key])
        obj.unpin()

    listed = sm.local_cpu_backend.hot_cache[key]
    fresh = allocate(sm)

    assert listed.is_valid()
    assert listed.get_ref_count() >= 1
    assert fresh.data_ptr != listed.data_ptr
    fresh.raw_tensor.fill_(99)
    assert is_filled(sm.get(key), 1)
    listed.ref_count_down()
    fresh.ref_count_down()


def test_clear_removes_what_nobody_holds_and_counts_its_tokens(make_manager):
    """H14: "clear" reported success and removed nothing."""
    sm = make_manager()
    put_all(sm, keys(4))
    sm.contains(keys(1, first=2)[0], pin=True, owner="A")

    assert sm.clear() == 3 * CHUNK_TOKENS

    assert order(sm) == [2]
    sm.batched_unpin(keys(1, first=2), owner="A")
    assert sm.clear() == CHUNK_TOKENS


def test_a_reader_keeps_its_bytes_whatever_happens_to_the_key(make_manager):
    """H12: bytes of another chunk showed through."""
    sm = make_manager(num_chunks=2)
    put_all(sm, keys(2))
    reader = hold(sm, keys(1)[0])

    sm.remove(keys(1)[0])
    put_all(sm, keys(5, first=10))

    assert is_filled(reader, 1)
    reader.ref_count_down()
