"""The one pool of a run: KV behind the engine, state images beside it, as a serving engine does."""

from collections.abc import Sequence

import torch

from benchmarks.replay.connector import bytes_of
from benchmarks.replay.content import fill, is_intact
from benchmarks.replay.kv_service import KVService, LoadOutcome
from benchmarks.replay.settings import Settings
from lmcache.v1.cache_key import CacheEngineKey
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.storage_backend.placement import Placement
from lmcache.v1.storage_backend.touch import TouchVerdict


class ReplayPool:
    """State images in the storage manager of a `KVService`. One thread uses it.

    Attributes:
        kv: The KV side, which owns the pool.
        manager: Its storage manager.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.kv = KVService(settings)
        self.manager = self.kv.manager

    def close(self) -> None:
        """Close the engine, which gives the pool's memory back. Twice is a no-op."""
        self.kv.close()

    def is_resident(self, key: CacheEngineKey) -> bool:
        """Return whether the pool holds the key; moves nothing."""
        return self.manager.contains(key) is not None

    def load_image(self, key: CacheEngineKey, *, is_use: bool) -> LoadOutcome:
        """Read a state image and compare its bytes.

        With `is_use` False nothing is moved, as upstream's get moves nothing.
        """
        backend = self.manager.local_cpu_backend
        assert backend is not None, "the replay's manager always has a CPU pool"
        memory_object = self.manager.get(key) if is_use else backend.peek(key)
        if memory_object is None:
            return LoadOutcome.MISSING
        is_good = is_intact(bytes_of(memory_object), _hash_of(key), self._settings.image_bytes)
        memory_object.ref_count_down()
        return LoadOutcome.LOADED if is_good else LoadOutcome.WRONG_BYTES

    def touch(self, keys: Sequence[CacheEngineKey]) -> list[TouchVerdict]:
        """Refresh keys, given head first; one verdict for each."""
        return list(self.manager.touch(keys))

    def has_spare_room(self) -> bool:
        """Return whether an image fits with nothing evicted."""
        return self.manager.would_admit(self._settings.image_bytes, Placement.SPARE)

    def store_image(self, key: CacheEngineKey, placement: Placement) -> bool:
        """Store one image; SPARE takes free space only. Returns whether there was room."""
        memory_object = self._allocated(key, eviction=placement is not Placement.SPARE)
        if memory_object is None:
            return False
        self.manager.batched_put([key], [memory_object], placement=placement)
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
