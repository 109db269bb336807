"""Who watches a run from outside: it sees what comes and goes, and tells the engine nothing."""

from collections import Counter

from benchmarks.replay.naming import image_of
from benchmarks.replay.state_index import StateIndex
from lmcache.v1.storage_backend.cache_events import CacheEvent, EventKind, RemovalReason
from lmcache.v1.storage_backend.local_disk_backend import NAME as DISK_TIER
from lmcache.v1.storage_backend.storage_manager import StorageManager


class Observer:
    """Counts what enters and leaves each tier, by kind, and how long an image whose last copy left
    stays advertised, in trace time.
    """

    def __init__(self, manager: StorageManager, index: StateIndex, counts: Counter[str]) -> None:
        self._events = manager.subscribe(kinds={EventKind.STORED, EventKind.REMOVED})
        self._index = index
        self._counts = counts
        self._stale_since_ms: dict[int, int] = {}
        self._left: set[int] = set()
        self._ever_stored: set[int] = set()

    def look(self, now_ms: int) -> None:
        """Note what entered and left since the last look."""
        for event in self._events.take():
            if event.key is None:
                raise RuntimeError(
                    f"the measuring subscription got {event.kind}: its counts would be wrong"
                )
            image = image_of(event.key)
            verb = _verb(event)
            tier = "disk_" if event.tier == DISK_TIER else ""
            self._counts[f"{tier}{verb}_kv" if image is None else f"{tier}{verb}_image"] += 1
            if image is not None and event.kind is EventKind.REMOVED and not event.still_in:
                self._left.add(image)
                if image in self._index:
                    self._stale_since_ms.setdefault(image, now_ms)

    def note_stored(self, image: int, now_ms: int) -> None:
        """The image is in the pool: whatever was advertised of it is true again."""
        self._ever_stored.add(image)
        self._left.discard(image)
        self.note_forgotten(image, now_ms)

    def note_forgotten(self, image: int, now_ms: int) -> None:
        """The index no longer advertises the image."""
        since_ms = self._stale_since_ms.pop(image, None)
        if since_ms is not None:
            lasted_ms = now_ms - since_ms
            self._counts["stale_images"] += 1
            self._counts["stale_total_ms"] += lasted_ms
            self._counts["stale_max_ms"] = max(self._counts["stale_max_ms"], lasted_ms)

    def why_missing(self, image: int, *, has_touches_only: bool) -> str:
        """Name the cause of a load that found no image."""
        if image not in self._ever_stored:
            return "never_stored"
        if image not in self._left:
            return "unexplained"
        return "left_between_touches" if has_touches_only else "evicted_untold"

    def close(self, now_ms: int) -> None:
        """End the run: what is advertised and gone was so until now."""
        for image in list(self._stale_since_ms):
            self.note_forgotten(image, now_ms)
        self._events.close()


def _verb(event: CacheEvent) -> str:
    if event.kind is EventKind.STORED:
        return "entered"
    return "evicted" if event.reason is RemovalReason.CAPACITY else "removed"
