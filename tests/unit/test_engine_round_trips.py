"""Whole prompts through the engine and the real connectors come back bit for bit."""

import pytest
import torch
from builders import make_config, make_metadata
from engine_builders import AtomMetadata, assert_nothing_held, keep_from

from lmcache.utils import EngineType, mock_up_broadcast_fn, mock_up_broadcast_object_fn
from lmcache.v1.engine.engine import LMCacheEngine
from lmcache.v1.gpu_connector import CreateGPUConnector, RawBlockConnector
from lmcache.v1.token_database import ChunkedTokenDatabase

CHUNK = 256
DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
]


@pytest.fixture
def engine_of():
    """`engine_of(connector, metadata, pool_bytes)`: an engine of chunks of 256 tokens."""
    made = []

    def make(connector, metadata, pool_bytes=64 << 20):
        config = make_config(chunk_size=CHUNK, max_local_cpu_size=pool_bytes / 2**30)
        database = ChunkedTokenDatabase(config, metadata)
        broadcasts = (mock_up_broadcast_fn, mock_up_broadcast_object_fn)
        made.append(LMCacheEngine(config, metadata, database, connector, *broadcasts))
        made[-1].post_init()
        return made[-1]

    yield make
    for engine in made:
        assert_nothing_held(engine)
        engine.close()


def random_bytes(*shape, seed=0):
    numbers = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=numbers)


def tokens_of(seed, num_tokens):
    numbers = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100_000, (num_tokens,), generator=numbers)


# ---- raw blocks, as ATOM hands them over --------------------------------------------------------


class RawCache:
    """A KV cache of opaque blocks in three segments, and an engine over it."""

    SEGMENT_BYTES = (96, 40, 7)

    def __init__(self, engine_of, block_tokens, num_blocks, pool_bytes=64 << 20):
        self.block_tokens = block_tokens
        self.segments = [random_bytes(num_blocks, size, seed=size) for size in self.SEGMENT_BYTES]
        self.metadata = AtomMetadata(
            make_metadata(chunk_size=CHUNK), block_tokens, sum(self.SEGMENT_BYTES)
        )
        connector = RawBlockConnector(self.segments, block_tokens)
        self.engine = engine_of(connector, self.metadata, pool_bytes)

    def rows(self, block_ids):
        return [segment[block_ids].clone() for segment in self.segments]

    def poison(self, block_ids):
        for segment in self.segments:
            segment[block_ids] = 0xEE


