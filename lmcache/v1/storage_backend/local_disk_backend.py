"""Tier 1: chunk files in a directory of our own, evicted by policy when the budget is full."""

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lmcache.logging import init_logger
from lmcache.v1.cache_key import CacheEngineKey
from lmcache.v1.gauges import DiskTierGauges
from lmcache.v1.memory_object import MemoryObj, release_all
from lmcache.v1.native import ChunkFiles, HotIndex, check_pairs
from lmcache.v1.pin_monitor import PinMonitor
from lmcache.v1.pin_table import PinTable
from lmcache.v1.storage_backend.abstract_backend import (
    AllocatorBackendInterface,
    Motion,
    PutCallback,
)
from lmcache.v1.storage_backend.cache_events import RemovalReason
from lmcache.v1.storage_backend.cache_policy import canonical_policy_name
from lmcache.v1.storage_backend.disk.chunk_directory import ChunkDirectory
from lmcache.v1.storage_backend.disk.disk_chunk import DiskChunk, chunk_of, has_contents_of
from lmcache.v1.storage_backend.disk.disk_index import DiskIndex
from lmcache.v1.storage_backend.disk.disk_reader import DiskReader
from lmcache.v1.storage_backend.disk.disk_settings import read_disk_settings
from lmcache.v1.storage_backend.disk.disk_view import DiskView
from lmcache.v1.storage_backend.disk.disk_writer import DiskWriter
from lmcache.v1.storage_backend.disk.faults import FaultLog
from lmcache.v1.storage_backend.disk.serials import Serials
from lmcache.v1.storage_backend.disk.steps import Dropped, Wanted
from lmcache.v1.storage_backend.hot_cache import HotCachePolicy
from lmcache.v1.storage_backend.indexed_tier import IndexedTier
from lmcache.v1.storage_backend.placement import Placement
from lmcache.v1.storage_backend.residency_ledger import ResidencyLedger, TierLedger
from lmcache.v1.storage_backend.tier_answers import whole_prefix

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

logger = init_logger(__name__)

NAME = "LocalDiskBackend"
_CLOSE_SECONDS = 10.0
# What chunks in flight may keep from being evicted: half the CPU pool, and never more than a disk
# writes in a second or two.
_IN_FLIGHT_SHARE = 0.5
_MAX_IN_FLIGHT_BYTES = 4 * 2**30
_DROPPED = {
    Dropped.QUEUE_FULL: "the disk is slower than the puts, and what is in flight keeps as much of "
    "the CPU pool as it may",
    Dropped.NO_ROOM: "it does not fit max_local_disk_size beside what is pinned or being read",
}


