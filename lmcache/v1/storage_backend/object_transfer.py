"""Copying memory objects into the memory of another tier."""

from collections.abc import Sequence
from typing import Any

from lmcache.v1.cache_key import CacheEngineKey
from lmcache.v1.host_copy import copy_memory_objs
from lmcache.v1.memory_object import MemoryObj
from lmcache.v1.storage_backend.abstract_backend import AllocatorBackendInterface


def allocate_and_copy_objects(
    allocator_backend: AllocatorBackendInterface,
    keys: Sequence[CacheEngineKey],
    src_memory_objs: Sequence[MemoryObj],
    stream: Any = None,
) -> tuple[Sequence[CacheEngineKey], list[MemoryObj]]:
    """Copy objects into memory of `allocator_backend`, head first, until it is full.

    Args:
        allocator_backend: Where the copies live.
        keys, src_memory_objs: Equally long; the objects are on the host.
        stream: Accepted for callers of 0.5.6; host copies need none.

    Returns:
        The keys that were copied, a prefix, and the copies with a reference each for the caller.
    """
    copies: list[MemoryObj] = []
    for source in src_memory_objs:
        copy = allocator_backend.allocate(
            source.get_shapes(), source.get_dtypes(), source.get_memory_format(), busy_loop=False
        )
        if copy is None:
            break
        copies.append(copy)
    copy_memory_objs(copies, src_memory_objs[: len(copies)])
    return keys[: len(copies)], copies
