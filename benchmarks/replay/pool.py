"""The real pool as a serving engine uses it: a StorageManager with bytes filled and checked."""

import enum
from collections.abc import Sequence

import torch

from benchmarks.replay.content import Kind, chunk_hash, fill, is_intact
from benchmarks.replay.settings import TOKENS_PER_BLOCK, Settings
from lmcache.v1.cache_key import CacheEngineKey, KeyFactory
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.event_manager import EventManager
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.placement import Placement
from lmcache.v1.storage_backend.storage_manager import StorageManager
from lmcache.v1.storage_backend.touch import TouchVerdict

TIER = "LocalCPUBackend"
MODEL_NAME = "replay"


class LoadOutcome(enum.Enum):
    """How reading objects back went."""

    LOADED = "loaded"
    MISSING = "missing"
    WRONG_BYTES = "wrong_bytes"


class ReplayPool:
    """One StorageManager with a CPU pool and nothing below it. One thread uses it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.manager = StorageManager(_config(settings), _metadata(settings), EventManager())
        self._keys = KeyFactory(MODEL_NAME, 1, 0, torch.uint8)
        self._pinned: list[CacheEngineKey] = []

    def close(self) -> None:
        """Give the pool's memory back."""
        self.manager.close()

    def kv_keys(self, prefix_ids: Sequence[int]) -> list[CacheEngineKey]:
        """Return the keys of a prompt's KV blocks, head first."""
        return self._keys.make_many([chunk_hash(Kind.KV, prefix_id) for prefix_id in prefix_ids])

    def image_key(self, image: int) -> CacheEngineKey:
        """Return the key of the state image at the boundary of a prefix."""
        return self._keys.make(chunk_hash(Kind.IMAGE, image))

    # ---- lookup and load ------------------------------------------------------------------------

    def match_kv(self, keys: Sequence[CacheEngineKey]) -> int:
        """Return how many leading blocks are resident; refreshed, pinned till `release_match`."""
        num_matched, by_tier = self.manager.batched_contains(keys, pin=True)
        self.manager.touch_cache()
        self._pinned = [key for tier_keys in by_tier.values() for key in tier_keys]
        return num_matched

    def release_match(self) -> None:
        """Unpin what the last lookup pinned."""
        if self._pinned:
            self.manager.batched_unpin(self._pinned)
            self._pinned = []

    def is_resident(self, key: CacheEngineKey) -> bool:
        """Return whether the pool holds the key; moves nothing."""
        return self.manager.contains(key) is not None

    def load_kv(self, keys: Sequence[CacheEngineKey]) -> LoadOutcome:
        """Read KV blocks and compare their bytes; a use of each, head youngest."""
        objects = self.manager.batched_get(keys, location=TIER)
        outcomes = [
            self._checked(key, memory_object, self._settings.block_bytes)
            for key, memory_object in zip(keys, objects, strict=True)
        ]
        for bad in (LoadOutcome.MISSING, LoadOutcome.WRONG_BYTES):
            if bad in outcomes:
                return bad
        return LoadOutcome.LOADED

    def load_image(self, key: CacheEngineKey, *, is_use: bool) -> LoadOutcome:
        """Read a state image and compare its bytes.

        With `is_use` False nothing is moved, as upstream's get moves nothing.
        """
        backend = self.manager.local_cpu_backend
        assert backend is not None, "the replay's manager always has a CPU pool"
        memory_object = self.manager.get(key) if is_use else backend.peek(key)
        return self._checked(key, memory_object, self._settings.image_bytes)

    # ---- touch and store ------------------------------------------------------------------------

    def touch(self, keys: Sequence[CacheEngineKey]) -> list[TouchVerdict]:
        """Refresh keys, given head first; one verdict for each."""
        return list(self.manager.touch(keys))

    def store_kv(self, keys: Sequence[CacheEngineKey]) -> int:
        """Store KV blocks in one batch, evicting for room; returns how many found it."""
        objects: list[MemoryObj] = []
        for key in keys:
            memory_object = self._allocated(key, self._settings.block_bytes, eviction=True)
            if memory_object is None:
                break
            objects.append(memory_object)
        if objects:
            self.manager.batched_put(list(keys[: len(objects)]), objects, placement=Placement.YOUNG)
        return len(objects)

    def has_spare_room(self) -> bool:
        """Return whether an image fits with nothing evicted."""
        return self.manager.would_admit(self._settings.image_bytes, Placement.SPARE)

    def store_image(self, key: CacheEngineKey, placement: Placement) -> bool:
        """Store one image; SPARE takes free space only. Returns whether there was room."""
        is_spare = placement is Placement.SPARE
        memory_object = self._allocated(key, self._settings.image_bytes, eviction=not is_spare)
        if memory_object is None:
            return False
        self.manager.batched_put([key], [memory_object], placement=placement)
        return True

    def _allocated(
        self, key: CacheEngineKey, num_bytes: int, *, eviction: bool
    ) -> MemoryObj | None:
        memory_object = self.manager.allocate(
            torch.Size([num_bytes]),
            torch.uint8,
            fmt=MemoryFormat.KV_2LTD,
            eviction=eviction,
            busy_loop=False,
        )
        if memory_object is None:
            return None
        assert memory_object.tensor is not None, "a fresh object has its memory"
        fill(memory_object.tensor, _hash_of(key))
        return memory_object

    def _checked(
        self, key: CacheEngineKey, memory_object: MemoryObj | None, num_bytes: int
    ) -> LoadOutcome:
        if memory_object is None:
            return LoadOutcome.MISSING
        tensor = memory_object.tensor
        is_good = tensor is not None and is_intact(tensor, _hash_of(key), num_bytes)
        memory_object.ref_count_down()
        return LoadOutcome.LOADED if is_good else LoadOutcome.WRONG_BYTES


def _hash_of(key: CacheEngineKey) -> int:
    value = key.chunk_hash
    assert isinstance(value, int), "the replay's keys are made from integers"
    return value


def _config(settings: Settings) -> LMCacheEngineConfig:
    return LMCacheEngineConfig.from_defaults(
        chunk_size=TOKENS_PER_BLOCK,
        local_cpu=True,
        max_local_cpu_size=settings.pool_bytes / 2**30,
        cache_policy=settings.policy,
    )


def _metadata(settings: Settings) -> LMCacheMetadata:
    return LMCacheMetadata(
        model_name=MODEL_NAME,
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.uint8,
        kv_shape=(1, 1, TOKENS_PER_BLOCK, 1, settings.block_bytes // TOKENS_PER_BLOCK),
        use_mla=True,
        chunk_size=TOKENS_PER_BLOCK,
    )
