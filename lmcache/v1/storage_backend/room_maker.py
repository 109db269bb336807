"""Memory for new objects: free bytes, else room made in the hot cache, else a bounded wait."""

import threading
import time
from collections.abc import Callable, Sequence

from lmcache.logging import init_logger
from lmcache.v1.memory_allocator import (
    Dtypes,
    MemoryAllocatorInterface,
    PoolMemoryAllocator,
    Shapes,
)
from lmcache.v1.memory_format import MemoryFormat
from lmcache.v1.memory_object import MemoryObj
from lmcache.v1.storage_backend.hot_cache import HotCache

logger = init_logger(__name__)


class RoomMaker:
    """Allocates from one pool, evicting from the hot cache over it.

    Nothing is evicted for an allocation that cannot succeed. A waiting allocation holds no lock and
    wakes at once when anything is released.

    Args:
        allocator: Owner of the memory.
        hot: The hot cache over its pool.
        wait_timeout_seconds: How long an allocation that may wait does so.

    Attributes:
        num_waits, num_failed_waits: Allocations that began to wait; those that gave up.
        num_failed_allocations: Calls of `take` that took nothing.
        num_failed_evictions: Those of them that were allowed to evict.

    Threads: safe from any thread; `_counts_lock` guards the counts.
    """

    def __init__(
        self, allocator: MemoryAllocatorInterface, hot: HotCache, wait_timeout_seconds: float
    ) -> None:
        self._allocator = allocator
        self._hot = hot
        self.wait_timeout_seconds = wait_timeout_seconds
        self.num_waits = 0
        self.num_failed_waits = 0
        self.num_failed_allocations = 0
        self.num_failed_evictions = 0
        self._counts_lock = threading.Lock()
        self._is_closed = False

    def take(
        self,
        shapes: Shapes,
        dtypes: Dtypes,
        count: int,
        fmt: MemoryFormat,
        may_evict: bool,
        may_wait: bool,
    ) -> Sequence[MemoryObj] | None:
        """Return `count` objects with a reference each, or None and take and evict nothing.

        Raises:
            ValueError: An empty shape, one that no page holds, or a negative count.
        """
        if count < 0:
            raise ValueError(f"batch_size must not be negative, not {count}")
        if count == 0:
            return []
        made = self._take(shapes, dtypes, count, fmt, may_evict, may_wait)
        if made is None:
            with self._counts_lock:
                self.num_failed_allocations += 1
                self.num_failed_evictions += may_evict
        return made

    def _take(
        self,
        shapes: Shapes,
        dtypes: Dtypes,
        count: int,
        fmt: MemoryFormat,
        may_evict: bool,
        may_wait: bool,
    ) -> Sequence[MemoryObj] | None:
        pool_allocator = self._allocator.pool_allocator
        if pool_allocator is None or fmt is MemoryFormat.BINARY_BUFFER:
            return self._wait_for(
                lambda: self._take_foreign(shapes, dtypes, count, fmt, may_evict), may_wait
            )
        spec = pool_allocator.spec_for(shapes, dtypes, fmt)
        if not _can_ever_fit(pool_allocator, spec.size_bytes, count):
            return None
        if not may_evict:
            return pool_allocator.take_free(spec, count)
        owner = pool_allocator.owner
        made = self._hot.take_room(spec, count, owner)
        if made is not None or not may_wait:
            return made
        return self._wait_for(lambda: self._hot.take_room(spec, count, owner), may_wait)

    def close(self) -> None:
        """Let every waiting allocation give up."""
        self._is_closed = True
        self._hot.pool.wake_waiting()

    def _take_foreign(
        self, shapes: Shapes, dtypes: Dtypes, count: int, fmt: MemoryFormat, may_evict: bool
    ) -> Sequence[MemoryObj] | None:
        while True:
            made = self._allocator.batched_allocate(shapes, dtypes, count, fmt)
            if made is not None or not may_evict or not self._hot.evict_next():
                return made

    def _wait_for(
        self, attempt: Callable[[], Sequence[MemoryObj] | None], may_wait: bool
    ) -> Sequence[MemoryObj] | None:
        pool = self._hot.pool
        deadline_s = time.monotonic() + self.wait_timeout_seconds
        is_waiting = False
        while True:
            version = pool.version
            made = attempt()
            if made is not None or not may_wait or self._is_closed:
                return made
            if not is_waiting:
                is_waiting = True
                with self._counts_lock:
                    self.num_waits += 1
            left_seconds = deadline_s - time.monotonic()
            if left_seconds <= 0 or not pool.wait_for_release(version, left_seconds):
                break
        with self._counts_lock:
            self.num_failed_waits += 1
        logger.warning(
            "no memory was released within blocking_timeout_secs=%s s: everything in the CPU pool "
            "is pinned or in use (%s)",
            self.wait_timeout_seconds,
            self._hot.index.gauges(),
        )
        return None


def _can_ever_fit(allocator: PoolMemoryAllocator, size_bytes: int, count: int) -> bool:
    units = -(-size_bytes // allocator.align_bytes)
    if units * count <= allocator.buffer.numel() // allocator.align_bytes:
        return True
    logger.error(
        "%d objects of %d bytes can never fit the CPU pool; raise LMCACHE_MAX_LOCAL_CPU_SIZE",
        count,
        size_bytes,
    )
    return False
