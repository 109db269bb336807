"""The pool's host memory: opened without a device, pinned when it can be, and clear when not."""

import pytest
from builders import keys, put_all
from fakes import FakeHostPinner

from lmcache.v1.device.host_memory import HostMemory
from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator

SIZE_BYTES = 1 << 20


def test_memory_is_pageable_zeroed_and_page_aligned():
    memory = HostMemory(SIZE_BYTES)

    assert not memory.is_pinned
    assert memory.tensor.numel() == SIZE_BYTES
    assert int(memory.tensor.sum()) == 0
    assert memory.tensor.data_ptr() % 4096 == 0


def test_pinning_locks_the_whole_range_once_and_closing_unlocks_it():
    memory, pinner = HostMemory(SIZE_BYTES), FakeHostPinner()

    assert memory.pin(pinner)
    assert memory.pin(pinner)
    assert memory.is_pinned
    assert pinner.pinned == {memory.tensor.data_ptr(): SIZE_BYTES}

    memory.close()
    memory.close()
    assert pinner.pinned == {}
    assert not memory.is_pinned


@pytest.mark.parametrize("error", [RuntimeError("out of locked pages"), OSError("EPERM")])
def test_a_refused_pin_leaves_the_pool_usable_and_says_size_limit_and_remedy_in_one_line(
    error, caplog
):
    allocator = MixedMemoryAllocator(SIZE_BYTES)

    assert not allocator.pinned.pin(FakeHostPinner(refusal=error))

    (record,) = caplog.records
    text = record.getMessage()
    assert "\n" not in text
    assert f"FakeRuntime could not pin 0.00 GiB of host memory ({error})" in text
    assert "The limit on locked memory is " in text
    assert "raise `ulimit -l`, or lower LMCACHE_MAX_LOCAL_CPU_SIZE" in text
    assert not allocator.pinned.is_pinned
    allocator.close()


def test_a_pin_may_be_tried_again_after_a_refusal():
    memory, pinner = HostMemory(SIZE_BYTES), FakeHostPinner()
    assert not memory.pin(FakeHostPinner(refusal=RuntimeError("busy")))

    assert memory.pin(pinner)
    memory.close()


def test_other_faults_of_a_runtime_are_not_taken_for_a_refusal():
    with pytest.raises(AttributeError):
        HostMemory(SIZE_BYTES).pin(FakeHostPinner(refusal=AttributeError("a fault in the binding")))


def test_closing_a_pool_unpins_it_and_leaves_referenced_bytes_readable(make_manager):
    sm, pinner = make_manager(num_chunks=2), FakeHostPinner()
    assert sm.local_cpu_backend.memory_allocator.pinned.pin(pinner)
    put_all(sm, keys(1))
    reader = sm.get(keys(1)[0])

    sm.close()

    assert pinner.pinned == {}
    assert int(reader.raw_tensor[0]) == 1
    reader.ref_count_down()


@pytest.mark.parametrize("size_bytes", [0, -4096])
def test_no_bytes_is_an_error(size_bytes):
    with pytest.raises(ValueError, match="must be positive"):
        HostMemory(size_bytes)
