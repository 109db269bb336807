"""Which tier holds which key: the one place where residency changes and events are numbered."""

import os
import secrets
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

from lmcache.v1.clock import Clock, SystemClock
from lmcache.v1.storage_backend.cache_events import (
    CacheEvent,
    EventKind,
    EventRecord,
    EventRing,
    Key,
    RemovalReason,
    Residents,
    Subscription,
)

MAX_LOCAL_TIERS = 63


class Sized(Protocol):
    """A copy that knows its size."""

    def get_size(self) -> int:
        """Return the bytes of its contents."""
        ...


class TierLedger:
    """One local tier's page of the ledger. A tier reports every transition through it, while it
    holds its own lock, and holds no other lock of the ledger's kind.

    Threads: guarded by the ledger's lock, which is the last one taken.
    """

    __slots__ = ("_bit", "_ledger", "generations", "name")

    def __init__(self, ledger: "ResidencyLedger", name: str, bit: int) -> None:
        self._ledger = ledger
        self._bit = bit
        self.name = name
        self.generations: dict[Key, int] = {}  # key -> seq of the event that stored this copy

    def stored(self, copies: Iterable[tuple[Key, Sized]]) -> None:
        """Report that `get` can read each key from this tier."""
        ledger = self._ledger
        with ledger.lock:
            for key, copy in copies:
                ledger.transition(self, EventKind.STORED, key, None, copy)

    def removed(self, copies: Iterable[tuple[Key, Sized]], reason: RemovalReason) -> None:
        """Report that copies left; those never reported as stored are ignored."""
        ledger = self._ledger
        with ledger.lock:
            for key, copy in copies:
                if key in self.generations:
                    ledger.transition(self, EventKind.REMOVED, key, reason, copy)

    def replaced(self, key: Key, old: Sized, new: Sized) -> None:
        """Report that another copy took the place of this one: REMOVED and STORED in one hold."""
        ledger = self._ledger
        with ledger.lock:
            if key in self.generations:
                ledger.transition(self, EventKind.REMOVED, key, RemovalReason.REPLACED, old)
            ledger.transition(self, EventKind.STORED, key, None, new)

    @property
    def bit(self) -> int:
        """This tier's bit in masks."""
        return self._bit


