"""Calls of 0.5.6's engine whose features this fork leaves to upstream."""

from typing import Any, NoReturn

from lmcache.v1.errors import UnsupportedFeatureError


def _refuse(call: str, feature: str) -> NoReturn:
    raise UnsupportedFeatureError(
        f"LMCacheEngine.{call} belongs to {feature}, which this fork does not have; use upstream "
        "LMCache for it"
    )


class UnsupportedCalls:
    """Each one says what it belongs to.

    Raises:
        UnsupportedFeatureError: Always, from every method.
    """

    def store_layer(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        _refuse("store_layer", "layerwise mode")

    def retrieve_layer(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        _refuse("retrieve_layer", "layerwise mode")

    def async_lookup_and_prefetch(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        _refuse("async_lookup_and_prefetch", "async loading")

    def cleanup_memory_objs(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        _refuse("cleanup_memory_objs", "async loading")

    def move(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        _refuse("move", "P2P")

    def compress(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        _refuse("compress", "the cachegen serializer")

    def decompress(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        _refuse("decompress", "the cachegen serializer")
