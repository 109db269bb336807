"""Copies between memory objects in host memory, many in one native call."""

from array import array
from collections.abc import Sequence

from lmcache.v1.memory_object import MemoryObj
from lmcache.v1.native import copy_batch


def copy_memory_objs(
    targets: Sequence[MemoryObj], sources: Sequence[MemoryObj], num_threads: int = 1
) -> None:
    """Copy the used bytes of each source into the target at the same position.

    The interpreter's lock is released while copying. Both sides must be on the host.

    Raises:
        ValueError: Unequal numbers, or a target smaller than its source.
    """
    sizes = array("Q", [source.get_size() for source in sources])
    for index, (target, size_bytes) in enumerate(zip(targets, sizes, strict=True)):
        if target.get_physical_size() < size_bytes:
            raise ValueError(
                f"item {index}: {size_bytes} bytes do not fit into {target.get_physical_size()}"
            )
    copy_batch(
        array("Q", [target.data_ptr for target in targets]),
        array("Q", [source.data_ptr for source in sources]),
        sizes,
        num_threads,
    )
