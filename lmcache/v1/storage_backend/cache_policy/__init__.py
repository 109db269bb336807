"""Eviction policies by name."""

from typing import Any

from lmcache.v1.storage_backend.cache_policy.base_policy import BaseCachePolicy
from lmcache.v1.storage_backend.cache_policy.fifo import FIFOCachePolicy
from lmcache.v1.storage_backend.cache_policy.lfu import LFUCachePolicy
from lmcache.v1.storage_backend.cache_policy.lru import LRUCachePolicy
from lmcache.v1.storage_backend.cache_policy.mru import MRUCachePolicy

POLICIES: dict[str, type[BaseCachePolicy[Any]]] = {
    "LRU": LRUCachePolicy,
    "LFU": LFUCachePolicy,
    "FIFO": FIFOCachePolicy,
    "MRU": MRUCachePolicy,
}


def canonical_policy_name(policy_name: str) -> str:
    """Return the upper-case name of a policy; ValueError when there is none of that name."""
    name = policy_name.upper()
    if name not in POLICIES:
        raise ValueError(
            f"unknown cache policy {policy_name!r}; set LMCACHE_CACHE_POLICY to one of "
            + ", ".join(POLICIES)
        )
    return name


def honours_placement(policy_name: str) -> bool:
    """Whether cold puts and demotions move anything in the order of that canonical name."""
    return policy_name in ("LRU", "LFU")


def get_cache_policy(policy_name: str) -> BaseCachePolicy[Any]:
    """Return a new policy of that name, any case; ValueError when there is none."""
    return POLICIES[canonical_policy_name(policy_name)]()


__all__ = [
    "POLICIES",
    "BaseCachePolicy",
    "canonical_policy_name",
    "get_cache_policy",
    "honours_placement",
]
