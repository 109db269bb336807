"""What a subscriber hears, and the bounded ring it waits in."""

import enum
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from lmcache.logging import init_logger
from lmcache.v1.cache_key import CacheEngineKey, LayerCacheEngineKey

logger = init_logger(__name__)

Key = CacheEngineKey | LayerCacheEngineKey


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


class EventRecord(NamedTuple):
    """What the path that made the event appends."""

    seq: int
    kind: EventKind
    key: Key | None
    tier: str | None
    reason: RemovalReason | None
    size_bytes: int
    generation: int
    still_in: int  # bit i: the i-th local tier holds the key
    monotonic_s: float


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """One event. `seq` rises within an incarnation; `generation` is the `seq` that stored the copy.

    `still_in` names the local tiers that still hold the key, after the event. A LOST event has no
    key; `num_lost` events with numbers from `first_lost` to `last_lost` were dropped.
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


class EventRing:
    """The records one subscriber has not taken yet.

        state   meaning                                      who may leave it
        open    records are appended; a full ring drops its  close_ring
                oldest and remembers which
        closed  nothing is appended; what is left can be     nobody
                taken

    Guarded by the ledger's lock: every member. `wake` is re-entrant and takes no lock of ours.
    """

    __slots__ = (
        "_capacity",
        "_first_lost",
        "_kinds",
        "_last_lost",
        "_num_lost",
        "_records",
        "_tiers",
        "is_closed",
        "is_idle",
        "total_lost",
        "wake",
    )

    def __init__(
        self,
        capacity: int,
        tiers: frozenset[str] | None,
        kinds: frozenset[EventKind] | None,
    ) -> None:
        self._capacity = capacity
        self._tiers = tiers
        self._kinds = kinds
        self._records: deque[EventRecord] = deque()
        self._first_lost = self._last_lost = self._num_lost = 0
        self.total_lost = 0
        self.is_closed = False
        self.is_idle = False
        self.wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    def append(self, record: EventRecord) -> None:
        """Add a record that the subscriber asked for; the manager's CLOSED always is."""
        if record.kind is not EventKind.CLOSED and (
            (self._tiers is not None and record.tier not in self._tiers)
            or (self._kinds is not None and record.kind not in self._kinds)
        ):
            return
        if len(self._records) >= self._capacity:
            dropped = self._records.popleft()
            self._first_lost = self._first_lost or dropped.seq
            self._last_lost = dropped.seq
            self._num_lost += 1
            self.total_lost += 1
        self._records.append(record)
        if self.is_idle:
            self.is_idle = False
            self.wake.put(None)

    def take(self, max_events: int | None) -> tuple[list[EventRecord], tuple[int, int, int]]:
        """Return the oldest records and (first, last, number) of what was lost before them.

        A loss counts as one of the `max_events`.
        """
        lost = (self._first_lost, self._last_lost, self._num_lost)
        self._first_lost = self._last_lost = self._num_lost = 0
        max_records = max_events
        if max_records is not None and lost[2] > 0:
            max_records -= 1
        if max_records is None or max_records >= len(self._records):
            taken, self._records = self._records, deque()
            return list(taken), lost
        return [self._records.popleft() for _ in range(max_records)], lost

    @property
    def num_pending(self) -> int:
        """Records not taken yet."""
        return len(self._records)

    @property
    def oldest_monotonic_s(self) -> float | None:
        """When the oldest record not taken yet was made."""
        return self._records[0].monotonic_s if self._records else None

    def close_ring(self) -> None:
        """Stop appending and wake whoever waits."""
        self.is_closed = True
        self.wake.put(None)


