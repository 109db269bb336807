"""The allocator of the CPU tier: a pool meant for device copies, and byte buffers beside it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lmcache.v1.errors import UnsupportedFeatureError
from lmcache.v1.memory_allocator import (
    Dtypes,
    MemoryAllocatorInterface,
    PoolMemoryAllocator,
    Shapes,
)
from lmcache.v1.memory_allocators.paged_tensor_memory_allocator import PagedTensorMemoryAllocator
from lmcache.v1.memory_allocators.pin_memory_allocator import PinMemoryAllocator
from lmcache.v1.memory_format import MemoryFormat
from lmcache.v1.memory_metadata import as_groups, size_of
from lmcache.v1.memory_object import BytesBufferMemoryObj, MemoryObj


class MixedMemoryAllocator(MemoryAllocatorInterface):
    """Objects of a pool, and for `BINARY_BUFFER` bytearrays that take nothing from it.

    Args:
        size: Bytes of the pool.
        use_paging: See `HostMemoryAllocator`.
        use_hugepages: Refused when True.
        shapes, dtypes, fmt, align_bytes: See `HostMemoryAllocator`.
        numa_mapping, shm_name: Refused unless None.
        config: Accepted for callers of 0.5.6; not read.

    Raises:
        UnsupportedFeatureError: Huge pages, NUMA binding or shared memory is asked for.
        ValueError: See `HostMemoryAllocator`.

    Threads: safe from any thread.
    """

    def __init__(
        self,
        size: int,
        use_paging: bool = False,
        use_hugepages: bool = False,
        *,
        shapes: Sequence[torch.Size] | None = None,
        dtypes: Sequence[torch.dtype] | None = None,
        fmt: MemoryFormat = MemoryFormat.KV_2LTD,
        align_bytes: int | None = None,
        **options: Any,
    ) -> None:
        _refuse_unsupported({"use_hugepages": use_hugepages or None, **options})
        self._pinned = PinMemoryAllocator(
            size,
            use_paging,
            shapes=shapes,
            dtypes=dtypes,
            fmt=fmt,
            align_bytes=align_bytes,
            owner=self,
        )
        self.pin_allocator: PoolMemoryAllocator = self._pinned.inner
        self.buffer = self._pinned.buffer
        self.align_bytes = self._pinned.align_bytes
        self.pool_allocator = self.pin_allocator

    @property
    def pinned(self) -> PinMemoryAllocator:
        """The pool's memory, for a device backend to pin."""
        return self._pinned

    def allocate(
        self,
        shapes: Shapes,
        dtypes: Dtypes,
        fmt: MemoryFormat = MemoryFormat.KV_2LTD,
        allocator_type: str | None = None,
    ) -> MemoryObj | None:
        """Return an object from free bytes, or None when full."""
        if fmt is MemoryFormat.BINARY_BUFFER:
            return BytesBufferMemoryObj(bytearray(size_of(*as_groups(shapes, dtypes))))
        return self.pin_allocator.allocate(shapes, dtypes, fmt)

    def batched_allocate(
        self,
        shapes: Shapes,
        dtypes: Dtypes,
        batch_size: int,
        fmt: MemoryFormat = MemoryFormat.KV_2LTD,
        allocator_type: str | None = None,
    ) -> list[MemoryObj] | None:
        """Return `batch_size` objects from free bytes, or None and take nothing."""
        if fmt is not MemoryFormat.BINARY_BUFFER:
            return self.pin_allocator.batched_allocate(shapes, dtypes, batch_size, fmt)
        nbytes = size_of(*as_groups(shapes, dtypes))
        return [BytesBufferMemoryObj(bytearray(nbytes)) for _ in range(batch_size)]

    def memcheck(self) -> bool:
        """Whether the pool's books are in order."""
        return self._pinned.memcheck()

    def check_integrity(self) -> None:
        """Raise AssertionError naming every broken invariant of the pool."""
        self._pinned.check_integrity()

    def get_paged_buffers(self) -> tuple[torch.Tensor, ...] | None:
        """Return one uint8 view per page; None without paging."""
        if isinstance(self.pin_allocator, PagedTensorMemoryAllocator):
            return self.pin_allocator.get_paged_buffers()
        return None

    def close(self) -> None:
        """Unpin. The pages go when the last object over them does."""
        self._pinned.close()


def _refuse_unsupported(options: Mapping[str, Any]) -> None:
    known = {"use_hugepages", "numa_mapping", "shm_name", "config"}
    for name, value in options.items():
        if name not in known:
            raise TypeError(f"MixedMemoryAllocator has no option {name!r}")
        if value is not None and name != "config":
            raise UnsupportedFeatureError(
                f"{name}={value!r}: this fork has no huge pages, NUMA binding or shared memory for "
                "its pool; leave it unset, or use upstream LMCache"
            )
