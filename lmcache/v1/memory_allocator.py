"""The contract of allocators, and the one over a pool that the others build on."""

import abc
from collections.abc import Sequence
from typing import ClassVar

import torch

from lmcache.v1.memory_format import MemoryFormat
from lmcache.v1.memory_metadata import MemorySpec, as_groups, size_of
from lmcache.v1.memory_object import MemoryObj, TensorMemoryObj
from lmcache.v1.native import Pool

Shapes = torch.Size | Sequence[torch.Size]
Dtypes = torch.dtype | Sequence[torch.dtype]

DEFAULT_ALIGN_BYTES = 4096


class MemoryAllocatorInterface(abc.ABC):
    """Hands out memory objects with one reference each, owned by the caller.

    `pool_allocator` is what makes the objects from a native pool, or None for an allocator without
    one. A hot cache evicts from a pool to make room, and copies the objects of other allocators
    into its own.
    """

    pool_allocator: "PoolMemoryAllocator | None" = None

    @abc.abstractmethod
    def allocate(
        self,
        shapes: Shapes,
        dtypes: Dtypes,
        fmt: MemoryFormat = MemoryFormat.UNDEFINED,
        allocator_type: str | None = None,
    ) -> MemoryObj | None:
        """Return an object for the groups laid out one after the other, or None when full."""

    def batched_allocate(
        self,
        shapes: Shapes,
        dtypes: Dtypes,
        batch_size: int,
        fmt: MemoryFormat = MemoryFormat.UNDEFINED,
        allocator_type: str | None = None,
    ) -> list[MemoryObj] | None:
        """Return `batch_size` objects, or None and take nothing."""
        made: list[MemoryObj] = []
        for _ in range(batch_size):
            memory_obj = self.allocate(shapes, dtypes, fmt, allocator_type)
            if memory_obj is None:
                self.batched_free(made, allocator_type)
                return None
            made.append(memory_obj)
        return made

    def free(self, memory_obj: MemoryObj, allocator_type: str | None = None) -> None:
        """Take back the object's bytes, whatever still refers to it. Twice is a no-op.

        An object that a hot cache lists keeps its bytes until it leaves the cache.
        """
        memory_obj.invalidate()

    def batched_free(
        self,
        memory_objs: list[MemoryObj],
        allocator_type: str | None = None,
        update_stats: bool = True,
    ) -> None:
        """Take back the bytes of each object."""
        for memory_obj in memory_objs:
            self.free(memory_obj, allocator_type)

    def close(self) -> None:
        """Give up the memory once nothing refers to it. Twice is a no-op."""
        return

    def memcheck(self) -> bool:
        """Whether the allocator's books are in order."""
        return True


class PoolMemoryAllocator(MemoryAllocatorInterface):
    """Memory objects over one flat buffer.

    Args:
        buffer: [bytes], uint8, contiguous, on any device.
        align_bytes: Sizes and offsets are multiples of it.
        owner: The allocator that objects name as their parent; this one by default.

    Raises:
        ValueError: The buffer is no flat contiguous tensor, or smaller than one alignment unit.

    Threads: safe from any thread. State: the pool's, see `docs/architecture.md`.
    """

    object_class: ClassVar[type[TensorMemoryObj]] = TensorMemoryObj
    address_unit_bytes = 1  # what an object's address counts in

    def __init__(
        self,
        buffer: torch.Tensor,
        align_bytes: int = DEFAULT_ALIGN_BYTES,
        owner: MemoryAllocatorInterface | None = None,
    ) -> None:
        if not buffer.is_contiguous():
            raise ValueError("buffer must be contiguous")
        if align_bytes <= 0:
            raise ValueError(f"align_bytes must be positive, not {align_bytes}")
        self.buffer = buffer.view(torch.uint8).flatten()
        self.align_bytes = align_bytes
        self.owner = owner or self
        if self.buffer.numel() < align_bytes:
            raise ValueError(
                f"a pool of {self.buffer.numel()} bytes holds nothing at an alignment of "
                f"{align_bytes} bytes"
            )
        self.pool_allocator = self
        self.pool = Pool(self.buffer.numel(), align_bytes)
        self._specs: dict[tuple[object, object, MemoryFormat], MemorySpec] = {}

    def spec_for(self, shapes: Shapes, dtypes: Dtypes, fmt: MemoryFormat) -> MemorySpec:
        """Return the shared description of objects of this shape; ValueError when it is empty."""
        try:
            return self._specs[shapes, dtypes, fmt]
        except (KeyError, TypeError):
            pass
        groups = as_groups(shapes, dtypes)
        spec = self._specs.get((*groups, fmt))
        if spec is None:
            nbytes = size_of(*groups)
            if nbytes == 0:
                raise ValueError(f"cannot allocate 0 bytes: shapes {groups[0]}")
            spec = MemorySpec(*groups, fmt, nbytes, self.buffer, self.address_unit_bytes)
            self._remember(spec, shapes, dtypes)
        return spec

    def _remember(self, spec: MemorySpec, shapes: Shapes, dtypes: Dtypes) -> None:
        if len(self._specs) >= 1024:  # partial tail chunks may have many shapes
            self._specs.clear()
        self._specs[spec.shapes, spec.dtypes, spec.fmt] = spec
        if isinstance(shapes, torch.Size) and isinstance(dtypes, torch.dtype):
            self._specs[shapes, dtypes, spec.fmt] = spec

    def allocate(
        self,
        shapes: Shapes,
        dtypes: Dtypes,
        fmt: MemoryFormat = MemoryFormat.KV_2LTD,
        allocator_type: str | None = None,
    ) -> TensorMemoryObj | None:
        """Return an object from free bytes, or None; ValueError for an empty shape."""
        made = self.take_free(self.spec_for(shapes, dtypes, fmt), 1)
        return None if made is None else made[0]

    def batched_allocate(
        self,
        shapes: Shapes,
        dtypes: Dtypes,
        batch_size: int,
        fmt: MemoryFormat = MemoryFormat.KV_2LTD,
        allocator_type: str | None = None,
    ) -> list[MemoryObj] | None:
        """Return `batch_size` objects from free bytes, or None and take nothing."""
        made = self.take_free(self.spec_for(shapes, dtypes, fmt), batch_size)
        return None if made is None else list(made)

    def take_free(self, spec: MemorySpec, count: int) -> list[TensorMemoryObj] | None:
        """Return `count` objects from free bytes, or None and take nothing."""
        if count == 0:
            return []
        made: list[TensorMemoryObj] | None = self.pool.allocate(
            self.object_class, spec, spec.size_bytes, count, self.owner
        )
        return made

    @property
    def total_allocated_size(self) -> int:
        """Bytes handed out now."""
        gauges = self.pool.gauges()
        return gauges["capacity_bytes"] - gauges["free_bytes"]

    def check_integrity(self) -> None:
        """Raise AssertionError naming every broken invariant of the pool."""
        faults = self.pool.check_integrity()
        if faults:
            raise AssertionError("; ".join(faults))

    def memcheck(self) -> bool:
        """Whether every invariant of the pool holds and no object was dropped while referenced."""
        return not self.pool.check_integrity() and self.pool.gauges()["num_leaked"] == 0
