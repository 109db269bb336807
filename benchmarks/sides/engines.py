"""What the side scripts of the engine share: an engine over a paged KV cache in host memory.

A token's KV takes 4 KiB (8 layers, K and V, 128 elements of two bytes), so a chunk of 256 tokens
takes 1 MiB, about what one of a large hybrid model takes. The cache has blocks of 16 tokens.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import is_fork

from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata

CHUNK_TOKENS = 256
BLOCK_TOKENS = 16
NUM_LAYERS = 8
HIDDEN = 128
TOKEN_BYTES = 2 * NUM_LAYERS * HIDDEN * 2


class TorchPagedConnector:
    """Upstream's connectors want a GPU: the same copies with torch's indexed ones."""

    def _rows(self, kwargs: dict[str, Any], layer: int, kv: int) -> torch.Tensor:
        return kwargs["kvcaches"][layer][kv].view(-1, HIDDEN)

    def batched_from_gpu(self, memory_objs, starts, ends, **kwargs):  # type: ignore[no-untyped-def]
        for obj, start, end in zip(memory_objs, starts, ends, strict=True):
            slots = kwargs["slot_mapping"][start:end]
            for layer in range(NUM_LAYERS):
                for kv in range(2):
                    target = obj.tensor[kv, layer]
                    torch.index_select(self._rows(kwargs, layer, kv), 0, slots, out=target)

    def batched_to_gpu(self, memory_objs, starts, ends, **kwargs):  # type: ignore[no-untyped-def]
        for obj, start, end in zip(memory_objs, starts, ends, strict=True):
            slots = kwargs["slot_mapping"][start:end]
            for layer in range(NUM_LAYERS):
                for kv in range(2):
                    rows = self._rows(kwargs, layer, kv)
                    rows.index_copy_(0, slots, obj.tensor[kv, layer])


class Bench:
    """An engine, its KV cache, and one prompt whose blocks lie scattered in it.

    Args:
        num_tokens: Of the prompt.
        pool_tokens: Tokens that the CPU pool has room for.
    """

    def __init__(self, num_tokens: int, pool_tokens: int) -> None:
        # Uninitialised pages would all be the same page of zeros: every side touches its own.
        num_blocks = 2 * num_tokens // BLOCK_TOKENS
        shape = (2, num_blocks, BLOCK_TOKENS, 1, HIDDEN)
        self.kvcaches = [torch.full(shape, 1.0, dtype=torch.bfloat16) for _ in range(NUM_LAYERS)]
        numbers = torch.Generator().manual_seed(42)
        blocks = torch.randperm(num_blocks, generator=numbers)[: num_tokens // BLOCK_TOKENS]
        offsets = torch.arange(BLOCK_TOKENS)
        self.slot_mapping = (blocks[:, None] * BLOCK_TOKENS + offsets).flatten()
        self.tokens = torch.randint(0, 100_000, (num_tokens,), generator=numbers)
        self.engine = _make_engine(pool_tokens)

    def store(self, tokens: "torch.Tensor | list[int] | None" = None) -> None:
        """Store the prompt, or other tokens in its place."""
        self.engine.store(
            self.tokens if tokens is None else tokens,
            kvcaches=self.kvcaches,
            slot_mapping=self.slot_mapping,
        )

    def retrieve(self) -> int:
        """Load the prompt; the number of tokens."""
        loaded = self.engine.retrieve(
            self.tokens, kvcaches=self.kvcaches, slot_mapping=self.slot_mapping
        )
        return int(loaded.sum())


def _make_engine(pool_tokens: int) -> Any:
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK_TOKENS, max_local_cpu_size=pool_tokens * TOKEN_BYTES / 2**30
    )
    kv_shape = (NUM_LAYERS, 2, CHUNK_TOKENS, 1, HIDDEN)
    metadata = LMCacheMetadata("model", 1, 1, 0, 0, torch.bfloat16, kv_shape)
    connector: Any = TorchPagedConnector()
    if is_fork():  # imported here: upstream's package of that name wants a GPU
        from lmcache.v1.gpu_connector import VLLMPagedMemGPUConnectorV2

        connector = VLLMPagedMemGPUConnectorV2.from_metadata(metadata)
    engine = LMCacheEngineBuilder.get_or_create(
        "bench", config, metadata, connector, lambda tensor, src: None, lambda obj, src: obj
    )
    engine.post_init()
    return engine


def median_seconds(call: Callable[[], object], rounds: int, warm_up: int = 3) -> float:
    """Return the median duration of a call."""
    for _ in range(warm_up):
        call()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
