"""Memory objects: who keeps them alive, what they say of themselves, and byte-exact views."""

import gc

import pytest
import torch

from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import AdHocMemoryAllocator
from lmcache.v1.memory_allocators.host_memory_allocator import HostMemoryAllocator
from lmcache.v1.memory_management import (
    BytesBufferMemoryObj,
    MemoryFormat,
    MemoryObj,
    MemoryObjMetadata,
    TensorMemoryObj,
)

SHAPE = torch.Size([2, 3, 4, 8])
SIZE_BYTES = 2 * 3 * 4 * 8 * 2
UPSTREAM_FORMATS = {
    "UNDEFINED": (0, 0),
    "KV_2LTD": (1, 2),
    "KV_T2D": (2, 1),
    "KV_2TD": (3, 0),
    "BINARY": (4, 0),
    "BINARY_BUFFER": (5, 0),
    "KV_MLA_FMT": (6, 2),
    "EC_TD": (7, 0),
    "HS_TD": (8, 0),
}


class ToldAllocator:
    """A caller's own allocator, which hears what is freed."""

    def __init__(self):
        self.freed = []

    def free(self, memory_obj, allocator_type=None):
        self.freed.append(memory_obj)


@pytest.fixture
def allocator():
    made = HostMemoryAllocator(64 * 4096)
    yield made
    made.check_integrity()


@pytest.fixture(params=["pool", "own memory"])
def any_allocator(request):
    return HostMemoryAllocator(64 * 4096) if request.param == "pool" else AdHocMemoryAllocator()


def make(allocator, shape=SHAPE, dtype=torch.bfloat16, fmt=MemoryFormat.KV_2LTD):
    return allocator.allocate(shape, dtype, fmt)


def test_formats_have_the_numbers_and_token_dims_of_0_5_6():
    assert {f.name: (f.value, f.token_dim()) for f in MemoryFormat} == UPSTREAM_FORMATS


def test_a_fresh_object_has_one_reference_and_can_be_evicted(any_allocator):
    obj = make(any_allocator)

    assert (obj.get_ref_count(), obj.pin_count, obj.is_pinned) == (1, 0, False)
    assert obj.is_valid()
    assert obj.can_evict
    obj.ref_count_down()


def test_the_last_reference_frees_the_bytes(any_allocator):
    obj = make(any_allocator)
    obj.ref_count_up()

    obj.ref_count_down()
    assert obj.is_valid()
    obj.ref_count_down()

    assert not obj.is_valid()
    assert (obj.tensor, obj.raw_tensor, obj.get_tensor(0)) == (None, None, None)


def test_a_pin_keeps_the_bytes_when_the_last_reference_goes(any_allocator):
    obj = make(any_allocator)
    assert obj.pin()
    obj.ref_count_down()
    assert obj.is_valid()

    assert obj.unpin()

    assert not obj.is_valid()


@pytest.mark.parametrize("held_by", ["reference", "pin"])
def test_what_somebody_holds_cannot_be_evicted(any_allocator, held_by):
    obj = make(any_allocator)
    if held_by == "pin":
        obj.pin()
    else:
        obj.ref_count_up()

    assert not obj.can_evict
    obj.invalidate()


def test_releasing_too_often_never_counts_below_zero_and_is_counted(allocator):
    obj = make(allocator)
    for _ in range(3):
        obj.ref_count_down()
        obj.unpin()

    assert (obj.get_ref_count(), obj.pin_count) == (0, 0)
    assert allocator.inner.pool.gauges()["num_underflow"] == 5
    assert allocator.inner.total_allocated_size == 0


def test_a_release_too_many_does_not_free_what_took_the_same_place(allocator):
    first = make(allocator)
    first.ref_count_down()
    second = make(allocator)
    assert second.metadata.address == first.metadata.address

    first.ref_count_down()
    first.unpin()
    first.invalidate()

    assert second.is_valid()
    assert make(allocator).metadata.address != second.metadata.address


