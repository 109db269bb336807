"""Faults that users of cache offload software reported of disk tiers, and that must not exist here.

The set-up is that of test_user_reports.py: 16 tokens and 16 KiB a chunk, 65 chunks.
"""

import asyncio

import pytest
from builders import (
    CHUNK_TOKENS,
    CPU,
    allocate,
    evict,
    hashes,
    is_filled,
    keys,
    put,
    put_all,
)
from disk_builders import (
    DISK,
    FILE_BYTES,
    bytes_on_disk,
    check_disk,
    disk_of,
    file_of,
    files_of,
    gate_files,
    order_below,
    read,
    store_below,
)
from event_fakes import follow, run_together

from lmcache.v1.storage_backend.cache_events import EventKind

NUM_CHUNKS = 65


@pytest.fixture
def sm(make_disk):
    """A manager over a pool and a disk of 65 chunks each."""
    return make_disk(NUM_CHUNKS, NUM_CHUNKS)


class TestH13EntriesAreEvictableOnceTheyAreOnDisk:
    def test_every_object_has_one_reference_after_the_puts_drained(self, sm):
        put_all(sm, keys(20))
        sm.drain()

        objs = list(sm.local_cpu_backend.hot_cache.values())
        assert [obj.get_ref_count() for obj in objs] == [1] * 20
        assert all(obj.can_evict for obj in objs)

    def test_the_same_after_writes_that_failed(self, make_disk, monkeypatch):
        gates = gate_files(monkeypatch)
        sm = make_disk(NUM_CHUNKS, NUM_CHUNKS)
        gates[0].write_fault = 28
        put_all(sm, keys(5))
        sm.drain()

        assert all(obj.can_evict for obj in sm.local_cpu_backend.hot_cache.values())

    def test_the_same_after_puts_that_found_no_room(self, make_disk):
        sm = make_disk(2, NUM_CHUNKS)
        store_below(sm, keys(2))
        sm.batched_contains(keys(2), pin=True, owner="request")
        put_all(sm, keys(5, first=5))
        sm.drain()

        assert all(obj.can_evict for obj in sm.local_cpu_backend.hot_cache.values())
        sm.release_lookup("request")


class TestH14ClearRemovesWhatItSays:
    def test_three_of_four_go_and_the_pinned_one_stays_in_each_tier(self, sm):
        put_all(sm, keys(4))
        sm.drain()
        sm.batched_contains(keys(1), [CPU], pin=True, owner="above")
        sm.batched_contains(keys(1), [DISK], pin=True, owner="below")

        assert sm.clear([CPU]) == 3 * CHUNK_TOKENS
        assert sm.clear([DISK]) == 3 * CHUNK_TOKENS

        assert hashes(sm.local_cpu_backend.hot_cache) == order_below(sm) == [1]
        check_disk(sm)
        assert len(files_of(sm)) == 1
        sm.release_lookup("above")
        sm.release_lookup("below")
        assert sm.clear() == 2 * CHUNK_TOKENS


class TestH15AnEntryThatLeavesDuringItsRead:
    @pytest.fixture
    def leaving(self, make_disk, monkeypatch):
        gates = gate_files(monkeypatch)
        sm = make_disk(NUM_CHUNKS, NUM_CHUNKS)
        store_below(sm, keys(3))
        real_read = gates[0].read

        def remove_and_read(jobs):
            sm.remove(keys(1, first=2)[0], [DISK])
            sm.drain()
            return real_read(jobs)

        gates[0].read = remove_and_read
        return sm

    def test_is_a_miss_and_its_buffer_is_freed(self, leaving):
        assert disk_of(leaving).get_blocking(keys(1, first=2)[0]) is None
        assert leaving.gauges().cpu.num_memory_objs == 0

    def test_ends_the_prefix_of_an_asynchronous_read(self, leaving):
        found = asyncio.run(disk_of(leaving).batched_get_non_blocking("lookup", keys(3)))

        assert [is_filled(obj, 1) for obj in found] == [True]
        found[0].ref_count_down()
        assert leaving.gauges().cpu.num_memory_objs == 0

    def test_that_was_evicted_for_another_put_is_a_hit_as_long_as_it_is_read(
        self, make_disk, monkeypatch
    ):
        gates = gate_files(monkeypatch)
        sm = make_disk(2, NUM_CHUNKS)
        store_below(sm, keys(2))
        real_read = gates[0].read

        def put_and_read(jobs):
            store_below(sm, keys(2, first=7))
            return real_read(jobs)

        gates[0].read = put_and_read

        assert read(sm, keys(1)[0])
        assert 1 in order_below(sm)


