"""Memory objects over host memory that a device backend may pin."""

from lmcache.v1.memory_allocators.host_memory_allocator import HostMemoryAllocator


class PinMemoryAllocator(HostMemoryAllocator):
    """A pool of host memory meant for device copies.

    It starts pageable, so that no device is opened; the first device backend that copies from it
    pins it with `pin`.
    """
