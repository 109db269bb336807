"""Ids as serving engines give them: what is no row of whole numbers is refused by its name."""

from array import array
from collections import UserList

import pytest
import torch

from lmcache.v1.gpu_connector import RawBlockConnector, VLLMPagedMemGPUConnectorV2
from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import AdHocMemoryAllocator
from lmcache.v1.memory_format import MemoryFormat

SMALLEST = -(2**63)


class Paged:
    """Four slots of a token each in a cache of vLLM's kind."""

    keyword = "slot_mapping"

    def __init__(self):
        torch.manual_seed(4)
        self.memory = torch.randn(2, 6, 1, 1, 8)
        self.connector = VLLMPagedMemGPUConnectorV2(8, 1)
        self.connector.initialize_kvcaches_ptr(kvcaches=[self.memory])
        self.obj = AdHocMemoryAllocator().allocate(
            torch.Size([2, 1, 4, 8]), torch.float32, MemoryFormat.KV_2LTD
        )

    def rows(self, ids):
        return self.memory[:, ids].flatten()

    def call(self, name, ids, **more):
        getattr(self.connector, name)(self.obj, 0, 4, **{self.keyword: ids}, **more)


class Raw(Paged):
    """Four opaque blocks."""

    keyword = "block_ids"

    def __init__(self):
        torch.manual_seed(4)
        self.memory = torch.randn(6, 8)
        self.connector = RawBlockConnector([self.memory], 1)
        self.obj = AdHocMemoryAllocator().allocate(torch.Size([4 * 32]), torch.uint8)

    def rows(self, ids):
        return self.memory[ids].flatten()


@pytest.fixture(params=[Paged, Raw])
def cache(request):
    return request.param()


ROWS = {
    "list": [4, 0, 2, 1],
    "tuple": (4, 0, 2, 1),
    "range": range(1, 5),
    "sequence": UserList([4, 0, 2, 1]),
    "array": array("i", [4, 0, 2, 1]),
    "buffer": memoryview(array("q", [4, 0, 2, 1])),
    "list of numbers like ints": [torch.tensor(4), 0, torch.tensor(2, dtype=torch.uint8), 1],
    **{
        str(dtype): torch.tensor([4, 0, 2, 1], dtype=dtype)
        for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
    },
    **{
        str(dtype): torch.tensor([4, 0, 2, 1]).to(dtype)
        for dtype in (torch.uint16, torch.uint32, torch.uint64)
    },
    "strided": torch.tensor([4, 9, 0, 9, 2, 9, 1, 9])[::2],
}


@pytest.mark.parametrize("ids", ROWS.values(), ids=ROWS)
def test_rows_of_whole_numbers_are_taken(cache, ids):
    cache.call("from_gpu", ids)

    expected = cache.rows([int(i) for i in ids])
    assert torch.equal(cache.obj.raw_tensor, expected.view(torch.uint8))