class TestH16RemovingAFileThatIsGone:
    def test_does_not_make_a_put_fail_and_the_budget_stays_right(self, make_disk):
        sm = make_disk(4, NUM_CHUNKS)
        store_below(sm, keys(4))
        file_of(sm, keys(1)[0]).unlink()

        store_below(sm, keys(2, first=7))

        assert order_below(sm) == [3, 4, 7, 8]
        check_disk(sm)
        assert bytes_on_disk(sm) == 4 * FILE_BYTES


class TestH17MemoryPressureDuringAPrefetch:
    def test_gives_fewer_objects_with_the_right_bytes_and_holds_no_lock(self, make_disk):
        sm = make_disk(NUM_CHUNKS, 6)
        store_below(sm, keys(12))

        found = asyncio.run(disk_of(sm).batched_get_non_blocking("lookup", keys(12)))

        assert len(found) == 6
        assert all(is_filled(obj, number) for number, obj in enumerate(found, 1))
        assert disk_of(sm).disk_lock.acquire(timeout=5)
        disk_of(sm).disk_lock.release()
        for obj in found:
            obj.ref_count_down()
        assert read(sm, keys(1, first=12)[0])

    def test_a_read_without_any_memory_is_a_miss_and_loses_nothing(self, make_disk):
        sm = make_disk(NUM_CHUNKS, 4)
        store_below(sm, keys(2))
        taken = [allocate(sm) for _ in range(4)]

        assert sm.get(keys(1)[0]) is None

        for obj in taken:
            obj.ref_count_down()
        assert read(sm, keys(1)[0])


class TestH18EveryServedByteIsItsKeys:
    def test_over_small_pools_and_four_threads(self, make_disk):
        sm = make_disk(40, 20)
        all_keys = keys(200)
        failures = []

        def work(seed):
            for step in range(300):
                key = all_keys[(seed * 7919 + step * step * 31) % len(all_keys)]
                if step % 3 == 0:
                    put(sm, key)
                elif step % 7 == 0:
                    sm.remove(key, [CPU])
                else:
                    obj = sm.get(key)
                    if obj is not None:
                        if not is_filled(obj, key.chunk_hash):
                            failures.append(key)
                        obj.ref_count_down()

        run_together([lambda seed=seed: work(seed) for seed in range(4)])

        assert not failures
        check_disk(sm)
        sm.set_hot_cache(False)
        assert sm.gauges().cpu.num_memory_objs == 0


class TestH19TheDiskCacheOutlivesItsProcess:
    def test_an_entry_is_found_again_and_usage_never_exceeds_the_cap(self, make_disk):
        sm = make_disk(8, NUM_CHUNKS)
        store_below(sm, keys(8))
        sm.close()

        sm = make_disk(8, NUM_CHUNKS)
        store_below(sm, keys(4, first=20))

        assert order_below(sm) == [5, 6, 7, 8, 20, 21, 22, 23]
        assert all(read(sm, key) for key in keys(4, first=5))
        check_disk(sm)
        assert bytes_on_disk(sm) == 8 * FILE_BYTES


class TestH36OnlyTheLastCopysEventSaysThatTheKeyIsGone:
    def test_evicted_above_it_is_still_below(self, make_disk):
        sm = make_disk(NUM_CHUNKS, 4)
        for key in keys(4):
            put(sm, key)
            sm.drain()
        events = sm.subscribe(kinds={EventKind.REMOVED})

        evict(sm, 1)
        (above,) = events.take()
        sm.remove(keys(1)[0])
        (below,) = events.take()

        assert (above.tier, above.still_in) == (CPU, {DISK})
        assert (below.tier, below.still_in) == (DISK, frozenset())

    def test_evicted_below_it_is_still_above(self, make_disk):
        sm = make_disk(2, NUM_CHUNKS)
        events = sm.subscribe(kinds={EventKind.REMOVED})

        put_all(sm, keys(4))

        assert [(e.key.chunk_hash, e.tier, e.still_in) for e in events.take()] == [
            (1, DISK, {CPU}),
            (2, DISK, {CPU}),
        ]

    def test_a_replay_over_threads_knows_every_copy(self, make_disk):
        sm = make_disk(12, 10)
        subscription, mirror = follow(sm)
        all_keys = keys(40)

        def work(seed):
            for step in range(200):
                key = all_keys[(seed * 31 + step * 17) % len(all_keys)]
                obj = sm.get(key)
                if obj is None:
                    put(sm, key)
                else:
                    obj.ref_count_down()
                if step % 20 == 0:
                    sm.touch(all_keys[:5])

        run_together([lambda seed=seed: work(seed) for seed in range(4)])
        sm.drain()
        mirror.apply(subscription.take())

        assert mirror.residents == sm.snapshot().residents
        assert mirror.keys_in(DISK) == set(disk_of(sm).dict)
        assert mirror.keys_in(CPU) == set(sm.local_cpu_backend.hot_cache)
