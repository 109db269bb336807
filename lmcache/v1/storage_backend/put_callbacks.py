"""Calling back whoever put a key."""

from lmcache.logging import init_logger
from lmcache.v1.cache_key import CacheEngineKey
from lmcache.v1.storage_backend.abstract_backend import PutCallback

logger = init_logger(__name__)


def call_back(
    callback: PutCallback, key: CacheEngineKey, caught: type[BaseException] = Exception
) -> None:
    """Call `callback(key)`; what it raises is logged: it must not undo a put."""
    try:
        callback(key)
    except caught:
        logger.exception("on_complete_callback raised for %s", key)
