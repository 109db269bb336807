"""What every connector that copies promises, over every form of cache it takes."""

import pytest
import torch

from lmcache.v1.gpu_connector import BlockOrder, RawBlockConnector, VLLMPagedMemGPUConnectorV2
from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import AdHocMemoryAllocator
from lmcache.v1.memory_format import MemoryFormat

LAYERS, HEADS, HEAD_SIZE = 2, 3, 8
CHUNK_TOKENS = 256
SPARE_BLOCKS = 3
POISON = 0xEE
DTYPES = [
    torch.bfloat16,
    torch.half,
    torch.float32,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
]


def random_tensor(shape, dtype):
    """Any bytes, infinities and not-a-numbers included."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8).view(dtype).view(shape)


class PagedCache:
    """A KV cache of vLLM in one of its forms, and a request whose blocks are in no order."""

    def __init__(self, form, num_blocks, block_size, dtype):
        total, use_mla = num_blocks + SPARE_BLOCKS, form == "mla"
        shape, self.block_axis, view = {
            "flash_attention": ((2, total, block_size, HEADS, HEAD_SIZE), 1, list),
            "flash_infer": ((total, 2, block_size, HEADS, HEAD_SIZE), 0, list),
            "pair": ((2, total, block_size, HEADS, HEAD_SIZE), 1, lambda t: [tuple(x) for x in t]),
            "hnd": (
                (2, total, HEADS, block_size, HEAD_SIZE),
                1,
                lambda t: [x.transpose(2, 3) for x in t],
            ),
            "mla": ((total, block_size, HEADS * HEAD_SIZE), 0, list),
        }[form]
        self.memory = [random_tensor(shape, dtype) for _ in range(LAYERS)]
        self.connector = VLLMPagedMemGPUConnectorV2(HEADS * HEAD_SIZE, LAYERS, use_mla=use_mla)
        self.dtype = dtype
        self.fmt = MemoryFormat.KV_MLA_FMT if use_mla else MemoryFormat.KV_2LTD
        self.blocks = torch.randperm(total)[:num_blocks]
        slots = self.blocks[:, None] * block_size + torch.arange(block_size)
        self.keywords = {"kvcaches": view(self.memory), "slot_mapping": slots.flatten()}

    def bytes_per_block(self):
        """[blocks, bytes] of the whole cache."""
        total = self.memory[0].shape[self.block_axis]
        in_front = [tensor.movedim(self.block_axis, 0).contiguous() for tensor in self.memory]
        return torch.cat([t.view(torch.uint8).view(total, -1) for t in in_front], dim=1)


class RawCache:
    """Segments of opaque blocks, each of another size."""

    def __init__(self, form, num_blocks, block_size, dtype):
        total = num_blocks + SPARE_BLOCKS
        self.memory = [random_tensor((total, block_size, n), dtype) for n in (1, 5, 24)]
        self.connector = RawBlockConnector(self.memory, block_size, BlockOrder(form))
        self.dtype, self.fmt = torch.uint8, MemoryFormat.KV_2LTD
        self.blocks = torch.randperm(total)[:num_blocks]
        self.keywords = {"block_ids": self.blocks.tolist(), "req_id": "r", "unknown": object()}

    def bytes_per_block(self):
        """[blocks, bytes] of the whole cache."""
        flat = [t.view(torch.uint8).view(len(t), -1) for t in self.memory]
        return torch.cat(flat, dim=1)


FORMS = {
    "flash_attention": PagedCache,
    "flash_infer": PagedCache,
    "pair": PagedCache,
    "hnd": PagedCache,
    "mla": PagedCache,
    "segment_major": RawCache,
    "block_major": RawCache,
}


@pytest.fixture(params=FORMS)
def make_cache(request):
    """`make_cache(num_blocks=9, block_size=16, dtype=bf16)`, for every form."""

    def make(num_blocks=9, block_size=16, dtype=torch.bfloat16):
        torch.manual_seed(3)
        cache = FORMS[request.param](request.param, num_blocks, block_size, dtype)
        cache.block_size = block_size
        cache.num_tokens = num_blocks * block_size
        return cache

    return make


def poison(cache):
    for tensor in cache.memory:
        tensor.view(torch.uint8).fill_(POISON)


def chunk_ranges(num_tokens, chunk_tokens=CHUNK_TOKENS):
    starts = list(range(0, num_tokens, chunk_tokens))
    return starts, [min(start + chunk_tokens, num_tokens) for start in starts]


def objects_for(cache, starts, ends):
    allocator = AdHocMemoryAllocator()
    objs = [
        allocator.allocate(cache.connector.get_shape(end - start), cache.dtype, cache.fmt)
        for start, end in zip(starts, ends, strict=True)
    ]
    for obj in objs:
        obj.raw_tensor.fill_(POISON + 1)
    return objs


def round_trip(cache, starts, ends):
    """Read the ranges, poison the cache, write them back; the blocks before."""
    before = cache.bytes_per_block()
    objs = objects_for(cache, starts, ends)
    cache.connector.batched_from_gpu(objs, starts, ends, **cache.keywords)
    assert torch.equal(cache.bytes_per_block(), before)
    poison(cache)
    cache.connector.batched_to_gpu(objs, starts, ends, **cache.keywords)
    assert all(obj.get_ref_count() == 1 for obj in objs)
    return before


def check_restored(cache, before, restored_blocks):
    after = cache.bytes_per_block()
    untouched = torch.ones(len(after), dtype=torch.bool)
    untouched[restored_blocks] = False
    assert torch.equal(after[restored_blocks], before[restored_blocks])
    assert bool((after[untouched] == POISON).all())


@pytest.mark.parametrize("block_size", [1, 16, 32, 256])
@pytest.mark.parametrize("num_blocks", [1, 2, 17, 64])
def test_what_was_read_is_written_back_and_nothing_else(make_cache, num_blocks, block_size):
    cache = make_cache(num_blocks, block_size)

    before = round_trip(cache, *chunk_ranges(cache.num_tokens))

    check_restored(cache, before, cache.blocks)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_of_any_dtype_come_back_as_they_were(make_cache, dtype):
    cache = make_cache(dtype=dtype)

    before = round_trip(cache, *chunk_ranges(cache.num_tokens, 64))

    check_restored(cache, before, cache.blocks)


def test_ranges_may_be_any_part_of_the_request(make_cache):
    cache = make_cache()

    before = round_trip(cache, [96, 16], [128, 48])

    check_restored(cache, before, cache.blocks[[6, 7, 1, 2]])


def test_a_batch_is_the_same_as_its_single_calls(make_cache):
    cache = make_cache()
    starts, ends = chunk_ranges(cache.num_tokens, 32)
    together, singly = objects_for(cache, starts, ends), objects_for(cache, starts, ends)
    before = cache.bytes_per_block()

    cache.connector.batched_from_gpu(together, starts, ends, **cache.keywords)
    for obj, start, end in zip(singly, starts, ends, strict=True):
        cache.connector.from_gpu(obj, start, end, **cache.keywords)
    assert all(
        torch.equal(a.raw_tensor, b.raw_tensor) for a, b in zip(together, singly, strict=True)
    )

    poison(cache)
    for obj, start, end in zip(singly, starts, ends, strict=True):
        cache.connector.to_gpu(obj, start, end, **cache.keywords)
    check_restored(cache, before, cache.blocks)


def test_an_empty_batch_is_no_work(make_cache):
    cache = make_cache()
    before = cache.bytes_per_block()

    cache.connector.batched_from_gpu([], [], [], **cache.keywords)
    cache.connector.batched_to_gpu([], [], [], **cache.keywords)

    assert torch.equal(cache.bytes_per_block(), before)


FAULTS = {
    "freed": "memory object 1 is freed",
    "size": r"memory object 1 is|sizes\[1\] is",
    "range": "tokens 144 to 176",
    "number": "3 memory objects do not go with 2 starts",
}


@pytest.mark.parametrize("call", ["batched_from_gpu", "batched_to_gpu"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_middle_moves_nothing_and_keeps_all_counts(make_cache, call, fault):
    cache = make_cache()
    starts, ends = [0, 32, 64], [32, 64, 96]
    objs = objects_for(cache, starts, ends)
    objs[2].ref_count_up()
    if fault == "freed":
        objs[1].ref_count_down()
    elif fault == "size":
        objs[1] = objects_for(cache, [0], [16])[0]
    elif fault == "range":
        starts[1], ends[1] = cache.num_tokens, cache.num_tokens + 32
    else:
        starts.pop()
    counts = [obj.get_ref_count() for obj in objs]
    before, contents = cache.bytes_per_block(), objs[0].raw_tensor.clone()

    with pytest.raises(ValueError, match=FAULTS[fault]):
        getattr(cache.connector, call)(objs, starts, ends, **cache.keywords)

    assert [obj.get_ref_count() for obj in objs] == counts
    assert torch.equal(cache.bytes_per_block(), before)
    assert torch.equal(objs[0].raw_tensor, contents)


def test_threads_that_share_a_copy_give_the_same_bytes(make_cache):
    cache = make_cache(num_blocks=64, block_size=256)
    cache.connector.num_threads = 3

    before = round_trip(cache, *chunk_ranges(cache.num_tokens))

    check_restored(cache, before, cache.blocks)
