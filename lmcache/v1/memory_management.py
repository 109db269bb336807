"""Memory objects and allocators under the names that callers import."""

from lmcache.v1.address_manager import AddressManager
from lmcache.v1.memory_allocator import MemoryAllocatorInterface
from lmcache.v1.memory_format import MemoryFormat
from lmcache.v1.memory_metadata import MemoryObjMetadata
from lmcache.v1.memory_object import BytesBufferMemoryObj, MemoryObj, TensorMemoryObj

__all__ = [
    "AddressManager",
    "BytesBufferMemoryObj",
    "MemoryAllocatorInterface",
    "MemoryFormat",
    "MemoryObj",
    "MemoryObjMetadata",
    "TensorMemoryObj",
]
