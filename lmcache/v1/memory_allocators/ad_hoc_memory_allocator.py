"""Memory objects with memory of their own: no pool, no limit."""

import torch

from lmcache.v1.memory_allocator import Dtypes, MemoryAllocatorInterface, Shapes
from lmcache.v1.memory_format import MemoryFormat
from lmcache.v1.memory_metadata import MemoryObjMetadata, as_groups, size_of
from lmcache.v1.memory_object import MemoryObj, TensorMemoryObj


class AdHocMemoryAllocator(MemoryAllocatorInterface):
    """Allocates every object on its own.

    Args:
        device: Where the objects live.

    Threads: safe from any thread.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def allocate(
        self,
        shapes: Shapes,
        dtypes: Dtypes,
        fmt: MemoryFormat = MemoryFormat.KV_2LTD,
        allocator_type: str | None = None,
    ) -> TensorMemoryObj:
        """Return an object of fresh, uninitialised memory."""
        group_shapes, group_dtypes = as_groups(shapes, dtypes)
        nbytes = size_of(group_shapes, group_dtypes)
        metadata = MemoryObjMetadata(
            group_shapes[0],
            group_dtypes[0],
            0,
            nbytes,
            1,
            fmt=fmt,
            shapes=list(group_shapes),
            dtypes=list(group_dtypes),
        )
        raw = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return TensorMemoryObj(raw, metadata, self)

    def ref_count_up(self, memory_obj: MemoryObj) -> None:
        """Take a reference."""
        memory_obj.ref_count_up()

    def ref_count_down(self, memory_obj: MemoryObj) -> None:
        """Drop a reference."""
        memory_obj.ref_count_down()

    def get_ref_count(self, memory_obj: MemoryObj) -> int:
        """Return the object's reference count."""
        return memory_obj.get_ref_count()
