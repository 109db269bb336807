"""Metadata in the manner of serving engines with opaque blocks: a chunk is a flat row of bytes."""

from typing import Any, cast

import torch

from benchmarks.replay.naming import MODEL_NAME
from benchmarks.replay.settings import ENGINE_TOKENS_PER_BLOCK
from lmcache.v1.metadata import LMCacheMetadata


class BlockMetadata:
    """A proxy of `LMCacheMetadata` that answers for the shape of chunks itself.

    Args:
        base: Answers everything else.
        block_bytes: Of the KV block that a chunk holds.
    """

    def __init__(self, base: LMCacheMetadata, block_bytes: int) -> None:
        self._base = base
        self._block_bytes = block_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def get_dtypes(self) -> list[torch.dtype]:
        """Return one group, of bytes."""
        return [torch.uint8]

    def get_shapes(self, num_tokens: int | None = None) -> list[torch.Size]:
        """Return [bytes] of the blocks that `num_tokens` tokens fill; of a full chunk if None."""
        tokens = self._base.chunk_size if num_tokens is None else num_tokens
        return [torch.Size((tokens // ENGINE_TOKENS_PER_BLOCK * self._block_bytes,))]

    def get_num_groups(self) -> int:
        """Return 1."""
        return 1


def make_metadata(name: str, block_bytes: int) -> LMCacheMetadata:
    """Return the metadata of one worker whose sockets and metrics are called `name`."""
    base = LMCacheMetadata(
        model_name=MODEL_NAME,
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.uint8,
        kv_shape=(1, 2, ENGINE_TOKENS_PER_BLOCK, 1, 1),
        role="worker",
        served_model_name=name,
        chunk_size=ENGINE_TOKENS_PER_BLOCK,
        engine_id=name,
    )
    # The engine reads metadata by its attributes and accessors; no type is checked.
    return cast(LMCacheMetadata, BlockMetadata(base, block_bytes))
