"""What this process may believe of a tier that reports no residency."""

import threading
from collections import OrderedDict
from collections.abc import Iterable

from lmcache.v1.cache_key import CacheEngineKey

MAX_HINTED_KEYS = 1 << 18


class ResidencyHint:
    """The keys this process stored or saw in one tier, minus what it learnt is not there.

    A hint, not the truth: others share such a tier. It holds the newest `max_keys`; older ones are
    forgotten, which makes touch answer GONE for a key that may still be there: a lost hit, no more.

    Threads: safe from any thread; `_lock` guards the keys and is a leaf.
    """

    def __init__(self, max_keys: int = MAX_HINTED_KEYS) -> None:
        self._max_keys = max_keys
        self._lock = threading.Lock()
        self._keys: OrderedDict[CacheEngineKey, None] = OrderedDict()

    def add(self, keys: Iterable[CacheEngineKey]) -> None:
        """Note that the tier holds `keys`."""
        with self._lock:
            for key in keys:
                self._keys[key] = None
                self._keys.move_to_end(key)
            while len(self._keys) > self._max_keys:
                self._keys.popitem(last=False)

    def discard(self, keys: Iterable[CacheEngineKey]) -> None:
        """Note that the tier does not hold `keys`."""
        with self._lock:
            for key in keys:
                self._keys.pop(key, None)

    def clear(self) -> None:
        """Note that the tier holds nothing."""
        with self._lock:
            self._keys.clear()

    def __contains__(self, key: CacheEngineKey) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)
