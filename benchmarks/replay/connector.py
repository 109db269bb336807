"""The replay's GPU connector: makes the bytes of KV blocks, and checks them when they come back."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.replay.content import Kind, chunk_hash, fill, is_intact
from benchmarks.replay.settings import ENGINE_TOKENS_PER_BLOCK
from lmcache.v1.memory_management import MemoryObj, TensorMemoryObj


class ReplayConnector:
    """The two calls that the engine makes.

    The keyword `prefix_ids`, which `store` and `retrieve` hand on, names the prompt's blocks.

    Args:
        block_bytes: Of one KV block, which is one chunk.

    Attributes:
        num_filled: Chunks that were filled for a store.
        num_intact: Chunks that were loaded with every byte as it should be.
    """

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self.num_filled = 0
        self.num_intact = 0

    def batched_from_gpu(
        self, memory_objs: list[MemoryObj], starts: list[int], ends: list[int], **kwargs: Any
    ) -> None:
        """Fill each object with the bytes of its block."""
        for chunk, word in _with_words(memory_objs, starts, ends, kwargs["prefix_ids"]):
            fill(chunk, word)
            self.num_filled += 1

    def batched_to_gpu(
        self, memory_objs: list[MemoryObj], starts: list[int], ends: list[int], **kwargs: Any
    ) -> None:
        """Compare every byte of each object with what its block demands."""
        for chunk, word in _with_words(memory_objs, starts, ends, kwargs["prefix_ids"]):
            self.num_intact += is_intact(chunk, word, self._block_bytes)


def _with_words(
    memory_objs: list[MemoryObj], starts: list[int], ends: list[int], prefix_ids: Sequence[int]
) -> Iterator[tuple[torch.Tensor, int]]:
    for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
        if start % ENGINE_TOKENS_PER_BLOCK or end != start + ENGINE_TOKENS_PER_BLOCK:
            raise ValueError(f"tokens {start} to {end} are not one block of the prompt")
        prefix_id = prefix_ids[start // ENGINE_TOKENS_PER_BLOCK]
        yield bytes_of(memory_obj), chunk_hash(Kind.KV, prefix_id)


def bytes_of(memory_obj: MemoryObj) -> torch.Tensor:
    """Return the flat uint8 tensor of an object that the pool made."""
    assert isinstance(memory_obj, TensorMemoryObj), "the pool makes objects over tensors"
    tensor = memory_obj.tensor
    assert tensor is not None, "whoever reads an object holds a reference"
    return tensor
