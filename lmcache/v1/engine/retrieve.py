"""Retrieve: copy the longest cached prefix of a prompt into the serving engine's cache."""

from collections.abc import Mapping
from typing import Any

import torch

from lmcache.v1.engine.chunk_specs import ChunkSpecs
from lmcache.v1.engine.parts import ChunkCopier, EngineParts
from lmcache.v1.memory_object import MemoryObj, release_all
from lmcache.v1.stats import RetrieveDone
from lmcache.v1.token_database import Chunks


def retrieve(
    parts: EngineParts,
    connector: ChunkCopier,
    chunks: Chunks,
    request_configs: Mapping[str, object] | None,
    connector_kwargs: Mapping[str, Any],
    started_s: float,
) -> torch.Tensor:
    """Load what the tiers hold of the chunks that the mask does not leave out.

    Args:
        started_s: When the call began.

    Returns:
        Bool tensor [num_tokens] on the CPU, True where KV was loaded.

    Raises:
        Exception: What the connector raised; then nothing counts as loaded.
    """
    first = chunks.num_masked
    starts, ends = chunks.starts[first:], chunks.ends[first:]
    keys = parts.token_database.make_keys(chunks.hashes[first:], request_configs)
    sizes = ChunkSpecs(parts.metadata).sizes(starts, ends)
    memory_objs: list[MemoryObj] = []
    try:
        parts.storage_manager.get_prefix(keys, memory_objs, parts.retrieve_locations, sizes)
        num_hit = len(memory_objs)
        got_s = parts.clock.monotonic()
        if memory_objs:
            # A copy of the list: a connector that changes it must not change who is released.
            objs = list(memory_objs)
            connector.batched_to_gpu(objs, starts[:num_hit], ends[:num_hit], **connector_kwargs)
    finally:
        try:
            release_all(memory_objs)
        finally:  # an interrupt on the way into the first call
            release_all(memory_objs)
    loaded = torch.zeros(chunks.num_tokens, dtype=torch.bool)
    if num_hit:
        loaded[starts[0] : ends[num_hit - 1]] = True
    now_s = parts.clock.monotonic()
    parts.stats.retrieve_done(
        RetrieveDone(
            requested_tokens=chunks.num_wanted_tokens,
            hit_tokens=ends[num_hit - 1] - starts[0] if num_hit else 0,
            seconds=now_s - started_s,
            process_tokens_seconds=got_s - started_s,
            to_gpu_seconds=now_s - got_s,
        )
    )
    return loaded
