"""Calls of 0.5.6's storage manager whose features this fork leaves to upstream."""

from typing import Any, NoReturn

from lmcache.v1.errors import refuse_call


class UnsupportedTransfers:
    """Each one says what it belongs to.

    Raises:
        UnsupportedFeatureError: Always, from every method.
    """

    def layerwise_batched_get(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        refuse_call("StorageManager.layerwise_batched_get", "layerwise mode")

    def async_lookup_and_prefetch(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        refuse_call("StorageManager.async_lookup_and_prefetch", "async loading")
