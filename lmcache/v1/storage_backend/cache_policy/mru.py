"""MRU: the key stored or looked up last leaves first; gets and touches move nothing."""

from collections.abc import Hashable
from typing import TypeVar

from lmcache.v1.storage_backend.cache_policy.ordered_policy import OrderedCachePolicy

KeyType = TypeVar("KeyType", bound=Hashable)


class MRUCachePolicy(OrderedCachePolicy[KeyType]):
    """The key stored or looked up last leaves first; gets and touches move nothing."""

    name = "MRU"
