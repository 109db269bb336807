"""FIFO: the key stored first leaves first; using a key moves nothing."""

from collections.abc import Hashable
from typing import TypeVar

from lmcache.v1.storage_backend.cache_policy.ordered_policy import OrderedCachePolicy

KeyType = TypeVar("KeyType", bound=Hashable)


class FIFOCachePolicy(OrderedCachePolicy[KeyType]):
    """The key stored first leaves first; using a key moves nothing."""

    name = "FIFO"
