"""Engines for tests, and a connector of ATOM's kind that copies with torch, block by block."""

import torch
from builders import CHUNK_TOKENS, make_config, make_metadata

from lmcache.utils import mock_up_broadcast_fn, mock_up_broadcast_object_fn
from lmcache.v1.engine.engine import LMCacheEngine
from lmcache.v1.memory_format import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.token_database import ChunkedTokenDatabase

BLOCK_TOKENS = 4
BLOCK_BYTES = 96


class AtomMetadata:
    """ATOM's wrapper: a copy of the attributes, and chunks that are flat rows of bytes."""

    def __init__(self, base, block_tokens=BLOCK_TOKENS, block_bytes=BLOCK_BYTES):
        vars(self).update(vars(base))
        self._base = base
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes

    def __getattr__(self, name):
        return getattr(self._base, name)

    def __eq__(self, other):
        return isinstance(other, AtomMetadata) and self._base == other._base

    __hash__ = None

    def get_dtypes(self):
        return [torch.uint8]

    def get_shapes(self, num_tokens=None):
        tokens = self.chunk_size if num_tokens is None else num_tokens
        return [torch.Size((tokens // self._block_tokens * self._block_bytes,))]

    def get_num_groups(self):
        return 1

    def is_first_rank(self):
        return self._base.is_first_rank()


def atom_metadata(**changes):
    """As ATOM builds it: keywords only, then wrapped."""
    fields = {
        "model_name": "m",
        "world_size": 1,
        "local_world_size": 1,
        "worker_id": 0,
        "local_worker_id": 0,
        "kv_dtype": torch.bfloat16,
        "kv_shape": (2, 2, CHUNK_TOKENS, 2, 64),
        "use_mla": False,
        "chunk_size": CHUNK_TOKENS,
        "engine_id": "atom-offload-dp0",
    }
    return AtomMetadata(LMCacheMetadata(**{**fields, **changes}))


class AtomConnector:
    """The two calls that ATOM's connector has, and what they were given.

    The KV of block b is `blocks[b]`. With `fail_at`, a call raises after that many chunks.
    """

    def __init__(self, num_blocks=512, block_tokens=BLOCK_TOKENS, block_bytes=BLOCK_BYTES):
        self.blocks = torch.zeros(num_blocks, block_bytes, dtype=torch.uint8)
        self.block_tokens = block_tokens
        self.calls = []
        self.fail_at = None

    def _each(self, name, memory_objs, starts, ends, kwargs):
        self.calls.append((name, list(starts), list(ends), kwargs))
        for number, (obj, start, end) in enumerate(zip(memory_objs, starts, ends, strict=True)):
            if number == self.fail_at:
                raise RuntimeError("the copy engine stopped")
            ids = kwargs["block_ids"][start // self.block_tokens : end // self.block_tokens]
            yield obj.tensor.view(len(ids), -1), ids

    def batched_from_gpu(self, memory_objs, starts, ends, **kwargs):
        for chunk, ids in self._each("from_gpu", memory_objs, starts, ends, kwargs):
            chunk.copy_(self.blocks[ids])

    def batched_to_gpu(self, memory_objs, starts, ends, **kwargs):
        for chunk, ids in self._each("to_gpu", memory_objs, starts, ends, kwargs):
            self.blocks[ids] = chunk


class Prompt:
    """A prompt with blocks of its own: what a serving engine knows of one request.

    Args:
        seed: Decides the tokens and the KV; a prompt of the same seed has the same prefix.
        num_tokens: Whole blocks.
        first_block: Where its blocks begin in the connector's cache.
    """

    def __init__(self, seed, num_tokens, first_block=0, block_tokens=BLOCK_TOKENS):
        numbers = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, 100_000, (num_tokens,), generator=numbers)
        self.block_ids = list(range(first_block, first_block + num_tokens // block_tokens))
        self._seed = seed

    def kv(self, block_bytes=BLOCK_BYTES):
        """The KV of the prompt's blocks, [blocks, bytes]."""
        numbers = torch.Generator().manual_seed(self._seed + 1_000_000)
        return torch.randint(
            0, 256, (len(self.block_ids), block_bytes), dtype=torch.uint8, generator=numbers
        )

    def compute(self, connector):
        """Do the prefill: write the prompt's KV into its blocks."""
        connector.blocks[self.block_ids] = self.kv(connector.blocks.shape[1])

    def erase(self, connector):
        """Poison the prompt's blocks."""
        connector.blocks[self.block_ids] = 0xEE

    def is_intact(self, connector, num_tokens, block_tokens=BLOCK_TOKENS):
        """Whether the blocks of the first `num_tokens` hold the prompt's KV."""
        count = num_tokens // block_tokens
        expected = self.kv(connector.blocks.shape[1])[:count]
        return torch.equal(connector.blocks[self.block_ids[:count]], expected)


def keep_from(num_tokens, first):
    """A mask that leaves out the tokens before `first`."""
    mask = torch.ones(num_tokens, dtype=torch.bool)
    mask[:first] = False
    return mask


def make_engine(connector, metadata=None, num_chunks=16, stats=None, **settings):
    """An engine whose pool holds `num_chunks` chunks of ATOM's kind; `post_init` was called."""
    wrapped = metadata or AtomMetadata(make_metadata(engine_id="e"))
    chunk_bytes = -(-wrapped.get_shapes()[0].numel() // 4096) * 4096
    config = make_config(**{"max_local_cpu_size": num_chunks * chunk_bytes / 2**30, **settings})
    engine = LMCacheEngine(
        config,
        wrapped,
        ChunkedTokenDatabase(config, wrapped),
        connector,
        mock_up_broadcast_fn,
        mock_up_broadcast_object_fn,
        stats,
    )
    engine.fmt = MemoryFormat.KV_2LTD
    engine.post_init()
    return engine


def store(engine, prompt, connector, first=0, upto=None):
    """Compute and store a prompt, or its tokens from `first` up to `upto`."""
    num_tokens = len(prompt.tokens) if upto is None else upto
    prompt.compute(connector)
    mask = keep_from(num_tokens, first)
    engine.store(prompt.tokens[:num_tokens], mask=mask, block_ids=prompt.block_ids)


def retrieve(engine, prompt, first=0):
    """Load what there is of a prompt; the number of tokens loaded."""
    mask = keep_from(len(prompt.tokens), first)
    return int(engine.retrieve(prompt.tokens, mask=mask, block_ids=prompt.block_ids).sum())


def assert_nothing_held(engine):
    """No pin and no reader's reference is left on any chunk, and every book is in order."""
    engine.check_integrity()
    backend = engine.storage_manager.local_cpu_backend
    for obj in backend.hot_cache.values():
        assert (obj.pin_count, obj.get_ref_count(), obj.is_valid()) == (0, 1, True)
    assert backend.pins.num_pins == 0
    assert backend.hot.index.gauges()["num_blocks"] == len(backend.hot_cache)
