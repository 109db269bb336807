"""The one pool of a run: KV behind the engine, state images beside it, as a serving engine does."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.replay.connector import bytes_of
from benchmarks.replay.content import fill, is_intact
from benchmarks.replay.kv_service import KVService, LoadOutcome
from benchmarks.replay.settings import Settings
from lmcache.v1.cache_key import CacheEngineKey
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.storage_backend.local_cpu_backend import NAME as CPU_TIER
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.placement import Placement
from lmcache.v1.storage_backend.touch import TouchResult


class ReplayPool:
    """State images in the storage manager of a `KVService`. One thread uses it.

    Args:
        settings, disk_dir: See `KVService`.

    Attributes:
        kv: The KV side, which owns the pool.
        manager: Its storage manager.
    """

    def __init__(self, settings: Settings, disk_dir: Path | None = None) -> None:
        self._settings = settings
        self.kv = KVService(settings, disk_dir)
        self.manager = self.kv.manager

    def close(self) -> None:
        """Close the engine, which gives the pool's memory back. Twice is a no-op."""
        self.kv.close()

    @property
    def _cpu(self) -> LocalCPUBackend:
        backend = self.manager.local_cpu_backend
        assert backend is not None, "the replay's manager always has a CPU pool"
        return backend

    @property
    def newest_event(self) -> int:
        """Number of the newest event."""
        return self.manager.touch(()).seq

    def tier_of(self, key: CacheEngineKey) -> str | None:
        """Return the name of the first tier that holds the key, or None; moves nothing."""
        return self.manager.contains(key)

    @contextlib.contextmanager
    def kept(self, key: CacheEngineKey) -> Iterator[None]:
        """Keep the pool's copy of an image, if there is one, from being evicted; moves nothing."""
        memory_object = self._cpu.peek(key)
        try:
            yield
        finally:
            if memory_object is not None:
                memory_object.ref_count_down()

    def load_image(self, key: CacheEngineKey, *, is_use: bool) -> LoadOutcome:
        """Read a state image and compare its bytes; one that is on disk only is back in the pool.

        With `is_use` False a hit in the pool moves nothing and one on disk is a use there, as in
        upstream's get.
        """
        num_failed = self.kv.num_failed_allocations
        moves = is_use or self.tier_of(key) != CPU_TIER
        memory_object = self.manager.get(key) if moves else self._cpu.peek(key)
        if memory_object is None:
            has_room = self.kv.num_failed_allocations == num_failed
            return LoadOutcome.MISSING if has_room else LoadOutcome.NO_ROOM
        is_good = is_intact(bytes_of(memory_object), _hash_of(key), self._settings.image_bytes)
        memory_object.ref_count_down()
        return LoadOutcome.LOADED if is_good else LoadOutcome.WRONG_BYTES

    def touch(self, key: CacheEngineKey) -> TouchResult:
        """Count a use of the key and say what is known of it."""
        return self.manager.touch((key,))

    def has_spare_room(self) -> bool:
        """Return whether an image fits with nothing evicted."""
        return self.manager.would_admit(self._settings.image_bytes, Placement.SPARE)

    def store_image(self, key: CacheEngineKey, placement: Placement) -> bool:
        """Store one image; SPARE takes free space only. Returns whether the pool had room."""
        memory_object = self._allocated(key, eviction=placement is not Placement.SPARE)
        if memory_object is None:
            return False
        self.manager.batched_put([key], [memory_object], placement=placement)
        self.manager.drain()  # see KVService
        return True

    def _allocated(self, key: CacheEngineKey, *, eviction: bool) -> MemoryObj | None:
        memory_object = self.manager.allocate(
            torch.Size([self._settings.image_bytes]),
            torch.uint8,
            fmt=MemoryFormat.KV_2LTD,
            eviction=eviction,
            busy_loop=False,
        )
        if memory_object is not None:
            fill(bytes_of(memory_object), _hash_of(key))
        return memory_object


def _hash_of(key: CacheEngineKey) -> int:
    value = key.chunk_hash
    assert isinstance(value, int), "the replay's images are named by integers"
    return value
