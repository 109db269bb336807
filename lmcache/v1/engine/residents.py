"""The chunks of a prompt that are stored already: found, kept while a store runs, refreshed."""

from collections.abc import Sequence
from typing import Protocol

from lmcache.v1.cache_key import CacheEngineKey
from lmcache.v1.memory_object import MemoryObj, release_all
from lmcache.v1.storage_backend.storage_manager import StorageManager


class Residents(Protocol):
    """Chunks that a store need not copy."""

    def hold_prefix(self, keys: Sequence[CacheEngineKey], sizes: Sequence[int]) -> int:
        """Return the length of the resident prefix, which stays until `release`.

        Args:
            keys: Head of the prefix first.
            sizes: Bytes of each; what has another size is no resident.
        """
        ...

    @property
    def held_bytes(self) -> int:
        """Bytes of the pool that cannot be evicted before `release`."""
        ...

    def release(self) -> None:
        """Let go of what is held."""
        ...


class HotResidents:
    """Residents of the hot cache, held by reference: a store must not evict its own prefix."""

    def __init__(self, storage_manager: StorageManager) -> None:
        self._storage_manager = storage_manager
        self._held: list[MemoryObj] = []

    def hold_prefix(self, keys: Sequence[CacheEngineKey], sizes: Sequence[int]) -> int:
        """See `Residents`."""
        before = len(self._held)
        self._storage_manager.hold_hot_prefix(keys, self._held)
        for index in range(before, len(self._held)):
            if self._held[index].get_size() != sizes[index - before]:
                misfits = self._held[index:]
                del self._held[index:]
                release_all(misfits)
                break
        return len(self._held) - before

    @property
    def held_bytes(self) -> int:
        """See `Residents`."""
        return sum(memory_obj.get_physical_size() for memory_obj in self._held)

    def release(self) -> None:
        """See `Residents`."""
        release_all(self._held)


class TierResidents:
    """Residents of another tier, which holds none of the memory that a store needs."""

    def __init__(self, storage_manager: StorageManager, tier: str) -> None:
        self._storage_manager = storage_manager
        self._tier = (tier,)

    held_bytes = 0

    def hold_prefix(self, keys: Sequence[CacheEngineKey], sizes: Sequence[int]) -> int:
        """See `Residents`; a tier below does not tell sizes."""
        return self._storage_manager.batched_contains(keys, self._tier)[0]

    def release(self) -> None:
        """See `Residents`."""
