"""A policy over the native order: what LRU, LFU, FIFO and MRU share."""

from collections.abc import Hashable, Mapping, MutableMapping
from typing import Any, ClassVar, Generic, TypeVar

from lmcache.v1.native import HandleOrder
from lmcache.v1.storage_backend.cache_policy.base_policy import BaseCachePolicy, Evictable

KeyType = TypeVar("KeyType", bound=Hashable)


class OrderedCachePolicy(BaseCachePolicy[KeyType], Generic[KeyType]):
    """Keys in the order in which they leave. Beyond the base contract, keys can be placed cold.

    Threads: guarded by the owner's lock.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        self._order = HandleOrder(self.name)
        self._handles: dict[KeyType, int] = {}
        self._keys: dict[int, KeyType] = {}

    def init_mutable_mapping(self) -> MutableMapping[KeyType, Any]:
        """Return a dict: the order is kept here, not in the mapping."""
        return {}

    def update_on_put(self, key: KeyType, cold: bool = False) -> None:
        """Take `key` into the order, at the cold end if `cold`; a known key is used again."""
        if key in self._handles:
            self.touch(key)
            return
        handle = self._order.insert(cold)
        self._handles[key] = handle
        self._keys[handle] = key

    def update_on_hit(self, key: KeyType, cache_dict: Mapping[KeyType, Any]) -> None:
        """Count a lookup's hit; an absent key is ignored."""
        if key in self._handles:
            self._order.hit(self._handles[key])

    def touch(self, key: KeyType) -> bool:
        """Count a use of a known key; whether the order moved (never under FIFO and MRU)."""
        moved: bool = self._order.use(self._handles[key])
        return moved

    def demote(self, key: KeyType) -> bool:
        """Make a known key the first to leave; whether the order moved."""
        moved: bool = self._order.demote(self._handles[key])
        return moved

    def update_on_force_evict(self, key: KeyType) -> None:
        """Take `key` out of the order; an absent key is ignored."""
        handle = self._handles.pop(key, None)
        if handle is not None:
            self._order.remove(handle)
            del self._keys[handle]

    def get_evict_candidates(
        self, cache_dict: Mapping[KeyType, Evictable], num_candidates: int = 1
    ) -> list[KeyType]:
        """Name up to `num_candidates` evictable keys, first victim first."""
        window = num_candidates
        while True:
            ahead = [self._keys[handle] for handle in self._order.first_victims(window)]
            free = [key for key in ahead if key in cache_dict and cache_dict[key].can_evict]
            if len(free) >= num_candidates or len(ahead) >= len(self._handles):
                return free[:num_candidates]
            window *= 2

    def check_integrity(self) -> None:
        """Raise AssertionError when keys and order disagree."""
        faults = self._order.check_integrity()
        if not len(self._handles) == len(self._keys) == len(self._order):
            faults.append("keys and handles differ in number")
        if faults:
            raise AssertionError("; ".join(faults))
