"""LFU: the key with the fewest uses leaves first; among equals, the one that has them longest."""

from collections.abc import Hashable
from typing import TypeVar

from lmcache.v1.storage_backend.cache_policy.ordered_policy import OrderedCachePolicy

KeyType = TypeVar("KeyType", bound=Hashable)


class LFUCachePolicy(OrderedCachePolicy[KeyType]):
    """The key with the fewest uses leaves first; among equals, the one that has them longest."""

    name = "LFU"
