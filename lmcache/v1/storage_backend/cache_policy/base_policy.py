"""The contract of eviction policies: an order over keys that live in somebody else's mapping."""

import abc
from collections.abc import Hashable, Mapping, MutableMapping
from typing import Any, Generic, Protocol, TypeVar

KeyType = TypeVar("KeyType", bound=Hashable)


class Evictable(Protocol):
    """A value that says whether it may be evicted now."""

    @property
    def can_evict(self) -> bool:
        """Whether nobody but the cache refers to it."""
        ...


class BaseCachePolicy(abc.ABC, Generic[KeyType]):
    """Orders the keys of one mapping. All calls are made under the owner's lock."""

    @abc.abstractmethod
    def init_mutable_mapping(self) -> MutableMapping[KeyType, Any]:
        """Return an empty mapping for the owner to keep its values in."""

    @abc.abstractmethod
    def update_on_hit(self, key: KeyType, cache_dict: Mapping[KeyType, Any]) -> None:
        """Count a use of `key`; an absent key is ignored."""

    @abc.abstractmethod
    def update_on_put(self, key: KeyType) -> None:
        """Take `key` into the order, as a new key or as one used again."""

    @abc.abstractmethod
    def update_on_force_evict(self, key: KeyType) -> None:
        """Take `key` out of the order; an absent key is ignored."""

    @abc.abstractmethod
    def get_evict_candidates(
        self, cache_dict: Mapping[KeyType, Evictable], num_candidates: int = 1
    ) -> list[KeyType]:
        """Name up to `num_candidates` keys to evict, first victim first, and forget none of them.

        Keys whose value cannot be evicted now are skipped.
        """
