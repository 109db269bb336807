"""The storage manager: walks the tiers, and is where touch and cache events are asked for."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from lmcache.logging import init_logger
from lmcache.v1.cache_key import CacheEngineKey
from lmcache.v1.errors import ConfigError, UnsupportedFeatureError
from lmcache.v1.event_loop import LazyEventLoop
from lmcache.v1.gauges import ManagerGauges
from lmcache.v1.memory_allocator import Dtypes, Shapes
from lmcache.v1.memory_format import MemoryFormat
from lmcache.v1.memory_object import MemoryObj
from lmcache.v1.native import check_keys
from lmcache.v1.pin_table import PinOwner
from lmcache.v1.storage_backend.abstract_backend import (
    AllocatorBackendInterface,
    Motion,
    StorageBackendInterface,
)
from lmcache.v1.storage_backend.cache_events import (
    CacheEvent,
    EventKind,
    RemovalReason,
    Residents,
    Subscription,
)
from lmcache.v1.storage_backend.factory import CreateStorageBackends
from lmcache.v1.storage_backend.local_cpu_backend import NAME as LOCAL_CPU
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import NAME as LOCAL_DISK
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend
from lmcache.v1.storage_backend.manager_gauges import ManagerGaugesReader
from lmcache.v1.storage_backend.object_transfer import allocate_and_copy_objects
from lmcache.v1.storage_backend.placement import Placement
from lmcache.v1.storage_backend.residency_ledger import ResidencyLedger
from lmcache.v1.storage_backend.residency_moves import ResidencyMoves
from lmcache.v1.storage_backend.tier_set import TierSet
from lmcache.v1.storage_backend.tier_walk import TierWalk
from lmcache.v1.storage_backend.touch import TouchResult
from lmcache.v1.storage_backend.unsupported import UnsupportedTransfers

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.event_manager import EventManager
    from lmcache.v1.metadata import LMCacheMetadata

logger = init_logger(__name__)

DEFAULT_EVENT_CAPACITY = 65_536
_LOOP_THREAD = "storage-manager-event-loop"

__all__ = ["StorageManager", "allocate_and_copy_objects"]


class StorageManager(UnsupportedTransfers):
    """All tiers of one worker.

        state   meaning                                          who may leave it
        open    tiers answer; the event loop's thread runs       close
        closed  tiers gave up their memory; streams are CLOSED   nobody

    Args:
        config, metadata: The engine's.
        event_manager: Kept for plug-ins and the engine.
        lmcache_worker: Accepted for callers of 0.5.6; there is no controller.
        async_lookup_server: Refused unless None: there is no async loading.

    Attributes:
        storage_backends: Name to backend, in search order.
        local_cpu_backend, allocator_backend: The CPU tier; None for role "scheduler".
        local_disk_backend: The disk tier, if there is one.
        non_allocator_backends: Names of the tiers that use another's memory.

    Raises:
        ConfigError: A setting that cannot be used.

    Threads: safe from any thread, but for the calls that change the set of tiers.
    """

    # Defaults for subclasses that do not run __init__: touch and events must work there too.
    storage_backends: "OrderedDict[str, StorageBackendInterface]" = OrderedDict()
    local_cpu_backend: LocalCPUBackend | None = None
    local_disk_backend: LocalDiskBackend | None = None
    allocator_backend: AllocatorBackendInterface | None = None
    _late: "tuple[TierSet, TierWalk, ResidencyMoves, ManagerGaugesReader] | None" = None
    _event_loop: LazyEventLoop | None = None
    _is_closed = False
    _pin_seconds = (300.0, 30.0)  # time-out and check interval, for tiers that know no pin owners

    def __init__(
        self,
        config: "LMCacheEngineConfig",
        metadata: "LMCacheMetadata",
        event_manager: "EventManager | None" = None,
        lmcache_worker: object = None,
        async_lookup_server: object = None,
    ) -> None:
        if async_lookup_server is not None:
            raise UnsupportedFeatureError(
                "async_lookup_server: this fork has no async loading; use upstream LMCache for it"
            )
        self.config = config
        self._event_loop = LazyEventLoop(_LOOP_THREAD)
        self._pin_seconds = (config.pin_timeout_sec, config.pin_check_interval_sec)
        self.metadata = metadata
        self.event_manager = event_manager
        try:
            self.storage_backends = self._make_backends()
        except BaseException:
            self._event_loop.stop()
            raise
        self._adopt_backends()

    def _make_backends(self) -> "OrderedDict[str, StorageBackendInterface]":
        # Only plug-ins ask for the loop; without any, no thread is started and no socket opened.
        loop = self.loop if self.config.storage_plugins else None
        return CreateStorageBackends(
            self.config, self.metadata, loop, existing_backends=self.storage_backends
        )

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the thread `storage-manager-event-loop`, started when first asked for.

        Raises:
            RuntimeError: The manager is closed.
        """
        if self._event_loop is None:
            self._event_loop = LazyEventLoop(_LOOP_THREAD)
        return self._event_loop.get()

    @loop.setter
    def loop(self, loop: asyncio.AbstractEventLoop) -> None:
        self._event_loop = LazyEventLoop(_LOOP_THREAD, loop)

    def _adopt_backends(self) -> None:
        cpu = self.storage_backends.get(LOCAL_CPU)
        self.local_cpu_backend = cpu if isinstance(cpu, LocalCPUBackend) else None
        disk = self.storage_backends.get(LOCAL_DISK)
        self.local_disk_backend = disk if isinstance(disk, LocalDiskBackend) else None
        self.allocator_backend = self.local_cpu_backend
        self.non_allocator_backends = self.get_non_allocator_backends()
        self._tiers.all()  # attaches the ledger before anything is stored

    @property
    def _parts(self) -> tuple[TierSet, TierWalk, ResidencyMoves, ManagerGaugesReader]:
        if self._late is None:
            tiers = TierSet(self.storage_backends, ResidencyLedger(), LOCAL_CPU, *self._pin_seconds)
            walk, moves = TierWalk(tiers, LOCAL_CPU), ResidencyMoves(tiers, LOCAL_CPU)
            self._late = (tiers, walk, moves, ManagerGaugesReader(tiers.ledger, walk, moves, tiers))
        if self._late[0].backends is not self.storage_backends:
            self._late[0].backends = self.storage_backends
        return self._late

    @property
    def _tiers(self) -> TierSet:
        return self._parts[0]

    @property
    def _walk(self) -> TierWalk:
        return self._parts[1]

    # --- touch -----------------------------------------------------------------------------------
    def touch(self, keys: Sequence[CacheEngineKey]) -> TouchResult:
        """Count a use of each key and say what is known of it.

        Args:
            keys: Head of the prefix first, which ends youngest. Duplicates count once.

        Returns:
            One verdict per key, in order, true as of one moment.

        Raises:
            TypeError: `keys` is no sequence of CacheEngineKey; then nothing was moved.

        Threads: safe from any thread. Never reads, waits, pins or promotes; takes each order's lock
        once. Under LRU a REFRESHED key is safe until (pool - held bytes) bytes were stored or
        refreshed after it.
        """
        return self._parts[2].move(keys, Motion.USE)

    def demote(self, keys: Sequence[CacheEngineKey]) -> TouchResult:
        """Make keys the first to leave ("this context is finished"); answers like `touch`.

        Args:
            keys: Head of the prefix first; the tail leaves first. FIFO and MRU move nothing.

        Raises:
            TypeError: As `touch`.
        """
        return self._parts[2].move(keys, Motion.DEMOTE)

    @property
    def touch_errors(self) -> int:
        """Keys whose move a tier answered with an exception; they were reported PRESENT."""
        return self._parts[2].num_errors

    def touch_cache(self, owner: PinOwner | None = None) -> None:
        """Count the pinned lookups of `owner`, or of this thread or task, as uses."""
        self._walk.touch_cache(owner)

    def would_admit(self, nbytes: int, placement: Placement = Placement.YOUNG) -> bool:
        """Whether an allocation of `nbytes` would succeed now; ask before copying from a device.

        SPARE: a free extent of that size exists. Else: one could be made by evicting.

        Raises:
            ValueError: `nbytes` is not positive.
            TypeError: `placement` is no Placement.
        """
        if nbytes <= 0:
            raise ValueError(f"nbytes must be positive, not {nbytes}")
        if not isinstance(placement, Placement):
            raise TypeError(f"placement must be a Placement, not {placement!r}")
        cpu = self.local_cpu_backend
        is_sane = nbytes < 1 << 63  # what the core counts in
        return is_sane and cpu is not None and cpu.would_admit(nbytes, placement)

    # --- cache events ----------------------------------------------------------------------------
    def subscribe(
        self,
        callback: Callable[[list[CacheEvent]], Any] | None = None,
        *,
        tiers: Collection[str] | None = None,
        kinds: Collection[EventKind] | None = None,
        capacity: int = DEFAULT_EVENT_CAPACITY,
    ) -> Subscription:
        """Hear what enters and leaves the tiers from now on.

        Args:
            callback: Called with batches on a daemon thread of its own; None: use `take`.
            tiers: Only these backends, named as `contains` names them.
            kinds: Only these kinds; LOST and CLOSED always come.
            capacity: Events kept for a slow subscriber; beyond, the oldest are dropped and a LOST
                tells of them.

        Raises:
            TypeError, ValueError: An argument that cannot be used.
        """
        return self._tiers.ledger.subscribe(callback, tiers, kinds, capacity)

    def snapshot(self) -> Residents:
        """Return which keys the local tiers hold, as of the event numbered `seq`."""
        return self._tiers.ledger.snapshot()

    @property
    def num_events_lost(self) -> int:
        """Events dropped so far because a subscriber was too slow."""
        return self._tiers.ledger.num_lost

    # --- gauges ----------------------------------------------------------------------------------
    def gauges(self) -> ManagerGauges:
        """Return the totals since the manager was made and the readings of now.

        Threads: safe from any thread; meant for every few seconds: it counts the pins one by one.
        """
        return self._parts[3].read(self.local_cpu_backend, self.local_disk_backend)

    # --- memory ----------------------------------------------------------------------------------
    def _allocator(self) -> AllocatorBackendInterface:
        if self.allocator_backend is None:
            raise ConfigError(
                "there is no CPU tier to allocate from: role 'scheduler', or "
                "LMCACHE_MAX_LOCAL_CPU_SIZE is 0"
            )
        return self.allocator_backend

    def allocate(
        self,
        shapes: Shapes,
        dtypes: Dtypes,
        fmt: MemoryFormat = MemoryFormat.KV_2LTD,
        eviction: bool = True,
        busy_loop: bool = True,
    ) -> MemoryObj | None:
        """Return an object with a reference for the caller; see `LocalCPUBackend.allocate`."""
        return self._allocator().allocate(shapes, dtypes, fmt, eviction, busy_loop)

    def batched_allocate(
        self,
        shapes: Shapes,
        dtypes: Dtypes,
        batch_size: int,
        fmt: MemoryFormat = MemoryFormat.KV_2LTD,
        eviction: bool = True,
        busy_loop: bool = True,
    ) -> list[MemoryObj] | None:
        """Return `batch_size` objects, or None and take nothing."""
        return self._allocator().batched_allocate(
            shapes, dtypes, batch_size, fmt, eviction, busy_loop
        )

    def memcheck(self) -> bool:
        """Whether the allocator's books are in order."""
        return self._allocator().get_memory_allocator().memcheck()

    # --- storing and reading ---------------------------------------------------------------------
    def put(self, key: CacheEngineKey, memory_obj: MemoryObj, location: str | None = None) -> None:
        """Raise RuntimeError: use `batched_put`."""
        raise RuntimeError("StorageManager.put is not supported; use batched_put([key], [obj])")

    def batched_put(
        self,
        keys: Sequence[CacheEngineKey],
        memory_objs: Sequence[MemoryObj],
        transfer_spec: Any = None,
        location: str | None = None,
        *,
        placement: Placement = Placement.YOUNG,
    ) -> None:
        """Store objects in every tier, or in `location`, and drop one reference of each.

        Args:
            keys: Head of the prefix first, which ends youngest.
            memory_objs: One per key. The references are dropped as the last act: after an exception
                they are still the caller's.
            transfer_spec: Passed to the tiers.
            location: Name of the one tier to put to.
            placement: How far from eviction the entries start; FIFO and MRU ignore it. SPARE wants
                objects allocated with `eviction=False`, and goes to no tier that cannot tell its
                free budget.

        Raises:
            ValueError: Unequal numbers, an unknown location, or an object that cannot be stored.
            TypeError: A key or placement of the wrong type.
        """
        keys, memory_objs = tuple(keys), tuple(memory_objs)  # no caller's code under our locks
        self._walk.put(keys, memory_objs, transfer_spec, location, placement)
        for memory_obj in memory_objs:
            memory_obj.ref_count_down()

    def get(self, key: CacheEngineKey, location: str | None = None) -> MemoryObj | None:
        """Return the object with a reference for the caller, or None; a use.

        A hit below the CPU tier is written back into it.
        """
        check_keys((key,))
        return self._walk.get(key, location)

    def batched_get(
        self, keys: Sequence[CacheEngineKey], location: str | None = None
    ) -> list[MemoryObj | None]:
        """Return one object or None per key, each from the first tier that has it; uses."""
        keys = tuple(keys)
        check_keys(keys)
        return self._walk.batched_get(keys, location)

    def get_prefix(
        self,
        keys: Sequence[CacheEngineKey],
        prefix: list[MemoryObj],
        search_range: Collection[str] | None = None,
        sizes: Sequence[int] | None = None,
    ) -> None:
        """Append to `prefix` the objects of the longest prefix held, each with a reference; uses.

        The caller's list holds every reference from the first moment, whatever interrupts the call.

        Args:
            keys: Head of the prefix first.
            prefix: Where the objects go.
            search_range: Names of the tiers to read from; None: all.
            sizes: Bytes that each object must have; one of another size ends the prefix.
        """
        keys = tuple(keys)
        check_keys(keys)
        self._walk.get_prefix(keys, search_range, sizes, prefix)

    def hold_hot_prefix(self, keys: Sequence[CacheEngineKey], into: list[MemoryObj]) -> None:
        """Append the objects of the prefix that the hot cache lists, each with a reference.

        No use: nothing moves, but what is held is not evicted.
        """
        if self.local_cpu_backend is not None:
            self.local_cpu_backend.hold_prefix(keys, into)

    def get_non_blocking(
        self, key: CacheEngineKey, location: str | None = None
    ) -> Future[Any] | None:
        """Start a get in the first tier that offers it; None when none does."""
        for tier in self._tiers.searched(None if location is None else (location,)):
            future = tier.backend.get_non_blocking(key)
            if future is not None:
                return future
        return None

    def first_put_tier(self, location: str | None = None) -> str | None:
        """Return the name of the first tier that a put lists in; None when no tier takes it.

        Raises:
            ValueError: There is no tier called `location`.
        """
        for tier in self._tiers.targets(location):
            if tier.name != LOCAL_CPU or self.is_hot_cache_enabled():
                return tier.name
        return None

    # --- looking up ------------------------------------------------------------------------------
    def contains(
        self,
        key: CacheEngineKey,
        search_range: Collection[str] | None = None,
        pin: bool = False,
        owner: PinOwner | None = None,
    ) -> str | None:
        """Return the name of the first tier that holds `key`, or None; `pin` it for `owner`."""
        check_keys((key,))
        return self._walk.contains(key, search_range, pin, owner)

    def batched_contains(
        self,
        keys: Sequence[CacheEngineKey],
        search_range: Collection[str] | None = None,
        pin: bool = False,
        owner: PinOwner | None = None,
    ) -> tuple[int, dict[str, list[CacheEngineKey]]]:
        """Return the length of the prefix that the tiers hold together, and which keys each serves.

        With `pin` the prefix is pinned for `owner`; one lookup id pins and uses a key once, however
        often its request asks.
        """
        keys = tuple(keys)
        check_keys(keys)
        return self._walk.batched_contains(keys, search_range, pin, owner)

    def get_block_mapping(
        self, chunk_infos: Sequence[tuple[CacheEngineKey, int, int]]
    ) -> dict[str, list[tuple[CacheEngineKey, int, int]]]:
        """Return which tier serves each (key, start, end) of the prefix that is held."""
        _, mapping = self._walk.batched_contains([key for key, _, _ in chunk_infos], None, False)
        infos = iter(chunk_infos)
        return {name: [next(infos) for _ in keys] for name, keys in mapping.items()}

    def batched_unpin(
        self,
        keys: Sequence[CacheEngineKey],
        locations: Collection[str] | None = None,
        owner: PinOwner | None = None,
    ) -> None:
        """Release one pin of each key that belongs to `owner` (owner-less ones without)."""
        keys = tuple(keys)
        check_keys(keys)
        self._walk.release_pins(keys, locations, owner)

    def release_lookup(self, owner: PinOwner) -> None:
        """Release every pin of a lookup id; one that holds none is a no-op."""
        self._walk.release_lookup(owner)

    def lookup_pins(self) -> dict[PinOwner, dict[str, list[CacheEngineKey]]]:
        """Return lookup id -> tier -> the keys it has pinned there now."""
        return self._walk.lookup_pins()

    # --- removing --------------------------------------------------------------------------------
    def remove(self, key: CacheEngineKey, locations: Collection[str] | None = None) -> int:
        """Remove `key` from all tiers, or from `locations`; returns the number of copies."""
        return self.batched_remove([key], locations)

    def batched_remove(
        self, keys: Sequence[CacheEngineKey], locations: Collection[str] | None = None
    ) -> int:
        """Remove keys from all tiers, or from `locations`; returns the number of copies."""
        keys = tuple(keys)
        check_keys(keys)
        return self._walk.remove(keys, locations)

    def clear(self, locations: Collection[str] | None = None) -> int:
        """Drop what nobody holds from the tiers that can; returns tokens."""
        return self._walk.clear(locations)

    # --- switches --------------------------------------------------------------------------------
    def set_hot_cache(self, enabled: bool) -> None:
        """Switch the hot cache; switched off, it forgets everything and takes nothing."""
        if self.local_cpu_backend is not None:
            self.local_cpu_backend.set_hot(enabled)

    def is_hot_cache_enabled(self) -> bool:
        """Whether the hot cache takes what is stored."""
        return self.local_cpu_backend is not None and self.local_cpu_backend.use_hot

    def set_freeze(self, enabled: bool) -> None:
        """While frozen only the CPU tier is searched."""
        self._tiers.is_frozen = enabled

    def is_frozen(self) -> bool:
        """Whether only the CPU tier is searched."""
        return self._tiers.is_frozen

    def set_backend_bypass(self, backend_name: str, bypassed: bool) -> None:
        """Skip a tier in every call, or use it again; ValueError for an unknown name."""
        self._tiers.set_bypass(backend_name, bypassed)

    def is_backend_bypassed(self, backend_name: str) -> bool:
        """Whether a tier is skipped."""
        return backend_name in self._tiers.bypassed

    def get_bypassed_backends(self) -> list[str]:
        """Return the names of skipped tiers."""
        return self._tiers.bypassed

    # --- the set of tiers ------------------------------------------------------------------------
    def get_all_backend_names(self) -> list[str]:
        """Return the names of all tiers, in search order."""
        return list(self.storage_backends)

    def get_active_storage_backends(
        self, location: str | None = None, search_range: Collection[str] | None = None
    ) -> Iterator[tuple[str, StorageBackendInterface]]:
        """Yield (name, backend) of the tiers that are searched now, in search order."""
        among = search_range if location is None else (location,)
        for tier in self._tiers.searched(among):
            yield tier.name, tier.backend

    def get_non_allocator_backends(self) -> list[str]:
        """Return the names of the tiers that use another tier's memory."""
        return [
            name
            for name, backend in self.storage_backends.items()
            if not isinstance(backend, AllocatorBackendInterface)
        ]

    def list_backends(self) -> dict[str, str]:
        """Return name -> class name, in search order."""
        return {name: type(backend).__name__ for name, backend in self.storage_backends.items()}

    def close_backend(self, backend_name: str) -> bool:
        """Close one tier below the CPU tier and forget it; False when there is none of that name.

        Raises:
            ValueError: The CPU tier, whose memory the others use.
        """
        backend = self.storage_backends.get(backend_name)
        if backend is None:
            return False
        if backend is self.allocator_backend:
            raise ValueError(f"{backend_name} owns the memory of the other tiers; use close()")
        page = self._tiers.tier(backend_name).page
        del self.storage_backends[backend_name]
        self._tiers.forget(backend_name)
        try:
            backend.close()
        finally:
            if page is not None:
                page.end(RemovalReason.CLEAR)
            if isinstance(backend, LocalDiskBackend):
                self._parts[3].retire(backend)
            self._adopt_backends()
        return True

    def create_backends(self) -> dict[str, str]:
        """Make the tiers of the config that are missing; returns name -> class name of all."""
        self.storage_backends = self._make_backends()  # at once: others serve meanwhile
        self._adopt_backends()
        return self.list_backends()

    def recreate_backend(self, backend_name: str) -> dict[str, str]:
        """Close one tier and make it anew; returns name -> class name of all."""
        self.close_backend(backend_name)
        return self.create_backends()

    def cancel_request(self, req_id: str) -> None:
        """Tell every tier to forget what was started for a request."""
        for tier in self._tiers.all():
            tier.backend.cancel_request(req_id)

    def drain(self) -> None:
        """Wait until every put admitted so far is on its tier's medium."""
        for tier in self._tiers.all():
            tier.backend.drain()

    def check_integrity(self) -> None:
        """Raise AssertionError naming every broken invariant."""
        pages = [tier.page for tier in self._tiers.all() if tier.page is not None]
        self._tiers.ledger.check_integrity(pages)
        for tier in (self.local_cpu_backend, self.local_disk_backend):
            if tier is not None:
                tier.check_integrity()

    def close(self) -> None:
        """Close every tier, end every event stream, stop the loop. Twice is a no-op.

        A stream tells of everything that left with the tiers, then CLOSED.
        """
        if self._is_closed:
            return
        self._is_closed = True
        for tier in reversed(self._tiers.all()):
            try:
                tier.backend.close()
            except Exception:  # one tier's fault must not keep the others open
                logger.exception("closing %s failed", tier.name)
        self._tiers.ledger.close()
        if self._event_loop is not None:
            self._event_loop.stop()
