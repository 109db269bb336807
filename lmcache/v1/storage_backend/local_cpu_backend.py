"""Tier 0: memory objects in host memory, evicted by policy when the pool is full."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lmcache.logging import init_logger
from lmcache.v1.cache_key import CacheEngineKey
from lmcache.v1.errors import ConfigError
from lmcache.v1.gauges import CpuTierGauges
from lmcache.v1.host_copy import copy_memory_objs
from lmcache.v1.host_limits import check_pool_fits
from lmcache.v1.memory_allocator import (
    DEFAULT_ALIGN_BYTES,
    Dtypes,
    MemoryAllocatorInterface,
    Shapes,
)
from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator
from lmcache.v1.memory_format import MemoryFormat
from lmcache.v1.memory_metadata import size_of
from lmcache.v1.memory_object import FOREIGN_POOL, BytesBufferMemoryObj, MemoryObj
from lmcache.v1.native import HotIndex
from lmcache.v1.pin_monitor import PinMonitor
from lmcache.v1.pin_table import PinTable
from lmcache.v1.storage_backend.abstract_backend import (
    AllocatorBackendInterface,
    Motion,
    PutCallback,
)
from lmcache.v1.storage_backend.cache_events import RemovalReason
from lmcache.v1.storage_backend.cache_policy import canonical_policy_name
from lmcache.v1.storage_backend.cache_policy.base_policy import BaseCachePolicy
from lmcache.v1.storage_backend.hot_cache import HotCache
from lmcache.v1.storage_backend.indexed_tier import IndexedTier
from lmcache.v1.storage_backend.placement import Placement
from lmcache.v1.storage_backend.policy_moves import move_by_policy
from lmcache.v1.storage_backend.put_callbacks import call_back
from lmcache.v1.storage_backend.residency_ledger import ResidencyLedger, TierLedger
from lmcache.v1.storage_backend.room_maker import RoomMaker

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata

logger = init_logger(__name__)

NAME = "LocalCPUBackend"
_ALIGN_SETTING = "local_cpu.pinned_align_bytes"


class LocalCPUBackend(IndexedTier, AllocatorBackendInterface):
    """The CPU tier: the pool of one worker and the hot cache over it.

    Args:
        config: Pool size, policy, pin time-out, bounded wait.
        metadata: Shapes of chunks and ranks on this host; None where no chunk size is asked for.
        dst_device: See `StorageBackendInterface`.
        lmcache_worker: Accepted for callers of 0.5.6; there is no controller.
        memory_allocator: Use this instead of making one.

    Attributes:
        cpu_lock: The hot cache's lock; not re-entrant.
        hot_cache: Read-only view, key to memory object, coldest first.
        cache_policy: `update_on_hit(key, hot_cache)` is the primitive that touch uses.
        use_hot: False: puts list nothing, and the pool only stages.

    Raises:
        HostMemoryError: The pools of this host's ranks exceed its memory.
        ConfigError: A size or alignment that cannot be used.

    Threads: safe from any thread.
    """

    batched_msg_sender = None  # of 0.5.6: there is no controller to send to

    # Defaults for callers that build a backend without running __init__.
    _hot: HotCache | None = None
    hot_cache: Mapping[CacheEngineKey, MemoryObj]
    cache_policy: BaseCachePolicy[CacheEngineKey]

    def __init__(
        self,
        config: "LMCacheEngineConfig",
        metadata: "LMCacheMetadata | None" = None,
        dst_device: str = "cpu",
        lmcache_worker: object = None,
        memory_allocator: MemoryAllocatorInterface | None = None,
    ) -> None:
        super().__init__(dst_device)
        policy_name = canonical_policy_name(config.cache_policy)
        self.metadata = metadata
        self.chunk_size_tokens = config.chunk_size
        self.memory_allocator = memory_allocator or self.initialize_allocator(config, metadata)
        pool_allocator = self.memory_allocator.pool_allocator
        pool = FOREIGN_POOL if pool_allocator is None else pool_allocator.pool
        self._hot = hot = HotCache(pool, policy_name, ResidencyLedger().register_tier(NAME))
        self.cpu_lock = self.order_lock = hot.lock
        self.hot_cache = hot.view
        self.cache_policy = hot.policy
        self.use_hot = config.local_cpu
        self.room = RoomMaker(self.memory_allocator, hot, config.blocking_timeout_secs)
        self.pins = PinTable(config.pin_timeout_sec)
        self._is_closed = False
        PinMonitor.GetOrCreate().watch(self.pins, config.pin_check_interval_sec)
        if not hot.policy.honours_placement:
            logger.info("cache_policy %s ignores placement and demotion", policy_name)

    def initialize_allocator(
        self, config: "LMCacheEngineConfig", metadata: "LMCacheMetadata | None" = None
    ) -> MemoryAllocatorInterface:
        """Make the pool of `max_local_cpu_size` GiB, once the host was found to allow it."""
        size_gib = config.max_local_cpu_size
        if size_gib <= 0:
            raise ConfigError(
                f"max_local_cpu_size={size_gib}: the CPU tier needs a pool; set "
                "LMCACHE_MAX_LOCAL_CPU_SIZE to a positive number of GiB"
            )
        local_world_size = 1 if metadata is None else metadata.local_world_size
        if size_gib * 2**30 < DEFAULT_ALIGN_BYTES:
            raise ConfigError(
                f"max_local_cpu_size={size_gib}: the pool must hold at least {DEFAULT_ALIGN_BYTES} "
                "bytes; LMCACHE_MAX_LOCAL_CPU_SIZE is in GiB"
            )
        check_pool_fits(size_gib, local_world_size, config.reserve_local_cpu_size)
        align_bytes = config.get_extra_config_value(_ALIGN_SETTING, None)
        is_power = (
            type(align_bytes) is int and align_bytes > 0 and not align_bytes & (align_bytes - 1)
        )
        if align_bytes is not None and not is_power:
            raise ConfigError(
                f"extra_config {_ALIGN_SETTING}={align_bytes!r} must be a power of two of bytes"
            )
        logger.info(
            "CPU pool: %.4g GiB, pageable until a device backend pins it, policy %s",
            size_gib,
            config.cache_policy,
        )
        return MixedMemoryAllocator(int(size_gib * 2**30), align_bytes=align_bytes)

    @property
    def hot(self) -> HotCache:
        """The hot cache; RuntimeError when __init__ was not run."""
        if self._hot is None:
            raise RuntimeError("this LocalCPUBackend was built without its __init__")
        return self._hot

    @property
    def residents(self) -> HotIndex:
        """See `IndexedTier`."""
        return self.hot.index

    @property
    def use_hot(self) -> bool:
        """Whether puts are listed. Setting it False forgets nothing; `set_hot` does."""
        return self._hot is None or self._hot.takes_puts

    @use_hot.setter
    def use_hot(self, enabled: bool) -> None:
        self.hot.takes_puts = enabled

    # --- touch and events ------------------------------------------------------------------------
    def attach_ledger(self, page: TierLedger) -> None:
        """Report residency to `page` from now on."""
        if self._hot is not None:
            self._hot.attach_ledger(page)

    def move_in_order(self, keys: Sequence[CacheEngineKey], motion: Motion) -> bytes:
        """See `StorageBackendInterface`; the caller holds `cpu_lock`."""
        if self._hot is not None:
            return self._hot.policy.move(keys, motion)
        return move_by_policy(self.cache_policy, self.hot_cache, keys, motion)

    def would_admit(self, nbytes: int, placement: Placement) -> bool:
        """Whether an object of `nbytes` would find room; see `StorageManager.would_admit`."""
        has_pool = self.memory_allocator.pool_allocator is not None
        if has_pool and placement is Placement.SPARE:
            free: int = self.hot.pool.gauges()["largest_free_bytes"]
            return free >= nbytes
        fits: bool = self.hot.index.would_fit(nbytes)
        return fits

    # --- looking up ------------------------------------------------------------------------------
    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        """Whether `key` is resident; asks `hot_cache`, which a caller may have set."""
        return super().contains(key, True) if pin else key in self.hot_cache

    def get_keys(self) -> list[CacheEngineKey]:
        """Return the resident keys, coldest first."""
        return list(self.hot_cache)

    # --- storing ---------------------------------------------------------------------------------
    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        """False: a put is complete when it returns."""
        return False

    def batched_submit_placed_put(
        self,
        keys: Sequence[CacheEngineKey],
        objs: Sequence[MemoryObj],
        placement: Placement,
        transfer_spec: Any = None,
        on_complete_callback: PutCallback | None = None,
    ) -> None:
        """List objects in the hot cache, each with a reference of the cache's own.

        Does nothing while `use_hot` is off. A resident key of the same size and dtype is used again
        (a cold put moves nothing); of another, it is replaced. An object of another allocator, or
        one that is listed under another key, is copied; where there is no room for the copy, that
        key is not stored. The callback runs once per stored key, under no lock.
        """
        if not self.use_hot:
            return
        keys, objs = tuple(keys), tuple(objs)  # no caller's code under the lock
        to_copy = self.hot.positions_to_copy(keys, objs)
        copies: list[MemoryObj] = []
        if to_copy:
            keys, objs, copies = self._with_own_copies(keys, objs, frozenset(to_copy), placement)
        try:
            self.hot.put(keys, objs, placement.is_cold)
        finally:
            for copy in copies:
                copy.ref_count_down()
        if on_complete_callback is not None:
            for key in keys:
                call_back(on_complete_callback, key)

    def _with_own_copies(
        self,
        keys: Sequence[CacheEngineKey],
        objs: Sequence[MemoryObj],
        to_copy: frozenset[int],
        placement: Placement,
    ) -> tuple[tuple[CacheEngineKey, ...], tuple[MemoryObj, ...], list[MemoryObj]]:
        """Return keys and objects with copies in our memory at `to_copy`, and the copies."""
        own_keys: list[CacheEngineKey] = []
        own_objs: list[MemoryObj] = []
        copies: list[MemoryObj] = []
        try:
            for position, (key, obj) in enumerate(zip(keys, objs, strict=True)):
                if position in to_copy:
                    copy = self._copy_of(obj, placement)
                    if copy is None:
                        continue
                    copies.append(copy)
                    obj = copy
                own_keys.append(key)
                own_objs.append(obj)
        except BaseException:
            for copy in copies:
                copy.ref_count_down()
            raise
        return tuple(own_keys), tuple(own_objs), copies

    def _copy_of(self, obj: MemoryObj, placement: Placement) -> MemoryObj | None:
        is_buffer = isinstance(obj, BytesBufferMemoryObj)
        fmt = MemoryFormat.BINARY if is_buffer else obj.get_memory_format()
        may_evict = placement is not Placement.SPARE
        copy = self.allocate(obj.get_shapes(), obj.get_dtypes(), fmt, may_evict, busy_loop=False)
        if copy is not None:
            try:
                copy_memory_objs([copy], [obj])
            except BaseException:
                copy.ref_count_down()
                raise
        return copy

    # --- reading ---------------------------------------------------------------------------------
    def get_blocking(self, key: CacheEngineKey) -> MemoryObj | None:
        """Return the object with a reference for the caller, or None; a use."""
        return self.hot.get(key)

    def batched_get_into(
        self, keys: Sequence[CacheEngineKey], into: list[MemoryObj | None]
    ) -> None:
        """As `batched_get_blocking`; the references are in `into` whatever interrupts the call."""
        self.hot.get_many(tuple(keys), into)

    def peek(self, key: CacheEngineKey) -> MemoryObj | None:
        """Return the object with a reference for the caller, or None; no use: for diagnostics."""
        return self.hot.peek(key)

    def hold_prefix(self, keys: Sequence[CacheEngineKey], into: list[MemoryObj]) -> None:
        """Append the objects of the resident prefix, each with a reference; no use."""
        self.hot.hold_prefix(keys, into)

    # --- removing --------------------------------------------------------------------------------
    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        """Remove `key`; False when absent. Readers and pins keep the bytes alive.

        With force=False the caller holds `cpu_lock` and the reason is CAPACITY.
        """
        if not force:
            return self.hot.remove_locked(key)
        return self.hot.remove((key,), RemovalReason.EXPLICIT) == 1

    def batched_remove(self, keys: Sequence[CacheEngineKey], force: bool = True) -> int:
        """Remove keys; returns how many were there."""
        if not force:
            return sum(self.remove(key, force) for key in keys)
        return self.hot.remove(tuple(keys), RemovalReason.EXPLICIT)

    def clear(self) -> int:
        """Remove what nobody holds; returns its tokens, 0 while `use_hot` is off."""
        if not self.use_hot:
            return 0
        return sum(memory_obj.get_num_tokens() for memory_obj in self.hot.clear_evictable())

    def set_hot(self, enabled: bool) -> None:
        """Switch the hot cache; switched off, it forgets everything, held objects too."""
        if enabled:
            self.use_hot = not self._is_closed
        else:
            self.hot.switch_off()

    # --- allocating ------------------------------------------------------------------------------
    def get_memory_allocator(self) -> MemoryAllocatorInterface:
        """Return the pool's allocator."""
        return self.memory_allocator

    def allocate(
        self,
        shapes: Shapes,
        dtypes: Dtypes,
        fmt: MemoryFormat | None = None,
        eviction: bool = True,
        busy_loop: bool = True,
    ) -> MemoryObj | None:
        """Return an object with a reference for the caller, or None.

        Nothing is evicted for an allocation that cannot succeed. With `eviction` and `busy_loop`
        the call waits up to `blocking_timeout_secs` for a release, then gives up with one log line.

        Raises:
            ValueError: An empty shape, or one that no page holds.
        """
        made = self.batched_allocate(shapes, dtypes, 1, fmt, eviction, busy_loop)
        return None if made is None else made[0]

    def batched_allocate(
        self,
        shapes: Shapes,
        dtypes: Dtypes,
        batch_size: int,
        fmt: MemoryFormat | None = None,
        eviction: bool = True,
        busy_loop: bool = True,
    ) -> list[MemoryObj] | None:
        """Return `batch_size` objects, or None: then nothing was taken, and nothing evicted.

        As `allocate`; the whole batch is waited for once.

        Raises:
            ValueError: As `allocate`, or a negative `batch_size`.
        """
        made = self.room.take(
            shapes,
            dtypes,
            batch_size,
            fmt or MemoryFormat.KV_2LTD,
            may_evict=eviction,
            may_wait=eviction and busy_loop,
        )
        return None if made is None else list(made)

    def get_full_chunk_size_bytes(self) -> int:
        """Return the bytes of a full chunk; ConfigError without metadata."""
        if self.metadata is None:
            raise ConfigError("the size of a chunk needs the model's metadata, which was not given")
        return size_of(self.metadata.get_shapes(self.chunk_size_tokens), self.metadata.get_dtypes())

    def calculate_chunk_budget(self) -> int:
        """Return how many full chunks the pool holds."""
        capacity: int = self.hot.pool.gauges()["capacity_bytes"]
        return capacity // self.get_full_chunk_size_bytes()

    def gauges(self) -> CpuTierGauges:
        """Return what the tier counts and holds now; zeros when __init__ was not run."""
        if self._hot is None:
            return CpuTierGauges()
        hot, pins, room = self._hot, self.pins, self.room
        now = hot.index.gauges()
        return CpuTierGauges(
            capacity_bytes=now["capacity_bytes"],
            used_bytes=now["capacity_bytes"] - now["free_bytes"],
            largest_free_bytes=now["largest_free_bytes"],
            num_entries=now["num_cached"],
            num_memory_objs=now["num_blocks"],
            num_pinned_objs=now["num_pinned"],
            num_pins=pins.num_pins,
            num_keys_in_request=pins.num_uncounted,
            forced_releases=pins.num_forced_releases,
            unmatched_releases=pins.num_unmatched_releases,
            allocation_waits=room.num_waits,
            failed_waits=room.num_failed_waits,
            failed_allocations=room.num_failed_allocations,
            failed_evictions=room.num_failed_evictions,
            evictions=hot.num_evictions,
            evicted_entries=hot.num_evicted,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError naming every broken invariant."""
        self.hot.check_integrity()
        self.pins.check_integrity()

    def close(self) -> None:
        """Forget everything and give the pool up; objects still referenced keep their bytes."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._hot is not None:
            self._hot.switch_off()
            self.room.close()
            self.memory_allocator.close()
