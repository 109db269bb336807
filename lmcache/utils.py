"""Small helpers that callers import from here, and the keys."""

from enum import Enum
from typing import Any

import torch

from lmcache import __version__
from lmcache.logging import init_logger
from lmcache.v1.cache_key import CacheEngineKey, LayerCacheEngineKey, parse_cache_key
from lmcache.v1.disk_cache_metadata import DiskCacheMetadata
from lmcache.v1.event_loop import start_loop_in_thread_with_exceptions
from lmcache.v1.kv_events import CacheRemoveEvent, CacheStoreEvent

__all__ = [
    "CacheEngineKey",
    "CacheRemoveEvent",
    "CacheStoreEvent",
    "DiskCacheMetadata",
    "EngineType",
    "LayerCacheEngineKey",
    "cdiv",
    "convert_tokens_to_list",
    "get_version",
    "init_logger",
    "mock_up_broadcast_fn",
    "mock_up_broadcast_object_fn",
    "parse_cache_key",
    "round_down",
    "round_up",
    "start_loop_in_thread_with_exceptions",
]

# A release is named by its version alone; upstream's form has a commit after it.
_NO_COMMIT = "NA"


class EngineType(Enum):
    """The serving engines that name themselves to the cache."""

    VLLM = "vllm"
    ATOM = "atom"
    SGLANG = "sglang"
    TRTLLM = "trtllm"
    MOCK = "mock"


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(a // -b)


def round_down(x: int, y: int) -> int:
    """Return the largest multiple of `y` that is not above `x`."""
    return x - x % y


def round_up(x: int, y: int) -> int:
    """Return the smallest multiple of `y` that is not below `x`."""
    return cdiv(x, y) * y


def get_version() -> str:
    """Return "<version>-<commit>", "NA" for a commit that is not known."""
    return f"{__version__}-{_NO_COMMIT}"


def convert_tokens_to_list(
    tokens: torch.Tensor | list[int] | None, token_start: int, token_end: int
) -> list[int]:
    """Return the ids at positions `token_start` to `token_end`, both included; none for None."""
    if tokens is None:
        return []
    chosen = tokens[token_start : token_end + 1]
    if isinstance(chosen, torch.Tensor):
        ids: list[int] = chosen.tolist()
        return ids
    return chosen


def mock_up_broadcast_fn(t: torch.Tensor, i: int) -> None:
    """Stand in for a broadcast among ranks where none may happen.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError("This engine was built without a broadcast among ranks")


def mock_up_broadcast_object_fn(a: Any, i: int) -> None:
    """Stand in for a broadcast of an object among ranks where none may happen.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError("This engine was built without a broadcast among ranks")
