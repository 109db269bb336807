"""LRU: the least recently used key leaves first."""

from collections.abc import Hashable
from typing import TypeVar

from lmcache.v1.storage_backend.cache_policy.ordered_policy import OrderedCachePolicy

KeyType = TypeVar("KeyType", bound=Hashable)


class LRUCachePolicy(OrderedCachePolicy[KeyType]):
    """The least recently used key leaves first."""

    name = "LRU"