def test_an_object_dropped_while_referenced_gives_its_bytes_back_and_memcheck_tells(allocator):
    obj = make(allocator)
    assert allocator.memcheck()

    del obj
    gc.collect()

    assert allocator.inner.total_allocated_size == 0
    assert not allocator.memcheck()


def test_a_view_keeps_the_pools_memory_alive():
    obj = make(HostMemoryAllocator(4096))
    obj.raw_tensor.fill_(7)
    view, tensor = obj.byte_array, obj.raw_tensor
    obj.ref_count_down()
    del obj
    gc.collect()

    assert bytes(view) == bytes([7]) * SIZE_BYTES
    assert int(tensor.sum()) == 7 * SIZE_BYTES


def test_sizes_shapes_and_format_are_those_asked_for(any_allocator):
    obj = make(any_allocator)

    assert (obj.get_size(), obj.get_shape(), obj.get_dtype()) == (SIZE_BYTES, SHAPE, torch.bfloat16)
    assert (obj.get_shapes(), obj.get_dtypes()) == ([SHAPE], [torch.bfloat16])
    assert obj.get_memory_format() is MemoryFormat.KV_2LTD
    assert obj.get_num_tokens() == 4
    assert obj.get_physical_size() >= SIZE_BYTES
    assert obj.meta.shape == obj.metadata.shape == SHAPE
    assert obj.parent() is not None
    obj.ref_count_down()


@pytest.mark.parametrize(
    ("fmt", "shape", "num_tokens"),
    [
        (MemoryFormat.KV_2LTD, (2, 3, 5, 8), 5),
        (MemoryFormat.KV_T2D, (5, 2, 8), 5),
        (MemoryFormat.KV_2TD, (2, 5, 8), 5),
        (MemoryFormat.KV_MLA_FMT, (1, 3, 5, 8), 5),
        (MemoryFormat.HS_TD, (5, 8), 5),
        (MemoryFormat.BINARY, (40,), 40),
    ],
)
def test_tokens_are_counted_along_the_axis_where_the_format_has_them(
    allocator, fmt, shape, num_tokens
):
    obj = make(allocator, torch.Size(shape), torch.uint8, fmt)

    assert obj.get_num_tokens() == num_tokens
    obj.ref_count_down()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float, torch.float8_e4m3fnuz])
def test_tensor_raw_tensor_and_byte_array_are_the_same_bytes(any_allocator, dtype):
    obj = make(any_allocator, dtype=dtype)
    content = torch.arange(obj.get_size(), dtype=torch.int64).to(torch.uint8)

    obj.byte_array.cast("B")[:] = bytes(content.tolist())

    assert torch.equal(obj.raw_tensor, content)
    assert (obj.tensor.shape, obj.tensor.dtype) == (SHAPE, dtype)
    assert torch.equal(obj.tensor.flatten().view(torch.uint8), content)
    assert obj.tensor.data_ptr() == obj.data_ptr == obj.raw_data.data_ptr()
    assert (obj.byte_array.format, obj.byte_array.itemsize) == ("<B", 1)
    assert not obj.byte_array.readonly
    obj.ref_count_down()


def test_writing_every_byte_of_one_object_leaves_its_neighbours_alone(allocator):
    before, obj, after = (make(allocator) for _ in range(3))
    before.raw_data.fill_(1)
    after.raw_data.fill_(3)

    obj.raw_data.fill_(2)

    assert [int(o.raw_data.float().mean()) for o in (before, obj, after)] == [1, 2, 3]
    for o in (before, obj, after):
        o.ref_count_down()


def test_groups_lie_one_after_the_other(any_allocator):
    shapes = [torch.Size([2, 1, 4, 8]), torch.Size([1, 2, 4, 3])]
    dtypes = [torch.bfloat16, torch.uint8]
    obj = any_allocator.allocate(shapes, dtypes, MemoryFormat.KV_2LTD)
    assert obj.get_size() == 128 + 24

    obj.get_tensor(0).fill_(0)
    obj.get_tensor(1).fill_(9)

    assert obj.raw_tensor.tolist() == [0] * 128 + [9] * 24
    assert (obj.get_tensor(1).shape, obj.get_shapes()) == (shapes[1], shapes)
    for index in (-1, 2):
        with pytest.raises(IndexError):
            obj.get_tensor(index)
    obj.ref_count_down()


