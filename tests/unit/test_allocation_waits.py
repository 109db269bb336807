"""Waiting for memory: bounded, woken by any release, and never for what cannot come."""

import gc
import os
import threading

import pytest
import torch
from builders import CHUNK_BYTES, CHUNK_SHAPE, allocate, gauges, hold, keys, order, put, put_all

from lmcache.v1.errors import ConfigError
from lmcache.v1.memory_format import MemoryFormat
from lmcache.v1.storage_backend.storage_manager import StorageManager

FOREVER_SECONDS = 250  # far beyond any test's time limit
NO_MEMORY = "no memory was released within blocking_timeout_secs"


def start_waiting(sm, work):
    """Run `work` in a thread; returns once it waits for a release."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(work()), daemon=True)
    thread.start()
    while gauges(sm)["num_waiting"] == 0:
        assert thread.is_alive(), "the allocation did not wait"
        os.sched_yield()
    return thread, answers


def allocate_waiting(sm, nbytes=CHUNK_BYTES):
    return sm.allocate(torch.Size([nbytes]), torch.uint8, MemoryFormat.BINARY, busy_loop=True)


@pytest.fixture
def full(make_manager):
    """A pool of two chunks, both resident and read by somebody; returns manager and readers."""
    sm = make_manager(num_chunks=2, blocking_timeout_secs=FOREVER_SECONDS)
    put_all(sm, keys(2))
    readers = [hold(sm, key) for key in keys(2)]
    yield sm, readers
    for reader in readers:
        if reader.get_ref_count() > 1:
            reader.ref_count_down()


@pytest.mark.parametrize("seconds", [0, 0.02])
@pytest.mark.parametrize("how", ["readers", "pins", "no hot cache"])
def test_a_wait_in_vain_ends_in_none_and_one_log_line(make_manager, caplog, seconds, how):
    sm = make_manager(num_chunks=2, blocking_timeout_secs=seconds, local_cpu=how != "no hot cache")
    objs = [allocate(sm) for _ in range(2)]
    if how != "no hot cache":
        sm.batched_put(keys(2), objs)
        if how == "readers":
            objs = [hold(sm, key) for key in keys(2)]
        else:
            sm.batched_contains(keys(2), pin=True)

    assert allocate_waiting(sm) is None

    assert caplog.text.count(NO_MEMORY) == 1
    if how == "pins":
        sm.batched_unpin(keys(2))
    else:
        for obj in objs:
            obj.ref_count_down()
    assert sm.local_cpu_backend.room.num_failed_waits == 1


def test_a_wait_in_vain_evicts_nothing(make_manager):
    sm = make_manager(num_chunks=3)
    put_all(sm, keys(3))
    middle = sorted(sm.local_cpu_backend.hot_cache.values(), key=lambda o: o.metadata.address)[1]
    middle.ref_count_up()

    assert allocate_waiting(sm, 2 * CHUNK_BYTES) is None

    assert order(sm) == [1, 2, 3]
    middle.ref_count_down()


@pytest.mark.parametrize("busy_loop", [True, False])
def test_without_eviction_or_busy_loop_nothing_waits(full, busy_loop):
    sm, _ = full

    made = sm.allocate(CHUNK_SHAPE, torch.bfloat16, eviction=not busy_loop, busy_loop=busy_loop)

    assert made is None


def test_what_can_never_fit_does_not_wait(full, caplog):
    sm, _ = full

    assert allocate_waiting(sm, 2 * CHUNK_BYTES + 1) is None

    assert caplog.text.count("can never fit the CPU pool") == 1


def test_the_release_of_a_reader_wakes_a_waiting_allocation(full):
    sm, readers = full
    thread, answers = start_waiting(sm, lambda: allocate_waiting(sm))

    readers[1].ref_count_down()
    thread.join(timeout=60)

    assert answers[0].is_valid()
    assert order(sm) == [1]
    answers[0].ref_count_down()


def test_an_unpin_wakes_a_waiting_allocation(make_manager):
    sm = make_manager(num_chunks=1, blocking_timeout_secs=FOREVER_SECONDS)
    put_all(sm, keys(1))
    sm.contains(keys(1)[0], pin=True)
    thread, answers = start_waiting(sm, lambda: allocate_waiting(sm))

    sm.batched_unpin(keys(1))
    thread.join(timeout=60)

    assert order(sm) == []
    answers[0].ref_count_down()


def test_a_put_of_what_was_being_filled_wakes_a_waiting_allocation(make_manager):
    sm = make_manager(num_chunks=1, blocking_timeout_secs=FOREVER_SECONDS)
    obj = allocate(sm)
    thread, answers = start_waiting(sm, lambda: allocate_waiting(sm))

    sm.batched_put(keys(1), [obj])
    thread.join(timeout=60)

    assert order(sm) == []
    answers[0].ref_count_down()


def test_an_object_collected_as_garbage_wakes_a_waiting_allocation(make_manager):
    sm = make_manager(num_chunks=1, blocking_timeout_secs=FOREVER_SECONDS)
    dropped = [allocate(sm)]
    dropped.append(dropped)
    thread, answers = start_waiting(sm, lambda: allocate_waiting(sm))

    del dropped
    gc.collect()
    thread.join(timeout=60)

    answers[0].ref_count_down()


def test_a_release_too_small_to_help_leaves_the_allocation_waiting(full):
    sm, readers = full
    thread, answers = start_waiting(sm, lambda: allocate_waiting(sm, 2 * CHUNK_BYTES))

    readers[0].ref_count_down()
    while gauges(sm)["num_waiting"] == 0:
        os.sched_yield()
    assert answers == []
    assert order(sm) == [1, 2]

    readers[1].ref_count_down()
    thread.join(timeout=60)
    answers[0].ref_count_down()


def test_a_batch_waits_until_all_of_it_could_be_held(full):
    sm, readers = full
    thread, answers = start_waiting(
        sm, lambda: sm.batched_allocate(CHUNK_SHAPE, torch.bfloat16, 2, busy_loop=True)
    )

    readers[0].ref_count_down()
    while gauges(sm)["num_waiting"] == 0:
        os.sched_yield()
    assert order(sm) == [1, 2]

    readers[1].ref_count_down()
    thread.join(timeout=60)
    assert len(answers[0]) == 2
    for obj in answers[0]:
        obj.ref_count_down()


def test_every_waiter_is_served_by_one_release_each(full):
    sm, readers = full
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(allocate_waiting(sm)), daemon=True)
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    while gauges(sm)["num_waiting"] < 2:
        os.sched_yield()

    for reader in readers:
        reader.ref_count_down()
    for thread in threads:
        thread.join(timeout=60)

    assert [obj.is_valid() for obj in answers] == [True, True]
    for obj in answers:
        obj.ref_count_down()


def test_other_threads_use_the_cache_while_one_waits(full):
    sm, readers = full
    thread, answers = start_waiting(sm, lambda: allocate_waiting(sm))

    assert sm.touch(keys(2)).all_refreshed
    assert sm.contains(keys(1)[0]) is not None
    assert not put(sm, keys(1, first=9)[0])

    readers[0].ref_count_down()
    thread.join(timeout=60)
    answers[0].ref_count_down()


@pytest.mark.parametrize("batch_size", [0, 1, 3])
def test_a_batch_of_empty_objects_is_a_value_error(manager, batch_size):
    if batch_size == 0:
        assert manager.batched_allocate(torch.Size([0]), torch.uint8, 0) == []
        return
    with pytest.raises(ValueError, match="0 bytes"):
        manager.batched_allocate(torch.Size([0]), torch.uint8, batch_size, busy_loop=False)


def test_a_negative_batch_is_a_value_error(manager):
    with pytest.raises(ValueError, match="batch_size must not be negative"):
        manager.batched_allocate(CHUNK_SHAPE, torch.bfloat16, -1)


def test_byte_buffers_take_nothing_from_the_pool_and_never_wait(full):
    sm, _ = full
    shape = torch.Size([CHUNK_BYTES])

    one = sm.allocate(shape, torch.uint8, MemoryFormat.BINARY_BUFFER)
    many = sm.batched_allocate(shape, torch.uint8, 5, MemoryFormat.BINARY_BUFFER)

    assert len(one.byte_array) == CHUNK_BYTES
    assert [len(obj.byte_array) for obj in many] == [CHUNK_BYTES] * 5


def test_a_scheduler_has_no_memory_to_allocate_and_says_which_setting(metadata, make_config):
    metadata.role = "scheduler"
    sm = StorageManager(make_config(), metadata)

    with pytest.raises(ConfigError, match="LMCACHE_MAX_LOCAL_CPU_SIZE"):
        sm.allocate(CHUNK_SHAPE, torch.bfloat16)
    sm.close()