class ResidencyLedger:
    """Residency of all local tiers, the numbering of events, and their subscribers.

        key's state in a tier   meaning                        who may leave it
        absent                  no generation is recorded      TierLedger.stored, replaced
        present                 its generation is recorded     TierLedger.removed, replaced

    `lock` is a leaf: whoever holds it takes no other lock and runs no foreign code. It guards every
    member, and the pages. Closing appends one CLOSED and refuses further events.

    Args:
        clock: For the events' time stamps.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.lock = threading.Lock()
        self.incarnation = secrets.token_hex(8)
        self.seq = 0
        self._clock: Clock = clock or SystemClock()
        self._tiers: tuple[TierLedger, ...] = ()
        self._rings: tuple[EventRing, ...] = ()
        self._subscriptions: weakref.WeakSet[Subscription] = weakref.WeakSet()
        self._is_closed = False
        _LEDGERS.add(self)

    def register_tier(self, name: str) -> TierLedger:
        """Return the page of the tier called `name`, the same one each time."""
        with self.lock:
            for page in self._tiers:
                if page.name == name:
                    return page
            if len(self._tiers) >= MAX_LOCAL_TIERS:
                raise RuntimeError(f"more than {MAX_LOCAL_TIERS} local tiers")
            page = TierLedger(self, name, 1 << len(self._tiers))
            self._tiers = (*self._tiers, page)
            return page

    def transition(
        self,
        page: TierLedger,
        kind: EventKind,
        key: Key,
        reason: RemovalReason | None,
        copy: Sized,
    ) -> None:
        """Change one key's residency in one tier; the caller holds `lock`."""
        self.seq = seq = self.seq + 1
        if kind is EventKind.STORED:
            page.generations[key] = generation = seq
        else:
            generation = page.generations.pop(key)
        if self._rings:
            still_in = page.bit if reason is RemovalReason.REPLACED else 0
            for tier in self._tiers:
                if key in tier.generations:
                    still_in |= tier.bit
            record = EventRecord(
                seq,
                kind,
                key,
                page.name,
                reason,
                copy.get_size(),
                generation,
                still_in,
                self._clock.monotonic(),
            )
            for ring in self._rings:
                ring.append(record)

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
        if not isinstance(capacity, int) or capacity <= 0:
            raise ValueError(f"capacity must be a positive number of events, not {capacity!r}")
        if isinstance(tiers, str):
            raise TypeError(f"tiers must be a collection of names, not the string {tiers!r}")
        for kind in kinds or ():
            if not isinstance(kind, EventKind):
                raise TypeError(f"kinds must hold EventKind members, not {kind!r}")
        ring = EventRing(
            capacity,
            None if tiers is None else frozenset(tiers),
            None if kinds is None else frozenset(kinds),
        )
        with self.lock:
            self._rings = (*self._rings, ring)
            if self._is_closed:
                self._append_closed((ring,))
        subscription = Subscription(
            ring, self.lock, self._event_from, self._detach, callback, self.incarnation
        )
        self._subscriptions.add(subscription)
        return subscription

    def snapshot(self) -> Residents:
        """Return which keys the local tiers hold, and as of which event."""
        with self.lock:
            seq = self.seq
            pages = [(page.name, list(page.generations)) for page in self._tiers]
        residents: dict[Key, frozenset[str]] = {}
        for name, keys in pages:
            alone = frozenset((name,))
            for key in keys:
                held = residents.get(key)
                residents[key] = alone if held is None else held | alone
        return Residents(self.incarnation, seq, residents)

    def tiers_holding(self, key: Key, among: Sequence[TierLedger]) -> list[TierLedger]:
        """Return which of `among` hold `key`, in that order; the caller holds `lock`."""
        return [page for page in among if key in page.generations]

    def close(self) -> None:
        """End every stream with one CLOSED. Twice is a no-op."""
        with self.lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._append_closed(self._rings)

    def _append_closed(self, rings: Sequence[EventRing]) -> None:
        self.seq += 1
        record = EventRecord(
            self.seq, EventKind.CLOSED, None, None, None, 0, 0, 0, self._clock.monotonic()
        )
        for ring in rings:
            ring.append(record)
            ring.close_ring()
        self._rings = tuple(ring for ring in self._rings if ring not in rings)

    def _detach(self, ring: EventRing) -> None:
        self._rings = tuple(other for other in self._rings if other is not ring)

    def _event_from(self, record: EventRecord) -> CacheEvent:
        still_in = frozenset(p.name for p in self._tiers if p.bit & record.still_in)
        return CacheEvent(
            seq=record.seq,
            incarnation=self.incarnation,
            kind=record.kind,
            key=record.key,
            tier=record.tier,
            reason=record.reason,
            size_bytes=record.size_bytes,
            generation=record.generation,
            still_in=still_in,
            monotonic_s=record.monotonic_s,
        )

    @property
    def num_subscribers(self) -> int:
        """Open subscriptions."""
        return len(self._rings)

    def event_gauges(self) -> tuple[int, float]:
        """Return the events lost so far and the largest lag in seconds over open subscriptions."""
        subscriptions = list(self._subscriptions)
        return (
            sum(subscription.num_lost for subscription in subscriptions),
            max((subscription.lag_seconds for subscription in subscriptions), default=0.0),
        )

    def check_integrity(self) -> None:
        """Raise AssertionError when a generation could not have been given."""
        with self.lock:
            for page in self._tiers:
                for key, generation in page.generations.items():
                    if not 0 < generation <= self.seq:
                        raise AssertionError(f"{page.name} holds {key} since event {generation}")

    def forget_subscribers_after_fork(self) -> None:
        """In the child of a fork: a fresh lock, and subscriptions that stay silent."""
        self.lock = threading.Lock()
        self._rings = ()
        for subscription in list(self._subscriptions):
            subscription.make_inert(self.lock)


_LEDGERS: weakref.WeakSet[ResidencyLedger] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for ledger in list(_LEDGERS):
        ledger.forget_subscribers_after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