REFUSED = {
    "a tensor of truth values": (torch.tensor([True, False] * 2), TypeError, "torch.bool"),
    "a tensor of floats": (torch.ones(4), TypeError, "torch.float32"),
    "a tensor of complex numbers": (torch.ones(4).cfloat(), TypeError, "torch.complex64"),
    "two axes": (torch.ones(2, 2).long(), ValueError, r"one row, not a tensor of shape \[2, 2\]"),
    "no axis": (torch.tensor(4), ValueError, r"one row, not a tensor of shape \[\]"),
    "no values": (torch.ones(4, device="meta").long(), ValueError, "on meta"),
    "a sparse row": (torch.ones(4).long().to_sparse(), ValueError, "sparse"),
    "unsigned numbers beyond int64": (
        torch.tensor([0, 1, -1, 2]).view(torch.uint64),
        ValueError,
        r"\[2\] does not fit",
    ),
    "text": ("0123", TypeError, "not str"),
    "bytes": (bytes(32), TypeError, "not bytes"),
    "a bytearray": (bytearray(32), TypeError, "not bytearray"),
    "a view of bytes": (memoryview(bytes(32)), TypeError, "elements of format 'B'"),
    "a buffer of floats": (memoryview(array("d", [0.0] * 4)), TypeError, "elements of format 'd'"),
    "a buffer of two axes": (
        memoryview(bytes(32)).cast("q", (2, 2)),
        ValueError,
        r"one row, not of shape \[2, 2\]",
    ),
    "a set": ({0, 1, 2, 3}, TypeError, "not set"),
    "a mapping": ({0: 0, 1: 1, 2: 2, 3: 3}, TypeError, "not dict"),
    "an iterator": (iter([0, 1, 2, 3]), TypeError, "not list_iterator"),
    "a number": (4, TypeError, "not int"),
    "truth values": ([0, True, 2, 3], TypeError, r"\[1\] must be a whole number, not True"),
    "floats": ([0, 1, 2.0, 3], TypeError, r"\[2\] must be a whole number, not 2.0"),
    "words": ([0, 1, 2, "3"], TypeError, r"\[3\] must be a whole number, not '3'"),
    "lists": ([[0, 1], [2, 3]], TypeError, r"\[0\] must be a whole number, not \[0, 1\]"),
    "nothing": ([0, None, 2, 3], TypeError, r"\[1\] must be a whole number, not None"),
    "a truth tensor": ([0, torch.tensor(True), 2, 3], TypeError, r"\[1\] must be a whole"),
    "a float array": (array("d", [0, 1, 2, 3]), TypeError, r"\[0\] must be a whole number"),
    "a number beyond 64 bits": ([0, 1, 2**63, 3], ValueError, r"\[2\] is 9223372036854775808: it"),
    "a number below 64 bits": ([0, 1, SMALLEST - 1, 3], ValueError, r"\[2\] is -92.*09: it must"),
}


@pytest.mark.parametrize("call", ["from_gpu", "to_gpu"])
@pytest.mark.parametrize(("ids", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_row_of_whole_numbers_is_refused_by_name(cache, call, ids, error, message):
    before, content = cache.memory.clone(), cache.obj.raw_tensor.clone()

    with pytest.raises(error, match=f"{cache.keyword}.*{message}"):
        cache.call(call, ids)

    assert torch.equal(cache.memory, before)
    assert torch.equal(cache.obj.raw_tensor, content)


@pytest.mark.parametrize("call", ["from_gpu", "to_gpu"])
@pytest.mark.parametrize("as_ids", [list, torch.tensor])
def test_no_id_leaves_an_item_out(cache, call, as_ids):
    """Also the least there is, which a NaN becomes."""
    before = cache.memory.clone()

    with pytest.raises(ValueError, match=r"ids\[2\] is -9223372036854775808"):
        cache.call(call, as_ids([4, 0, SMALLEST, 1]))

    assert torch.equal(cache.memory, before)


@pytest.mark.parametrize(
    ("cached", "error", "message"),
    [
        ("8", TypeError, "must be a whole number, not '8'"),
        (True, TypeError, "must be a whole number, not True"),
        (1.0, TypeError, "must be a whole number, not 1.0"),
        (-1, ValueError, "must be at least 0, not -1"),
    ],
)
def test_cached_tokens_that_are_no_count_are_refused(cached, error, message):
    paged = Paged()
    before = paged.memory.clone()

    with pytest.raises(error, match=f"vllm_cached_tokens {message}"):
        paged.call("to_gpu", [4, 0, 2, 1], vllm_cached_tokens=cached)

    assert torch.equal(paged.memory, before)


def test_no_count_of_cached_tokens_is_none_cached():
    paged = Paged()
    paged.call("to_gpu", [4, 0, 2, 1], vllm_cached_tokens=None)
    assert torch.equal(paged.rows([4, 0, 2, 1]).view(torch.uint8), paged.obj.raw_tensor)


def test_slots_of_cached_tokens_are_not_looked_at():
    paged = Paged()
    before = paged.memory.clone()

    paged.call("to_gpu", [SMALLEST, 99, 2, 1], vllm_cached_tokens=2)

    assert torch.equal(paged.memory[:, [0, 3, 4, 5]], before[:, [0, 3, 4, 5]])
    expected = paged.obj.tensor[:, 0, 2:].flatten()
    assert torch.equal(paged.rows([2, 1]).view(torch.uint8), expected.view(torch.uint8))