class Subscription:
    """A stream of cache events; made by `StorageManager.subscribe`.

    Without a callback, call `take` when it suits (once an engine step). With one, a daemon thread
    of this subscription delivers batches; it holds no lock while it calls, so every cache call is
    legal from the callback.

        state    meaning                                            who may leave it
        open     events arrive                                      close, or the manager's close
        drained  the manager closed: what is left, then CLOSED      close
        closed   `take` gives nothing; the callback is not called   nobody

    Args:
        ring: Where the ledger appends.
        lock: The ledger's lock.
        make_event: Builds an event from a record.
        detach: Takes the ring off the ledger.
        callback: See above.
        incarnation: The ledger's.

    Threads: safe from any thread; guarded by the ledger's lock.
    """

    _LOG_INTERVAL_SECONDS = 10.0

    def __init__(
        self,
        ring: EventRing,
        lock: threading.Lock,
        make_event: Callable[[EventRecord], CacheEvent],
        detach: Callable[[EventRing], None],
        callback: Callable[[list[CacheEvent]], Any] | None,
        incarnation: str,
    ) -> None:
        self._ring = ring
        self._lock = lock
        self._make_event = make_event
        self._detach = detach
        self._callback = callback
        self._incarnation = incarnation
        self._is_closed = False
        self._is_inert = False
        self._last_log_s = -self._LOG_INTERVAL_SECONDS
        self.callback_errors = 0
        self._thread: threading.Thread | None = None
        if callback is not None:
            self._thread = threading.Thread(
                target=self._deliver, name="lmcache-cache-events", daemon=True
            )
            self._thread.start()

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
        return self._take(max_events)

    def _take(self, max_events: int | None) -> list[CacheEvent]:
        with self._lock:
            if self._is_closed or self._is_inert:
                return []
            records, lost = self._ring.take(max_events)
        return self._events(records, lost)

    def _events(
        self, records: list[EventRecord], lost: tuple[int, int, int]
    ) -> list[CacheEvent]:
        events = [self._make_event(record) for record in records]
        first, last, number = lost
        if number == 0:
            return events
        notice = CacheEvent(
            seq=last,
            incarnation=self._incarnation,
            kind=EventKind.LOST,
            first_lost=first,
            last_lost=last,
            num_lost=number,
        )
        return [notice, *events]

    @property
    def num_pending(self) -> int:
        """Events not taken or delivered yet."""
        with self._lock:
            return self._ring.num_pending

    @property
    def num_lost(self) -> int:
        """Events dropped so far because this subscriber was too slow."""
        with self._lock:
            return self._ring.total_lost

    @property
    def lag_seconds(self) -> float:
        """Age of the oldest event not taken yet; 0 when there is none."""
        with self._lock:
            oldest = self._ring.oldest_monotonic_s
        return 0.0 if oldest is None else max(0.0, time.monotonic() - oldest)

    def close(self) -> None:
        """End the subscription. A batch being delivered may still finish. Twice is a no-op."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._detach(self._ring)
            self._ring.take(None)
            self._ring.close_ring()

    def __enter__(self) -> "Subscription":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def make_inert(self, lock: threading.Lock) -> None:
        """After a fork, in the child: nothing arrives any more, and no inherited lock is taken."""
        self._lock = lock
        self._is_inert = True

    def _deliver(self) -> None:
        callback = self._callback
        assert callback is not None
        while True:
            with self._lock:
                self._ring.is_idle = self._ring.num_pending == 0 and not self._ring.is_closed
                must_wait = self._ring.is_idle
                is_over = self._is_closed or (
                    self._ring.is_closed and self._ring.num_pending == 0
                )
            if is_over:
                return
            if must_wait:
                self._ring.wake.get()
                continue
            events = self._take(None)
            if not events:
                continue
            try:
                callback(events)
            except Exception:  # a subscriber's fault is its own: count it, tell it, go on
                self._note_callback_error()

    def _note_callback_error(self) -> None:
        self.callback_errors += 1
        now = time.monotonic()
        if now - self._last_log_s >= self._LOG_INTERVAL_SECONDS:
            self._last_log_s = now
            logger.exception(
                "a cache-event callback raised (%d times so far); it keeps being called",
                self.callback_errors,
            )
