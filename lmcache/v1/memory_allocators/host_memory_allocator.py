"""Memory objects over host memory that is never pinned."""

from collections.abc import Sequence

import torch

from lmcache.v1.device.host_memory import HostMemory, HostPinner
from lmcache.v1.memory_allocator import (
    DEFAULT_ALIGN_BYTES,
    Dtypes,
    MemoryAllocatorInterface,
    PoolMemoryAllocator,
    Shapes,
)
from lmcache.v1.memory_allocators.paged_tensor_memory_allocator import PagedTensorMemoryAllocator
from lmcache.v1.memory_allocators.tensor_memory_allocator import TensorMemoryAllocator
from lmcache.v1.memory_format import MemoryFormat
from lmcache.v1.memory_object import MemoryObj, TensorMemoryObj


class HostMemoryAllocator(MemoryAllocatorInterface):
    """A pool of host memory, in pages of one size or in extents of any.

    Args:
        size: Bytes of the pool.
        use_paging: Hand out pages; then `shapes`, `dtypes` and `fmt` describe a full chunk.
        shapes, dtypes, fmt: See `use_paging`.
        align_bytes: Without paging, sizes and offsets are multiples of it.
        owner: See `PoolMemoryAllocator`.

    Raises:
        ValueError: A size that is not positive, or paging without shapes and dtypes.

    Threads: safe from any thread.
    """

    def __init__(
        self,
        size: int,
        use_paging: bool = False,
        *,
        shapes: Sequence[torch.Size] | None = None,
        dtypes: Sequence[torch.dtype] | None = None,
        fmt: MemoryFormat = MemoryFormat.KV_2LTD,
        align_bytes: int | None = None,
        owner: MemoryAllocatorInterface | None = None,
    ) -> None:
        self._memory = HostMemory(size)
        self.buffer = self._memory.tensor
        self.inner: PoolMemoryAllocator
        if use_paging:
            if shapes is None or dtypes is None:
                raise ValueError("use_paging needs the shapes and dtypes of a full chunk")
            self.inner = PagedTensorMemoryAllocator(self.buffer, shapes, dtypes, fmt, owner)
        else:
            self.inner = TensorMemoryAllocator(
                self.buffer, align_bytes or DEFAULT_ALIGN_BYTES, owner=owner
            )
        self.align_bytes = self.inner.align_bytes
        self.pool_allocator = self.inner

    def pin(self, pinner: HostPinner) -> bool:
        """Page-lock the pool through `pinner`; see `HostMemory.pin`."""
        return self._memory.pin(pinner)

    @property
    def is_pinned(self) -> bool:
        """Whether the pool is page-locked."""
        return self._memory.is_pinned

    def allocate(
        self,
        shapes: Shapes,
        dtypes: Dtypes,
        fmt: MemoryFormat = MemoryFormat.KV_2LTD,
        allocator_type: str | None = None,
    ) -> TensorMemoryObj | None:
        """Return an object from free bytes, or None."""
        return self.inner.allocate(shapes, dtypes, fmt)

    def batched_allocate(
        self,
        shapes: Shapes,
        dtypes: Dtypes,
        batch_size: int,
        fmt: MemoryFormat = MemoryFormat.KV_2LTD,
        allocator_type: str | None = None,
    ) -> list[MemoryObj] | None:
        """Return `batch_size` objects from free bytes, or None and take nothing."""
        return self.inner.batched_allocate(shapes, dtypes, batch_size, fmt)

    def memcheck(self) -> bool:
        """Whether the pool's books are in order."""
        return self.inner.memcheck()

    def check_integrity(self) -> None:
        """Raise AssertionError naming every broken invariant of the pool."""
        self.inner.check_integrity()

    def close(self) -> None:
        """Unpin. The pages go when the last object over them does."""
        self._memory.close()
