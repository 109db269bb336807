"""Calls of 0.5.6's engine whose features this fork leaves to upstream."""

from typing import Any, NoReturn

from lmcache.v1.errors import refuse_call


class UnsupportedCalls:
    """Each one says what it belongs to.

    Raises:
        UnsupportedFeatureError: Always, from every method.
    """

    def store_layer(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        refuse_call("LMCacheEngine.store_layer", "layerwise mode")

    def retrieve_layer(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        refuse_call("LMCacheEngine.retrieve_layer", "layerwise mode")

    def async_lookup_and_prefetch(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        refuse_call("LMCacheEngine.async_lookup_and_prefetch", "async loading")

    def cleanup_memory_objs(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        refuse_call("LMCacheEngine.cleanup_memory_objs", "async loading")

    def move(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        refuse_call("LMCacheEngine.move", "P2P")

    def compress(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        refuse_call("LMCacheEngine.compress", "the cachegen serializer")

    def decompress(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        refuse_call("LMCacheEngine.decompress", "the cachegen serializer")
