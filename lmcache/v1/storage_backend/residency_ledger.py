"""Which tier holds which key: the one place where residency changes and events are numbered."""

import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, Protocol

from lmcache.v1.clock import Clock
from lmcache.v1.native import EventReader, Ledger
from lmcache.v1.storage_backend.cache_events import (
    CacheEvent,
    EventKind,
    Key,
    RemovalReason,
    Residents,
    Subscription,
)

# The native ledger counts both in this order.
_KINDS = list(EventKind)
_REASONS = list(RemovalReason)
_SNAPSHOT_STEP_KEYS = 4096
REASON_NUMBER = {reason: number for number, reason in enumerate(_REASONS)}


class Sized(Protocol):
    """A copy that knows its size."""

    def get_size(self) -> int:
        """Return the bytes of its contents."""
        ...


class EventGauges(NamedTuple):
    """What has become of the events: see `ManagerGauges`, whose names these are."""

    num_lost: int
    num_pending: int
    lag_seconds: float


class TierLedger:
    """One local tier's page of the ledger.

    A tier reports every transition here while it holds its `order_lock`.

    Attributes:
        ledger, number: The native ledger and this page's number in it, for native caches.

    Threads: each key's transition is one native step.
    """

    __slots__ = ("ledger", "name", "number")

    def __init__(self, ledger: Ledger, name: str) -> None:
        self.ledger = ledger
        self.name = name
        self.number: int = ledger.register_page(name)

    def stored(self, key: Key, copy: Sized) -> None:
        """Report that `get` can read `key` from this tier."""
        self.ledger.stored(self.number, key, copy)

    def removed(self, key: Key, copy: Sized, reason: RemovalReason) -> bool:
        """Report that the copy left; False, and no event, when it was never reported as stored."""
        was_there: bool = self.ledger.removed(self.number, key, copy, REASON_NUMBER[reason])
        return was_there

    def replaced(self, key: Key, old: Sized, new: Sized) -> None:
        """Report that another copy took the place of this one: REMOVED and STORED in one step."""
        self.ledger.replaced(self.number, key, old, new)

    def generation(self, key: Key) -> int:
        """Return the number of the event that stored this tier's copy; 0 when it has none."""
        generation: int = self.ledger.generation(self.number, key)
        return generation

    def keys(self) -> list[Key]:
        """Return the keys that this tier holds, in no order."""
        keys: list[Key] = self.ledger.page_keys(self.number)
        return keys

    def __contains__(self, key: Key) -> bool:
        return self.generation(key) > 0

    def __len__(self) -> int:
        size: int = self.ledger.page_size(self.number)
        return size

    def end(self, reason: RemovalReason) -> None:
        """Report that everything the tier held left: it is closed and cannot say so itself."""
        self.ledger.end_page(self.number, REASON_NUMBER[reason])

    def forget(self) -> None:
        """Drop every key without an event: before the tier reports itself to another ledger."""
        self.ledger.forget_page(self.number)


