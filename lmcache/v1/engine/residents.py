"""The chunks of a prompt that are stored already: found, kept while a store runs, refreshed."""

from collections.abc import Sequence
from typing import Protocol

from lmcache.v1.cache_key import CacheEngineKey
from lmcache.v1.memory_object import MemoryObj
from lmcache.v1.storage_backend.storage_manager import StorageManager


class Residents(Protocol):
    """Chunks that a store need not copy."""

    def hold_prefix(self, keys: Sequence[CacheEngineKey]) -> int:
        """Return the length of the resident prefix, which stays until `release`."""
        ...

    def hold(self, key: CacheEngineKey) -> bool:
        """Whether `key` is resident; if so it stays until `release`."""
        ...

    def release(self) -> None:
        """Let go of what is held."""
        ...


class HotResidents:
    """Residents of the hot cache, held by reference: a store must not evict its own prefix."""

    def __init__(self, storage_manager: StorageManager) -> None:
        self._storage_manager = storage_manager
        self._held: list[MemoryObj] = []

    def hold_prefix(self, keys: Sequence[CacheEngineKey]) -> int:
        """See `Residents`."""
        held = self._storage_manager.hold_hot_prefix(keys)
        self._held += held
        return len(held)

    def hold(self, key: CacheEngineKey) -> bool:
        """See `Residents`."""
        return self.hold_prefix((key,)) == 1

    def release(self) -> None:
        """See `Residents`."""
        for memory_obj in self._held:
            memory_obj.ref_count_down()
        self._held = []


class TierResidents:
    """Residents of another tier, which holds none of the memory that a store needs."""

    def __init__(self, storage_manager: StorageManager, tier: str) -> None:
        self._storage_manager = storage_manager
        self._tier = (tier,)

    def hold_prefix(self, keys: Sequence[CacheEngineKey]) -> int:
        """See `Residents`."""
        return self._storage_manager.batched_contains(keys, self._tier)[0]

    def hold(self, key: CacheEngineKey) -> bool:
        """See `Residents`."""
        return self._storage_manager.contains(key, self._tier) is not None

    def release(self) -> None:
        """See `Residents`."""