@pytest.mark.parametrize("block_tokens", [1, 16, 32, 64, 128, 256])
def test_raw_blocks_of_every_count_come_back(engine_of, block_tokens):
    counts = range(1, 65) if block_tokens >= 16 else [CHUNK, 2 * CHUNK]
    cache = RawCache(engine_of, block_tokens, num_blocks=2 * CHUNK + 64)
    for count in counts:
        num_tokens = count * block_tokens
        tokens = tokens_of(count, num_tokens)
        block_ids = torch.randperm(
            len(cache.segments[0]), generator=torch.Generator().manual_seed(count)
        )[:count].tolist()
        whole = num_tokens // CHUNK * CHUNK
        cached = block_ids[: whole // block_tokens]
        expected, others = cache.rows(cached), cache.rows(block_ids[len(cached) :])

        cache.engine.store(tokens, block_ids=block_ids, req_id=count)
        cache.poison(cached)
        loaded = cache.engine.retrieve(tokens, block_ids=block_ids, req_id=count)

        assert int(loaded.sum()) == whole
        for kept, found in zip(expected, cache.rows(cached), strict=True):
            assert torch.equal(kept, found)
        for kept, found in zip(others, cache.rows(block_ids[len(cached) :]), strict=True):
            assert torch.equal(kept, found)


def test_raw_blocks_of_a_chunked_prefill_and_of_partial_prefixes_come_back(engine_of):
    cache = RawCache(engine_of, 64, num_blocks=64)
    num_tokens = 8 * CHUNK
    tokens, block_ids = tokens_of(1, num_tokens), list(range(32))[::-1]
    expected = cache.rows(block_ids)
    for end in range(2 * CHUNK, num_tokens + 1, 2 * CHUNK):
        cache.engine.store(tokens[:end], mask=keep_from(end, end - 2 * CHUNK), block_ids=block_ids)

    for first in (0, CHUNK, 5 * CHUNK, num_tokens):
        cache.poison(block_ids)
        loaded = cache.engine.retrieve(
            tokens, mask=keep_from(num_tokens, first), block_ids=block_ids
        )

        assert int(loaded.sum()) == num_tokens - first
        num_left_out = first // 64
        for kept, found in zip(expected, cache.rows(block_ids), strict=True):
            assert torch.equal(kept[num_left_out:], found[num_left_out:])
            assert bool((found[:num_left_out] == 0xEE).all())
    diverged = tokens.clone()
    diverged[3 * CHUNK + 5] += 1
    assert int(cache.engine.retrieve(diverged, block_ids=block_ids).sum()) == 3 * CHUNK


def test_a_producer_event_is_waited_for_before_blocks_are_read(engine_of):
    cache = RawCache(engine_of, 256, num_blocks=4)

    class Producer:
        """Writes the KV no sooner than it is waited for."""

        def synchronize(self):
            for segment in cache.segments:
                segment[0] = 77

    cache.engine.store(tokens_of(1, CHUNK), block_ids=[0], producer_event=Producer())
    cache.poison([0])
    cache.engine.retrieve(tokens_of(1, CHUNK), block_ids=[0])

    assert all(bool((rows == 77).all()) for rows in cache.rows([0]))


@pytest.mark.parametrize(
    ("block_ids", "words"),
    [([0, 1, 2, 99], "99"), ([0, 1, 2, -1], "-1"), ([0, 1, 2], "block")],
    ids=["beyond the end", "negative", "too few"],
)
def test_block_ids_out_of_range_are_named_and_leave_nothing(engine_of, block_ids, words):
    cache = RawCache(engine_of, 64, num_blocks=16)
    before = cache.rows(list(range(16)))

    with pytest.raises(ValueError, match=words):
        cache.engine.store(tokens_of(1, CHUNK), block_ids=block_ids)
    assert cache.engine.lookup(tokens_of(1, CHUNK)) == 0
    cache.engine.store(tokens_of(1, CHUNK), block_ids=[0, 1, 2, 3])
    with pytest.raises(ValueError, match=words):
        cache.engine.retrieve(tokens_of(1, CHUNK), block_ids=block_ids)

    for kept, found in zip(before, cache.rows(list(range(16))), strict=True):
        assert torch.equal(kept, found)


# ---- vLLM's paged layouts -----------------------------------------------------------------------


class PagedCache:
    """A paged KV cache of three layers in host memory, and an engine over it."""

    LAYERS, HEADS, HEAD_SIZE = 3, 2, 8

    def __init__(self, engine_of, dtype, block_tokens, num_blocks, use_mla=False):
        kv_size, hidden = (1, 24) if use_mla else (2, self.HEADS * self.HEAD_SIZE)
        heads, head_size = (1, hidden) if use_mla else (self.HEADS, self.HEAD_SIZE)
        self.metadata = make_metadata(
            chunk_size=CHUNK,
            kv_dtype=dtype,
            kv_shape=(self.LAYERS, kv_size, CHUNK, heads, head_size),
            use_mla=use_mla,
        )
        shape = (
            (num_blocks, block_tokens, hidden)
            if use_mla
            else (2, num_blocks, block_tokens, heads, head_size)
        )
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        self.layers = [
            random_bytes(num_bytes, seed=layer).view(dtype).view(shape)
            for layer in range(self.LAYERS)
        ]
        self.num_slots = num_blocks * block_tokens
        self.kv_size, self.row_bytes = kv_size, hidden * dtype.itemsize
        connector = CreateGPUConnector(make_config(), self.metadata, EngineType.VLLM)
        self.engine = engine_of(connector, self.metadata)

    def slots(self):
        """[layers, K and V, slots, bytes of a token], of the cache itself."""
        return [
            layer.view(torch.uint8).view(self.kv_size, self.num_slots, self.row_bytes)
            for layer in self.layers
        ]

    def rows(self, slot_mapping):
        return [layer[:, slot_mapping].clone() for layer in self.slots()]

    def poison(self, slot_mapping):
        for layer in self.slots():
            layer[:, slot_mapping] = 0xEE


@pytest.mark.parametrize("use_mla", [False, True], ids=["kv", "mla"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_tokens", [1, 16, 256])
def test_paged_kv_of_every_dtype_comes_back(engine_of, dtype, block_tokens, use_mla):
    cache = PagedCache(engine_of, dtype, block_tokens, 2048 // block_tokens, use_mla)
    tokens = tokens_of(1, 3 * CHUNK + 17)
    blocks = torch.randperm(2048 // block_tokens, generator=torch.Generator().manual_seed(3))
    slots = (blocks[:, None] * block_tokens + torch.arange(block_tokens)).flatten()[: len(tokens)]
    call = {"kvcaches": cache.layers, "slot_mapping": slots}
    expected = cache.rows(slots)

    cache.engine.store(tokens, **call)
    cache.poison(slots[: 3 * CHUNK])
    loaded = cache.engine.retrieve(tokens, **call)

    assert int(loaded.sum()) == 3 * CHUNK
    for kept, found in zip(expected, cache.rows(slots), strict=True):
        assert torch.equal(kept, found)


def slots_of(block_ids, block_tokens):
    """Where the tokens of some blocks are, as a serving engine maps them."""
    blocks = torch.tensor(block_ids)
    return (blocks[:, None] * block_tokens + torch.arange(block_tokens)).flatten()


@pytest.mark.parametrize("block_tokens", [16, 256])
def test_paged_kv_of_every_block_count_comes_back(engine_of, block_tokens):
    cache = PagedCache(engine_of, torch.bfloat16, block_tokens, num_blocks=80)
    for count in range(1, 65):
        numbers = torch.Generator().manual_seed(count)
        tokens = tokens_of(count, count * block_tokens)
        slots = slots_of(torch.randperm(80, generator=numbers)[:count].tolist(), block_tokens)
        whole = len(tokens) // CHUNK * CHUNK
        expected = cache.rows(slots)
        call = {"kvcaches": cache.layers, "slot_mapping": slots}

        cache.engine.store(tokens, **call)
        cache.poison(slots[:whole])
        loaded = cache.engine.retrieve(tokens, **call)

        assert int(loaded.sum()) == whole
        for kept, found in zip(expected, cache.rows(slots), strict=True):
            assert torch.equal(kept, found)


def test_paged_kv_of_a_chunked_prefill_and_of_partial_prefixes_comes_back(engine_of):
    cache = PagedCache(engine_of, torch.bfloat16, 16, num_blocks=128)
    num_tokens = 8 * CHUNK
    tokens, slots = tokens_of(1, num_tokens), slots_of(list(range(128))[::-1], 16)
    expected = cache.rows(slots)
    for end in range(2 * CHUNK, num_tokens + 1, 2 * CHUNK):
        call = {"kvcaches": cache.layers, "slot_mapping": slots[:end]}
        cache.engine.store(tokens[:end], mask=keep_from(end, end - 2 * CHUNK), **call)

    call = {"kvcaches": cache.layers, "slot_mapping": slots}
    for first in (0, CHUNK, 5 * CHUNK, num_tokens):
        cache.poison(slots)
        loaded = cache.engine.retrieve(tokens, mask=keep_from(num_tokens, first), **call)

        assert int(loaded.sum()) == num_tokens - first
        for kept, found in zip(expected, cache.rows(slots), strict=True):
            assert torch.equal(kept[:, first:], found[:, first:])
            assert bool((found[:, :first] == 0xEE).all())
    diverged = tokens.clone()
    diverged[3 * CHUNK + 5] += 1
    cache.poison(slots)
    assert int(cache.engine.retrieve(diverged, **call).sum()) == 3 * CHUNK
    for kept, found in zip(expected, cache.rows(slots), strict=True):
        assert torch.equal(kept[:, : 3 * CHUNK], found[:, : 3 * CHUNK])
        assert bool((found[:, 3 * CHUNK :] == 0xEE).all())


@pytest.mark.parametrize("bad_slot", [2048, -1])
def test_slot_mappings_out_of_range_are_named_and_leave_nothing(engine_of, bad_slot):
    cache = PagedCache(engine_of, torch.bfloat16, 16, 128)
    tokens, slots = tokens_of(1, 2 * CHUNK), torch.arange(2 * CHUNK)
    bad = slots.clone()
    bad[300] = bad_slot
    before = cache.rows(torch.arange(2048))

    with pytest.raises(ValueError, match=str(bad_slot)):
        cache.engine.store(tokens, kvcaches=cache.layers, slot_mapping=bad)
    assert cache.engine.lookup(tokens) == 0
    cache.engine.store(tokens, kvcaches=cache.layers, slot_mapping=slots)
    with pytest.raises(ValueError, match=str(bad_slot)):
        cache.engine.retrieve(tokens, kvcaches=cache.layers, slot_mapping=bad)

    for kept, found in zip(before, cache.rows(torch.arange(2048)), strict=True):
        assert torch.equal(kept, found)


def test_two_engines_of_a_process_keep_their_bytes_apart(engine_of):
    caches = [PagedCache(engine_of, torch.bfloat16, 16, 64) for _ in range(2)]
    caches[1].layers[0].view(torch.uint8).fill_(9)
    tokens, slots = tokens_of(1, CHUNK), torch.arange(CHUNK)
    expected = [cache.rows(slots) for cache in caches]
    for cache in caches:
        cache.engine.store(tokens, kvcaches=cache.layers, slot_mapping=slots)
        cache.poison(slots)
    for cache, kept in zip(caches, expected, strict=True):
        cache.engine.retrieve(tokens, kvcaches=cache.layers, slot_mapping=slots)
        for old, new in zip(kept, cache.rows(slots), strict=True):
            assert torch.equal(old, new)