def test_a_used_size_makes_a_flat_object_of_that_many_bytes(any_allocator):
    obj = make(any_allocator)
    physical = obj.get_physical_size()

    obj.set_used_size(5)

    assert (obj.get_size(), obj.get_shape(), obj.get_dtype()) == (5, torch.Size([5]), torch.uint8)
    assert (len(obj.byte_array), obj.raw_tensor.numel()) == (5, 5)
    assert obj.get_physical_size() == physical
    for wrong in (-1, physical + 1):
        with pytest.raises(ValueError, match="used size"):
            obj.set_used_size(wrong)
    obj.ref_count_down()


def test_a_callers_allocator_hears_once_when_its_object_is_freed():
    told = ToldAllocator()
    metadata = MemoryObjMetadata(torch.Size([8]), torch.uint8, 0, 8, 1, fmt=MemoryFormat.BINARY)
    obj = TensorMemoryObj(torch.zeros(8, dtype=torch.uint8), metadata, told)
    obj.pin()

    obj.ref_count_down()
    assert told.freed == []
    obj.unpin()
    obj.unpin()

    assert told.freed == [obj]
    assert obj.parent() is told


def test_metadata_shows_the_present_counts(any_allocator):
    obj = make(any_allocator)
    obj.ref_count_up()
    obj.pin()

    assert (obj.metadata.ref_count, obj.metadata.pin_count) == (2, 1)
    obj.invalidate()


def test_metadata_survives_a_round_trip_through_its_dictionary():
    metadata = MemoryObjMetadata(
        SHAPE,
        torch.bfloat16,
        4096,
        8192,
        1,
        fmt=MemoryFormat.KV_2LTD,
        shapes=[SHAPE, torch.Size([4])],
        dtypes=[torch.bfloat16, torch.uint8],
    )

    again = MemoryObjMetadata.from_dict(metadata.to_dict())

    assert again == metadata
    assert again.get_size() == SIZE_BYTES + 4
    with pytest.raises(ValueError, match="nn"):
        MemoryObjMetadata.from_dict({**metadata.to_dict(), "dtype": "torch.nn"})


def test_metadata_without_a_dtype_has_no_size():
    assert MemoryObjMetadata(torch.Size([4]), None, 0, 0, 1).get_size() == 0


def test_a_byte_buffer_lives_as_long_as_it_is_referred_to():
    obj = BytesBufferMemoryObj(bytearray(b"abcd"))

    for _ in range(3):
        obj.ref_count_down()

    assert obj.is_valid()
    assert (obj.get_ref_count(), obj.get_size()) == (1, 4)
    assert bytes(obj.byte_array) == b"abcd"
    assert obj.raw_tensor.tolist() == list(b"abcd")
    assert bytes(obj.raw_data) == b"abcd"
    assert obj.get_memory_format() is MemoryFormat.BINARY_BUFFER
    assert obj.parent() is None


def test_a_byte_buffer_is_not_copied():
    content = bytearray(b"abcd")
    obj = BytesBufferMemoryObj(content)

    obj.byte_array[0] = ord("z")

    assert content == b"zbcd"


def test_a_pinned_byte_buffer_cannot_be_evicted():
    obj = BytesBufferMemoryObj(bytearray(4))
    assert obj.can_evict

    obj.pin()
    assert (obj.can_evict, obj.is_pinned) == (False, True)

    obj.unpin()
    assert obj.can_evict


def test_both_classes_are_memory_objects():
    assert issubclass(TensorMemoryObj, MemoryObj)
    assert issubclass(BytesBufferMemoryObj, MemoryObj)
