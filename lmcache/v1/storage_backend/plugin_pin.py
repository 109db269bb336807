"""A pin in a tier that counts its pins itself and knows no owners: a plug-in written for 0.5.6."""

from collections.abc import Callable

from lmcache.v1.cache_key import CacheEngineKey
from lmcache.v1.storage_backend.abstract_backend import StorageBackendInterface


class PluginPin:
    """Lets a pin table keep the owner that the tier cannot.

    Args:
        backend: The tier, which has pinned `key` once for this object.
        note_error: Told when the tier raises on release; the pin counts as gone.
    """

    __slots__ = ("_backend", "_key", "_note_error")

    pin_count = 1  # as far as its table is concerned

    def __init__(
        self,
        backend: StorageBackendInterface,
        key: CacheEngineKey,
        note_error: Callable[[], None],
    ) -> None:
        self._backend = backend
        self._key = key
        self._note_error = note_error

    def unpin(self) -> None:
        """Release the tier's pin."""
        try:
            self._backend.unpin(self._key)
        except Exception:  # a plug-in's fault must not keep the other pins
            self._note_error()
