"""What a subscriber hears, and its end of the stream."""

import enum
import functools
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from lmcache.logging import init_logger
from lmcache.v1.cache_key import CacheEngineKey
from lmcache.v1.native import EventReader

logger = init_logger(__name__)

_LOG_INTERVAL_SECONDS = 10.0

Key = CacheEngineKey


class EventKind(enum.Enum):
    """What happened."""

    STORED = "stored"  # `get` can read the key from the tier
    REMOVED = "removed"  # the tier no longer holds that copy
    LOST = "lost"  # the subscriber was too slow: events between two numbers were dropped
    CLOSED = "closed"  # the manager closed; nothing follows


class RemovalReason(enum.Enum):
    """Why a copy left its tier."""

    CAPACITY = "capacity"  # the policy made room
    EXPLICIT = "explicit"  # somebody asked for this key
    CLEAR = "clear"  # somebody emptied the tier
    REPLACED = "replaced"  # a put of another size or dtype; its STORED follows
    EXPIRED = "expired"  # the tier's server let it expire
    ERROR = "error"  # the copy could not be written or read


class CacheEvent(NamedTuple):
    """One event. `seq` rises within an incarnation; `generation` is the `seq` that stored the copy.

    `still_in` names the local tiers that still hold the key, after the event; empty means gone, but
    for a remote copy. LOST and CLOSED have no key; LOST says that `num_lost` events with numbers
    from `first_lost` to `last_lost` were dropped.
    """

    seq: int
    incarnation: str
    kind: EventKind
    key: Key | None = None
    tier: str | None = None
    reason: RemovalReason | None = None
    size_bytes: int = 0
    generation: int = 0
    still_in: frozenset[str] = frozenset()
    monotonic_s: float = 0.0
    first_lost: int = 0
    last_lost: int = 0
    num_lost: int = 0


@dataclass(frozen=True, slots=True)
class Residents:
    """Which keys the local tiers hold as of event `seq`."""

    incarnation: str
    seq: int
    residents: Mapping[Key, frozenset[str]]


class Subscription:
    """A stream of cache events; made by `StorageManager.subscribe`.

    Without a callback, call `take` when it suits (once an engine step). With one, a daemon thread
    of this subscription delivers batches; it holds no lock while it calls, so every cache call is
    legal from the callback.

        state    meaning                                            who may leave it
        open     events arrive                                      close, or the manager's close
        drained  the manager closed: what is left, then CLOSED      close
        closed   `take` gives nothing; the callback is not called   nobody

    The waiting events are bounded; beyond, the oldest are dropped and a LOST tells of them.

    Args:
        open_reader: Makes this subscriber's end of the ledger's ring, given what to call when an
            event arrives for a reader that waits.
        callback: See above.

    Threads: safe from any thread: each step is one native call.
    """

    def __init__(
        self,
        open_reader: Callable[[Callable[[], None]], EventReader],
        callback: Callable[[list[CacheEvent]], Any] | None,
    ) -> None:
        # Its put is re-entrant and takes no lock of ours: an event may be made in a finaliser.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._reader = open_reader(functools.partial(self._wake.put, None))
        self._callback = callback
        self._is_closed = False
        self._last_log_s = -_LOG_INTERVAL_SECONDS
        self.callback_errors = 0
        if callback is not None:
            threading.Thread(
                target=self._deliver, args=(callback,), name="lmcache-cache-events", daemon=True
            ).start()

    def take(self, max_events: int | None = None) -> list[CacheEvent]:
        """Return what happened since the last call, oldest first; [] when nothing did.

        When events were lost, the first one is LOST; rebuild from `StorageManager.snapshot()` and
        skip events up to its `seq`. The manager's CLOSED is the last event there is.

        Args:
            max_events: At most this many, LOST included.

        Raises:
            ValueError: `max_events` is not positive.
            RuntimeError: The subscription has a callback, which gets the events.
        """
        if max_events is not None and max_events <= 0:
            raise ValueError(f"max_events must be positive or None, not {max_events}")
        if self._callback is not None:
            raise RuntimeError("this subscription delivers to its callback; take() gives nothing")
        events: list[CacheEvent] = (
            self._reader.take() if max_events is None else self._reader.take(max_events)
        )
        return events

    @property
    def num_pending(self) -> int:
        """Events not taken or delivered yet."""
        pending: int = self._reader.num_pending
        return pending

    @property
    def num_lost(self) -> int:
        """Events dropped so far because this subscriber was too slow."""
        lost: int = self._reader.num_lost
        return lost

    @property
    def oldest_monotonic_s(self) -> float | None:
        """Time stamp of the oldest event not taken yet; None when there is none."""
        oldest: float | None = self._reader.oldest_monotonic_s
        return oldest

    @property
    def lag_seconds(self) -> float:
        """Age of the oldest event not taken yet, by the machine's clock; 0 when there is none."""
        oldest_s = self.oldest_monotonic_s
        return 0.0 if oldest_s is None else max(0.0, time.monotonic() - oldest_s)

    def close(self) -> None:
        """End the subscription. A batch being delivered may still finish. Twice is a no-op."""
        self._is_closed = True
        self._reader.unsubscribe()
        self._wake.put(None)

    def __enter__(self) -> "Subscription":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _deliver(self, callback: Callable[[list[CacheEvent]], Any]) -> None:
        while not self._is_closed:
            if self._reader.wait_if_empty():
                self._wake.get()
                continue
            events: list[CacheEvent] = self._reader.take()
            if not events:
                return  # closed, and everything was delivered
            try:
                callback(events)
            except BaseException:  # its own fault, sys.exit() included: only close ends a stream
                self._note_callback_error()

    def _note_callback_error(self) -> None:
        self.callback_errors += 1
        now_s = time.monotonic()
        if now_s - self._last_log_s >= _LOG_INTERVAL_SECONDS:
            self._last_log_s = now_s
            logger.exception(
                "a cache-event callback raised (%d times so far); it keeps being called",
                self.callback_errors,
            )