class ResidencyLedger:
    """Residency of all local tiers, the numbering of events, and their subscribers.

        key's state in a tier   meaning                      who may leave it
        absent                  it has no generation         TierLedger.stored, replaced
        present                 it has a generation          TierLedger.removed, replaced

    The last in the lock order: its lock is the interpreter's, because every call of the native
    ledger is one step that runs no Python code. Closing appends one CLOSED to every stream.

    Args:
        clock: For the events' time stamps; the machine's monotonic clock by default.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._native = Ledger(None if clock is None else clock.monotonic)
        self._now_s = time.monotonic if clock is None else clock.monotonic
        self.incarnation = secrets.token_hex(8)
        self._subscriptions: weakref.WeakSet[Subscription] = weakref.WeakSet()
        self._subscriptions_lock = threading.Lock()
        _LEDGERS.add(self)

    @property
    def seq(self) -> int:
        """Number of the newest event."""
        seq: int = self._native.seq
        return seq

    def register_tier(self, name: str) -> TierLedger:
        """Return the page of the tier called `name`, the same one each time."""
        return TierLedger(self._native, name)

    def subscribe(
        self,
        callback: Callable[[list[CacheEvent]], Any] | None,
        tiers: Collection[str] | None,
        kinds: Collection[EventKind] | None,
        capacity: int,
    ) -> Subscription:
        """Return a subscription that hears everything from now on; see `StorageManager.subscribe`.

        Raises:
            TypeError: An argument of the wrong type.
            ValueError: `capacity` is not positive.
        """
        if callback is not None and not callable(callback):
            raise TypeError(f"callback must be callable or None, not {callback!r}")
        if not isinstance(capacity, int) or isinstance(capacity, bool):
            raise TypeError(f"capacity must be a number of events, not {capacity!r}")
        if capacity <= 0:
            raise ValueError(f"capacity must be a positive number of events, not {capacity}")
        kinds_mask = _mask_of(kinds)
        names = _checked_names(tiers)

        def open_reader(wake: Callable[[], None]) -> EventReader:
            return self._native.subscribe(
                capacity, names, kinds_mask, wake, CacheEvent, _KINDS, _REASONS, self.incarnation
            )

        subscription = Subscription(open_reader, callback)
        with self._subscriptions_lock:
            self._subscriptions.add(subscription)
        return subscription

    def snapshot(self) -> Residents:
        """Return which keys the local tiers hold, and as of which event."""
        seq, pages = self._native.snapshot()
        residents: dict[Key, frozenset[str]] = {}
        for name, keys in pages:
            _add_residents(residents, keys, frozenset((name,)))
        return Residents(self.incarnation, seq, residents)

    def close(self) -> None:
        """End every stream with one CLOSED. Twice is a no-op."""
        self._native.close()

    @property
    def num_subscribers(self) -> int:
        """Open subscriptions."""
        number: int = self._native.num_subscribers
        return number

    def event_gauges(self) -> EventGauges:
        """Return the events lost so far, those waiting, and the age of the oldest of these."""
        with self._subscriptions_lock:
            subscriptions = list(self._subscriptions)
        waiting = [s.oldest_monotonic_s for s in subscriptions]
        oldest_s = min((since for since in waiting if since is not None), default=None)
        return EventGauges(
            self._native.num_lost,
            sum(subscription.num_pending for subscription in subscriptions),
            0.0 if oldest_s is None else max(0.0, self._now_s() - oldest_s),
        )

    @property
    def num_lost(self) -> int:
        """Events dropped so far because a subscriber was too slow."""
        lost: int = self._native.num_lost
        return lost

    def transition_counts(self) -> tuple[dict[str, int], dict[tuple[str, RemovalReason], int]]:
        """Return stores by tier, and removals by tier and reason, of one moment.

        Counted from the ledger's first transition on, with and without subscribers; tiers that
        were closed stay.
        """
        stored: dict[str, int] = {}
        removed: dict[tuple[str, RemovalReason], int] = {}
        for tier, num_stored, num_removed in self._native.transition_counts():
            stored[tier] = num_stored
            for reason, number in zip(_REASONS, num_removed, strict=True):
                removed[tier, reason] = number
        return stored, removed

    def check_integrity(self, pages: Iterable[TierLedger]) -> None:
        """Raise AssertionError when a page holds a generation that could not have been given."""
        for page in pages:
            listed = page.keys()
            for key in listed:
                if not 0 < page.generation(key) <= self.seq:
                    raise AssertionError(f"{page.name} holds {key} since no event")

    def make_inert(self) -> None:
        """In the child of a fork: subscriptions stay silent, and numbers are not the parent's."""
        self.incarnation = secrets.token_hex(8)
        self._native.make_inert()


def _add_residents(
    residents: dict[Key, frozenset[str]], keys: list[Key], tier: frozenset[str]
) -> None:
    if not residents:
        # In pieces: one call would keep every other thread waiting until the last key.
        for start in range(0, len(keys), _SNAPSHOT_STEP_KEYS):
            piece = keys[start : start + _SNAPSHOT_STEP_KEYS]
            residents.update(dict.fromkeys(piece, tier))
        return
    joined: dict[frozenset[str], frozenset[str]] = {}  # few sets, however many keys
    for key in keys:
        held = residents.get(key)
        if held is None:
            residents[key] = tier
        else:
            residents[key] = joined.get(held) or joined.setdefault(held, held | tier)


def _mask_of(kinds: Collection[EventKind] | None) -> int:
    wanted = set(_KINDS if kinds is None else kinds)
    for kind in wanted:
        if not isinstance(kind, EventKind):
            raise TypeError(f"kinds must hold EventKind members, not {kind!r}")
    return sum(1 << number for number, kind in enumerate(_KINDS) if kind in wanted)


def _checked_names(tiers: Collection[str] | None) -> list[str] | None:
    if tiers is None:
        return None
    if isinstance(tiers, str):
        raise TypeError(f"tiers must be a collection of names, not the string {tiers!r}")
    names = list(tiers)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"tiers must hold names of backends, not {name!r}")
    return names


_LEDGERS: weakref.WeakSet[ResidencyLedger] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for ledger in list(_LEDGERS):
        ledger.make_inert()


os.register_at_fork(after_in_child=_after_fork_in_child)
