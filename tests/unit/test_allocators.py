"""Allocators: what they hand out is theirs alone, what comes back is free, and what they refuse."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache.v1.errors import UnsupportedFeatureError
from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import AdHocMemoryAllocator
from lmcache.v1.memory_allocators.host_memory_allocator import HostMemoryAllocator
from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator
from lmcache.v1.memory_allocators.paged_tensor_memory_allocator import PagedTensorMemoryAllocator
from lmcache.v1.memory_allocators.pin_memory_allocator import PinMemoryAllocator
from lmcache.v1.memory_allocators.tensor_memory_allocator import TensorMemoryAllocator
from lmcache.v1.memory_management import AddressManager, BytesBufferMemoryObj, MemoryFormat

ALIGN_BYTES = 4096
NUM_SLOTS = 16
POOL_BYTES = NUM_SLOTS * ALIGN_BYTES
PAGE_SHAPES, PAGE_DTYPES = [torch.Size([2, 2, 16, 32])], [torch.bfloat16]
BINARY = MemoryFormat.BINARY

POOLED = {
    "tensor": lambda: TensorMemoryAllocator(torch.zeros(POOL_BYTES, dtype=torch.uint8)),
    "host": lambda: HostMemoryAllocator(POOL_BYTES),
    "pin": lambda: PinMemoryAllocator(POOL_BYTES),
    "mixed": lambda: MixedMemoryAllocator(POOL_BYTES),
}
PAGED = {
    "tensor": lambda: PagedTensorMemoryAllocator(
        torch.zeros(POOL_BYTES, dtype=torch.uint8), PAGE_SHAPES, PAGE_DTYPES
    ),
    "host": lambda: HostMemoryAllocator(
        POOL_BYTES, use_paging=True, shapes=PAGE_SHAPES, dtypes=PAGE_DTYPES
    ),
    "mixed": lambda: MixedMemoryAllocator(
        POOL_BYTES, use_paging=True, shapes=PAGE_SHAPES, dtypes=PAGE_DTYPES
    ),
}


@pytest.fixture(params=POOLED)
def allocator(request):
    made = POOLED[request.param]()
    yield made
    made.check_integrity()
    assert made.memcheck()
    made.close()
    made.close()


@pytest.fixture(params=PAGED)
def paged(request):
    made = PAGED[request.param]()
    yield made
    made.check_integrity()
    made.close()


def flat(nbytes):
    return torch.Size([nbytes])


def release(objs):
    for obj in objs:
        obj.ref_count_down()


def free_bytes(allocator):
    return allocator.pool_allocator.pool.gauges()["free_bytes"]


def test_a_full_pool_answers_none_and_a_release_makes_room(allocator):
    objs = [allocator.allocate(flat(ALIGN_BYTES), torch.uint8, BINARY) for _ in range(NUM_SLOTS)]
    assert allocator.allocate(flat(1), torch.uint8, BINARY) is None

    objs[3].ref_count_down()
    objs[3] = allocator.allocate(flat(1), torch.uint8, BINARY)

    assert objs[3].is_valid()
    release(objs)
    assert free_bytes(allocator) == POOL_BYTES


def test_objects_never_share_a_byte(allocator):
    objs = [allocator.allocate(flat(n * 500), torch.uint8, BINARY) for n in range(1, 12)]
    for number, obj in enumerate(objs):
        obj.raw_data.fill_(number)

    assert all(bool((obj.raw_data == number).all()) for number, obj in enumerate(objs))
    release(objs)


def test_sizes_are_rounded_up_to_the_alignment(allocator):
    obj = allocator.allocate(flat(ALIGN_BYTES + 1), torch.uint8, BINARY)

    assert (obj.get_size(), obj.get_physical_size()) == (ALIGN_BYTES + 1, 2 * ALIGN_BYTES)
    assert obj.metadata.address % ALIGN_BYTES == 0
    assert obj.raw_data.numel() == 2 * ALIGN_BYTES
    obj.ref_count_down()


def test_freed_neighbours_become_one_range(allocator):
    objs = [allocator.allocate(flat(ALIGN_BYTES), torch.uint8, BINARY) for _ in range(NUM_SLOTS)]
    release(objs[5:8])
    assert allocator.allocate(flat(4 * ALIGN_BYTES), torch.uint8, BINARY) is None

    large = allocator.allocate(flat(3 * ALIGN_BYTES), torch.uint8, BINARY)

    assert large.metadata.address == 5 * ALIGN_BYTES
    release([large, *objs[:5], *objs[8:]])


def test_a_batch_is_all_or_nothing(allocator):
    assert allocator.batched_allocate(flat(ALIGN_BYTES), torch.uint8, NUM_SLOTS + 1, BINARY) is None
    assert free_bytes(allocator) == POOL_BYTES

    objs = allocator.batched_allocate(flat(ALIGN_BYTES), torch.uint8, NUM_SLOTS, BINARY)

    assert len({obj.data_ptr for obj in objs}) == NUM_SLOTS
    allocator.batched_free(objs)
    assert free_bytes(allocator) == POOL_BYTES


def test_freeing_whatever_still_refers_to_it_makes_an_object_invalid_once(allocator):
    obj = allocator.allocate(flat(ALIGN_BYTES), torch.uint8, BINARY)
    obj.ref_count_up()

    allocator.free(obj)
    allocator.free(obj)

    assert not obj.is_valid()
    assert free_bytes(allocator) == POOL_BYTES


@pytest.mark.parametrize("shape", [(0,), (2, 0, 4)])
def test_an_empty_object_is_refused(allocator, shape):
    with pytest.raises(ValueError, match="0 bytes"):
        allocator.allocate(torch.Size(shape), torch.uint8, BINARY)


@pytest.mark.parametrize(
    ("shapes", "dtypes", "error"),
    [
        ([torch.Size([1])], [torch.uint8, torch.uint8], ValueError),
        ([], [], ValueError),
        (torch.Size([1]), ["uint8"], TypeError),
    ],
)
def test_shapes_and_dtypes_that_do_not_go_together_are_refused(allocator, shapes, dtypes, error):
    with pytest.raises(error):
        allocator.allocate(shapes, dtypes, BINARY)


def test_lists_of_groups_and_tuples_are_the_same_as_sizes(allocator):
    one = allocator.allocate([torch.Size([8])], [torch.uint8], BINARY)
    other = allocator.allocate((8,), torch.uint8, BINARY)

    assert one.get_shapes() == other.get_shapes() == [torch.Size([8])]
    release([one, other])


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6 * ALIGN_BYTES)), max_size=60))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_mix_of_allocations_and_releases_conserves_bytes_and_contents(steps):
    allocator = HostMemoryAllocator(POOL_BYTES)
    live = {}
    for number, (is_release, nbytes) in enumerate(steps):
        if is_release and live:
            live.pop(sorted(live)[nbytes % len(live)]).ref_count_down()
        elif not is_release:
            obj = allocator.allocate(flat(nbytes), torch.uint8, BINARY)
            if obj is not None:
                obj.raw_data.fill_(number % 251)
                live[number] = obj
        taken = sum(obj.get_physical_size() for obj in live.values())
        assert free_bytes(allocator) == POOL_BYTES - taken
        allocator.check_integrity()
    for number, obj in live.items():
        assert bool((obj.raw_data == number % 251).all())
        obj.ref_count_down()
    assert free_bytes(allocator) == POOL_BYTES


def test_pages_are_of_one_size_and_numbered(paged):
    objs = [paged.allocate(PAGE_SHAPES, PAGE_DTYPES) for _ in range(NUM_SLOTS)]

    assert paged.allocate(PAGE_SHAPES, PAGE_DTYPES) is None
    assert sorted(obj.metadata.address for obj in objs) == list(range(NUM_SLOTS))
    assert {obj.get_physical_size() for obj in objs} == {ALIGN_BYTES}
    release(objs)


def test_a_smaller_object_takes_a_whole_page_and_a_larger_one_is_refused(paged):
    obj = paged.allocate([torch.Size([2, 2, 3, 32])], PAGE_DTYPES)

    assert (obj.get_num_tokens(), obj.get_physical_size()) == (3, ALIGN_BYTES)
    with pytest.raises(ValueError, match="do not fit a page"):
        paged.allocate([torch.Size([2, 2, 17, 32])], PAGE_DTYPES)
    obj.ref_count_down()


def test_paged_buffers_are_the_bytes_of_the_pages():
    allocator = PAGED["mixed"]()
    obj = allocator.allocate(PAGE_SHAPES, PAGE_DTYPES)
    obj.raw_data.fill_(5)

    page = allocator.get_paged_buffers()[obj.metadata.address]

    assert page.data_ptr() == obj.data_ptr
    assert bool((page == 5).all())
    assert len(allocator.get_paged_buffers()) == NUM_SLOTS
    assert POOLED["mixed"]().get_paged_buffers() is None
    obj.ref_count_down()


def test_paging_needs_the_shapes_of_a_full_chunk():
    with pytest.raises(ValueError, match="use_paging needs"):
        HostMemoryAllocator(POOL_BYTES, use_paging=True)
    with pytest.raises(ValueError, match="holds nothing"):
        PagedTensorMemoryAllocator(torch.zeros(10, dtype=torch.uint8), PAGE_SHAPES, PAGE_DTYPES)


def test_byte_buffers_of_a_mixed_allocator_take_nothing_from_the_pool():
    allocator = MixedMemoryAllocator(POOL_BYTES)
    buffer = allocator.allocate(flat(100), torch.uint8, MemoryFormat.BINARY_BUFFER)
    batch = allocator.batched_allocate(flat(7), torch.uint8, 3, MemoryFormat.BINARY_BUFFER)

    assert isinstance(buffer, BytesBufferMemoryObj)
    assert [len(obj.byte_array) for obj in (buffer, *batch)] == [100, 7, 7, 7]
    assert free_bytes(allocator) == POOL_BYTES


def test_the_parent_of_a_mixed_allocators_objects_is_the_mixed_one():
    allocator = MixedMemoryAllocator(POOL_BYTES)

    obj = allocator.allocate(flat(8), torch.uint8, BINARY)

    assert obj.parent() is allocator
    assert (allocator.align_bytes, allocator.pin_allocator.align_bytes) == (ALIGN_BYTES,) * 2
    obj.ref_count_down()


def test_a_mixed_allocator_aligns_as_asked():
    allocator = MixedMemoryAllocator(POOL_BYTES, align_bytes=512)

    obj = allocator.allocate(flat(513), torch.uint8, BINARY)

    assert obj.get_physical_size() == 1024
    obj.ref_count_down()


@pytest.mark.parametrize(
    "option", [{"use_hugepages": True}, {"numa_mapping": object()}, {"shm_name": "name"}]
)
def test_a_mixed_allocator_refuses_what_this_fork_lacks(option):
    with pytest.raises(UnsupportedFeatureError, match=next(iter(option))):
        MixedMemoryAllocator(POOL_BYTES, **option)


def test_a_mixed_allocator_takes_the_unset_options_of_0_5_6_and_no_others():
    MixedMemoryAllocator(POOL_BYTES, numa_mapping=None, shm_name=None, config=None).close()
    with pytest.raises(TypeError, match="no option 'hugepages'"):
        MixedMemoryAllocator(POOL_BYTES, hugepages=True)


def test_memory_of_its_own_has_no_limit():
    allocator = AdHocMemoryAllocator()
    objs = allocator.batched_allocate(flat(POOL_BYTES), torch.uint8, 3, BINARY)

    assert len({obj.data_ptr for obj in objs}) == 3
    allocator.ref_count_up(objs[0])
    assert allocator.get_ref_count(objs[0]) == 2
    allocator.ref_count_down(objs[0])
    allocator.batched_free(objs)
    assert not any(obj.is_valid() for obj in objs)


@pytest.mark.parametrize("size", [0, -1])
def test_a_pool_without_bytes_is_refused(size):
    with pytest.raises(ValueError, match="positive"):
        HostMemoryAllocator(size)


def test_addresses_are_handed_out_aligned_and_come_back():
    addresses = AddressManager(10 * ALIGN_BYTES)

    first, second = addresses.allocate(1), addresses.allocate(ALIGN_BYTES + 1)

    assert (first, second) == ((0, ALIGN_BYTES), (ALIGN_BYTES, 2 * ALIGN_BYTES))
    assert (addresses.get_free_size(), addresses.get_heap_size()) == (
        7 * ALIGN_BYTES,
        10 * ALIGN_BYTES,
    )
    addresses.free(*first)
    addresses.free(*second)
    assert addresses.allocate(10 * ALIGN_BYTES) == (0, 10 * ALIGN_BYTES)
    assert addresses.check_consistency()


@pytest.mark.parametrize("size", [0, -1])
def test_no_address_for_no_bytes(size):
    with pytest.raises(ValueError, match="must be positive"):
        AddressManager(ALIGN_BYTES).allocate(size)
    with pytest.raises(ValueError, match="must be positive"):
        AddressManager(size)


def test_a_full_address_space_raises_and_a_batch_takes_nothing_then():
    addresses = AddressManager(4 * ALIGN_BYTES)

    with pytest.raises(RuntimeError, match="no free range"):
        addresses.allocate(4 * ALIGN_BYTES + 1)
    with pytest.raises(RuntimeError, match="no free range"):
        addresses.batched_allocate(ALIGN_BYTES, 5)

    assert addresses.get_free_size() == 4 * ALIGN_BYTES
    assert len(addresses.batched_allocate(ALIGN_BYTES, 4)) == 4


def test_freeing_what_was_not_handed_out_is_an_error():
    addresses = AddressManager(4 * ALIGN_BYTES)
    address, size = addresses.allocate(2 * ALIGN_BYTES)

    for wrong in ((ALIGN_BYTES, ALIGN_BYTES), (address, ALIGN_BYTES), (3 * ALIGN_BYTES, 1)):
        with pytest.raises(ValueError, match="was handed out"):
            addresses.free(*wrong)
    addresses.free(address, size)
    with pytest.raises(ValueError, match="was handed out"):
        addresses.free(address, size)


def test_an_address_space_grows_at_its_end():
    addresses = AddressManager(ALIGN_BYTES)
    addresses.allocate(1)

    addresses.sbrk(2 * ALIGN_BYTES)

    assert addresses.allocate(2 * ALIGN_BYTES) == (ALIGN_BYTES, 2 * ALIGN_BYTES)
    assert addresses.check_consistency()
