"""Memory objects of one size over a tensor that the caller provides."""

from collections.abc import Sequence

import torch

from lmcache.v1.memory_allocator import (
    Dtypes,
    MemoryAllocatorInterface,
    PoolMemoryAllocator,
    Shapes,
)
from lmcache.v1.memory_format import MemoryFormat
from lmcache.v1.memory_metadata import MemorySpec, as_groups, size_of


class PagedTensorMemoryAllocator(PoolMemoryAllocator):
    """Pages of the size of one full chunk; smaller objects take a whole page.

    Args:
        tensor: Flat contiguous memory; what does not fill a page is left unused.
        shapes, dtypes: The groups of a full chunk.
        fmt: The layout of the chunks.
        owner: See `PoolMemoryAllocator`.

    An object's address is the index of its page.

    Raises:
        ValueError: The tensor is smaller than one page.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        shapes: Sequence[torch.Size],
        dtypes: Sequence[torch.dtype],
        fmt: MemoryFormat = MemoryFormat.KV_2LTD,
        owner: MemoryAllocatorInterface | None = None,
    ) -> None:
        self.page_bytes = size_of(*as_groups(shapes, dtypes))
        self.address_unit_bytes = self.page_bytes
        self.fmt = fmt
        super().__init__(tensor, self.page_bytes, owner)

    def spec_for(self, shapes: Shapes, dtypes: Dtypes, fmt: MemoryFormat) -> MemorySpec:
        """Return the shared description; ValueError when an object needs more than one page."""
        spec = super().spec_for(shapes, dtypes, fmt)
        if spec.size_bytes > self.page_bytes:
            raise ValueError(
                f"{spec.size_bytes} bytes do not fit a page of {self.page_bytes} bytes"
            )
        return spec

    def get_paged_buffers(self) -> tuple[torch.Tensor, ...]:
        """Return one uint8 view per page."""
        used = self.buffer[: self.num_pages * self.page_bytes]
        return torch.split(used, self.page_bytes)

    @property
    def num_pages(self) -> int:
        """Number of pages."""
        return self.buffer.numel() // self.page_bytes
