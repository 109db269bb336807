"""Memory objects over a tensor that the caller provides."""

import torch

from lmcache.v1.memory_allocator import (
    DEFAULT_ALIGN_BYTES,
    MemoryAllocatorInterface,
    PoolMemoryAllocator,
)


class TensorMemoryAllocator(PoolMemoryAllocator):
    """Objects of any size over `tensor`, best fit, neighbours coalesced.

    Args:
        tensor: Flat contiguous memory on any device.
        align_bytes: Sizes and offsets are multiples of it.
        init_address_space: Use only this many bytes of it.
        owner: See `PoolMemoryAllocator`.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        align_bytes: int = DEFAULT_ALIGN_BYTES,
        init_address_space: int | None = None,
        owner: MemoryAllocatorInterface | None = None,
    ) -> None:
        flat = tensor.view(torch.uint8).flatten()
        super().__init__(flat[:init_address_space], align_bytes, owner)
