"""Moving keys in a policy's order where a caller keeps the mapping: no hot cache is behind it."""

from collections.abc import Mapping, Sequence
from typing import Any

from lmcache.v1.cache_key import CacheEngineKey
from lmcache.v1.storage_backend.abstract_backend import Motion
from lmcache.v1.storage_backend.cache_policy.base_policy import BaseCachePolicy
from lmcache.v1.storage_backend.cache_policy.ordered_policy import OrderedCachePolicy

_MOVED, _RESIDENT = 1, 2  # answers of `move_in_order`


def move_by_policy(
    policy: BaseCachePolicy[CacheEngineKey],
    mapping: Mapping[CacheEngineKey, Any],
    keys: Sequence[CacheEngineKey],
    motion: Motion,
) -> bytes:
    """As `move_in_order`, for a mapping and a policy that a caller keeps without a hot cache."""
    answers = bytearray(len(keys))
    positions = range(len(keys))
    for position in positions if motion is Motion.DEMOTE else reversed(positions):
        if keys[position] in mapping:
            has_moved = _move_one(policy, mapping, keys[position], motion)
            answers[position] = _MOVED if has_moved else _RESIDENT
    return bytes(answers)


def _move_one(
    policy: BaseCachePolicy[CacheEngineKey],
    mapping: Mapping[CacheEngineKey, Any],
    key: CacheEngineKey,
    motion: Motion,
) -> bool:
    if isinstance(policy, OrderedCachePolicy) and motion is not Motion.HIT:
        return policy.touch(key) if motion is Motion.USE else policy.demote(key)
    if motion is Motion.DEMOTE:
        return False
    policy.update_on_hit(key, mapping)
    return True