class LocalDiskBackend(IndexedTier):
    """The disk tier of one worker.

        state   meaning                                               who may leave it
        open    puts are written, gets are read                       close
        closed  nothing is listed; the files wait for the next owner  nobody

    A put is resident from its admission and written in the background; until then it is served from
    the object it was made of. Every fault of the disk costs a miss, one log line a kind, a count.

    Args:
        config: Directories, budget, policy, pin time-out; `extra_config` "use_odirect" (false) and
            "disk_io_threads" (4).
        loop: Accepted for callers of 0.5.6.
        local_cpu_backend: Whose memory is read into and written from.
        dst_device: See `StorageBackendInterface`.
        lmcache_worker: Accepted for callers of 0.5.6; there is no controller.
        metadata: Names the model, world and rank whose directory it is.

    Attributes:
        path: The directory, which no other process uses meanwhile.
        dict: Read-only view, key to metadata, coldest first.
        disk_lock: The tier's lock; not re-entrant, never held over I/O.
        cache_policy: `update_on_hit(key, dict)` moves a key in the order.
        max_cache_size: The budget in bytes of files.

    Raises:
        ConfigError: A setting that cannot be used, or a directory that cannot be written.

    Threads: safe from any thread.
    """

    def __init__(
        self,
        config: "LMCacheEngineConfig",
        loop: asyncio.AbstractEventLoop | None,
        local_cpu_backend: "LocalCPUBackend",
        dst_device: str = "cpu",
        lmcache_worker: object = None,
        metadata: "LMCacheMetadata | None" = None,
    ) -> None:
        super().__init__(dst_device)
        settings = read_disk_settings(config, metadata)
        policy_name = canonical_policy_name(config.cache_policy)
        self.local_cpu_backend = local_cpu_backend
        self.max_cache_size = settings.capacity_bytes
        directory = ChunkDirectory.claim(
            settings.root, settings.model_name, settings.world_size, settings.rank
        )
        self.path = str(directory.path)
        pool_bytes = local_cpu_backend.gauges().capacity_bytes
        self._index = index = DiskIndex(
            settings.capacity_bytes,
            min(int(pool_bytes * _IN_FLIGHT_SHARE), _MAX_IN_FLIGHT_BYTES),
            policy_name,
            ResidencyLedger().register_tier(NAME),
        )
        self.disk_lock = self.order_lock = index.lock
        self.cache_policy = HotCachePolicy(index.index, policy_name)
        self.dict = DiskView(index.index, self.path)
        self.pins = PinTable(config.pin_timeout_sec)
        PinMonitor.GetOrCreate().watch(self.pins, config.pin_check_interval_sec)
        files = ChunkFiles(directory.directory_fd, settings.is_direct, settings.num_threads)
        self._faults = FaultLog(self.path)
        self._reader = DiskReader(index, files, self._faults, pool_bytes)
        self._serials = Serials()
        self._told_dropped: set[Dropped] = set()
        self._is_closed = False
        logger.info("disk tier: %s in %s, policy %s", settings, self.path, policy_name)
        self._writer = DiskWriter(index, directory, files, self._faults, self._serials)

    @property
    def current_cache_size(self) -> int:
        """Bytes of the budget that are taken."""
        return self._index.used_bytes

    @property
    def residents(self) -> HotIndex:
        """See `IndexedTier`."""
        return self._index.index

    # --- touch and events ------------------------------------------------------------------------
    def attach_ledger(self, page: TierLedger) -> None:
        """Report residency to `page` from now on."""
        self._index.attach_ledger(page)

    def move_in_order(self, keys: Sequence[CacheEngineKey], motion: Motion) -> bytes:
        """See `StorageBackendInterface`; the caller holds `disk_lock`."""
        return self.cache_policy.move(keys, motion)

    # --- storing ---------------------------------------------------------------------------------
    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        """Whether a put of `key` is not on disk yet; it is resident all the same."""
        return self._index.is_in_flight(key)

    def batched_submit_placed_put(
        self,
        keys: Sequence[CacheEngineKey],
        objs: Sequence[MemoryObj],
        placement: Placement,
        transfer_spec: Any = None,
        on_complete_callback: PutCallback | None = None,
    ) -> None:
        """List objects and write them in the background, each kept by a reference until then.

        An object without bytes is left out. A resident key of the same contents is used again (a
        cold put moves nothing). The batch ends at the first object that is not taken: too much is
        in flight, or nothing can be evicted for it. Never waits. The callback runs once per key
        that is on disk, on any thread, under no lock.

        Raises:
            TypeError: A key or object that is none.
            ValueError: An object that is not in host memory or was released, or unequal numbers.
        """
        index = self._index
        check_pairs(list(keys), list(objs))
        pairs = [pair for pair in zip(keys, objs, strict=True) if pair[1].get_size() > 0]
        wanted = []
        for key, obj in reversed(pairs):  # the head gets the last number: youngest after a restart
            if not obj.is_on_host:
                raise ValueError(f"{key}: the disk tier stores objects in host memory only")
            resident: DiskChunk | None = self.residents.peek(key)
            is_known = resident is not None and has_contents_of(resident, obj)
            chunk = None if is_known else chunk_of(index.pool, key, obj, self._serials.next())
            wanted.append(Wanted(key, obj, chunk))
        wanted.reverse()
        after = index.admit(wanted, placement, on_complete_callback)
        if after.dropped is not None:
            self._tell_dropped(after.dropped)
        after.settle()

    def _tell_dropped(self, why: Dropped) -> None:
        if why not in self._told_dropped:
            self._told_dropped.add(why)
            logger.warning(
                "%s: a put was not taken: %s; logged once, counted in the metrics",
                self.path,
                _DROPPED[why],
            )

    # --- reading ---------------------------------------------------------------------------------
    def get_blocking(self, key: CacheEngineKey) -> MemoryObj | None:
        """Return the object with a reference for the caller, or None; a use."""
        return self.batched_get_blocking([key])[0]

    def batched_get_into(
        self, keys: Sequence[CacheEngineKey], into: list[MemoryObj | None]
    ) -> None:
        """Append one object or None per key; one use each, head youngest.

        Files are read together, without the interpreter's lock. Where the CPU pool has no room, the
        rest counts as missed.
        """
        chunks: list[DiskChunk | None] = []
        served: list[MemoryObj | None] = []
        read: list[MemoryObj | None] = []
        try:
            self._index.get_many(tuple(keys), chunks, served)
            to_read = [c for c, obj in zip(chunks, served, strict=True) if c and obj is None]
            if to_read:
                self._reader.read(to_read, self.local_cpu_backend, read)
            answers = iter(read)
            found = [
                next(answers) if chunk and obj is None else obj
                for chunk, obj in zip(chunks, served, strict=True)
            ]
        except BaseException:  # nobody else knows of them
            release_all(served)
            release_all(read)
            raise
        finally:
            release_all(chunks)
        into += found

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: list[CacheEngineKey], transfer_spec: Any = None
    ) -> list[MemoryObj]:
        """Return the objects of the prefix that could be read; the event loop is not held up."""
        return whole_prefix(await asyncio.to_thread(self.batched_get_blocking, keys))

    # --- removing --------------------------------------------------------------------------------
    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        """Remove `key`; False when absent. Its file goes in the background.

        With force=False the caller holds `disk_lock` and the reason is CAPACITY.
        """
        if not force:
            return self._index.remove_locked(key)
        return self._index.remove((key,), RemovalReason.EXPLICIT) == 1

    def batched_remove(self, keys: Sequence[CacheEngineKey], force: bool = True) -> int:
        """Remove keys; returns how many were there."""
        if not force:
            return sum(self.remove(key, force) for key in keys)
        return self._index.remove(tuple(keys), RemovalReason.EXPLICIT)

    def clear(self) -> int:
        """Remove what nobody holds, and what an earlier run left; returns tokens."""
        return self._index.clear()

    # --- the rest --------------------------------------------------------------------------------
    def get_allocator_backend(self) -> AllocatorBackendInterface:
        """Return the CPU tier."""
        return self.local_cpu_backend

    def drain(self) -> None:
        """Wait until every put so far is on disk, and what an earlier run left is listed.

        Raises:
            RuntimeError: Called from a put's callback, for which it would wait.
        """
        if self._writer.is_current:
            raise RuntimeError("drain() cannot be called from on_complete_callback")
        self._index.drain()

    def gauges(self) -> DiskTierGauges:
        """Return what the tier counts and holds now."""
        return dataclasses.replace(
            self._index.gauges(),
            num_pins=self.pins.num_pins,
            forced_releases=self.pins.num_forced_releases,
            unmatched_releases=self.pins.num_unmatched_releases,
            failed_reads=self._faults.num_failed_reads,
            bad_files=self._faults.num_bad_files,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError naming every broken invariant."""
        self._index.check_integrity()
        self.pins.check_integrity()

    def close(self) -> None:
        """Write what is in flight, within a bound, and give the directory up; its files stay."""
        if self._is_closed:
            return
        self._is_closed = True
        self._index.begin_close()
        if not self._writer.join(_CLOSE_SECONDS):
            logger.warning(
                "%s: the disk did not take what was in flight within %s s; the rest is dropped",
                self.path,
                _CLOSE_SECONDS,
            )
        self._index.end()
