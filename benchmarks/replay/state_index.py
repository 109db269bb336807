"""The engine's own index of state images: it answers state hits and knows only what it is told."""

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from benchmarks.replay.settings import TOUCH_INTERVAL_MS


class VerdictEffect(enum.Enum):
    """What a touch verdict did to the index."""

    VERIFIED = "verified"
    FORGOTTEN = "forgotten"
    STALE = "stale"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class TouchTicket:
    """One touch on its way: the image and the moment, in index order, it was sent at."""

    image: int
    sent_at: int


@dataclass(slots=True)
class _Advertised:
    verified_ms: int
    verified_at: int
    touch_sent_ms: int | None = None
    seen_at_seq: int = 0


class StateIndex:
    """Which prefixes have a state image, as far as the engine was told.

    Images are named by the prefix id of their boundary. Evidence (a store, a load, a verdict) is
    ordered by a counter rather than the clock, so that two things of one millisecond still have an
    order. Events have an order of their own, their `seq`, in which a store here takes its place as
    of the newest event: a last copy that left before it never erases it. Which tiers hold copies,
    and how many, need not be known for that.
    """

    def __init__(self) -> None:
        self._images: dict[int, _Advertised] = {}
        self._order = 0

    def __len__(self) -> int:
        return len(self._images)

    def __contains__(self, image: int) -> bool:
        return image in self._images

    def deepest_boundary(self, prefix_ids: Sequence[int], limit: int) -> int:
        """Return the largest boundary <= `limit` blocks with an advertised image, or 0."""
        for boundary in range(limit, 0, -1):
            if prefix_ids[boundary - 1] in self._images:
                return boundary
        return 0

    def note_stored(self, image: int, now_ms: int, *, as_of_seq: int) -> None:
        """The image is in the cache, by a store or found there, as of the event `as_of_seq`."""
        entry = self._images.get(image)
        if entry is None:
            entry = self._images[image] = _Advertised(now_ms, 0)
        self._verify(entry, now_ms)
        entry.seen_at_seq = as_of_seq

    def note_loaded(self, image: int, now_ms: int) -> None:
        """A load of the image succeeded, so it was resident at this moment."""
        self._verify(self._images[image], now_ms)

    def forget(self, image: int) -> bool:
        """Stop advertising the image; returns whether it was advertised."""
        return self._images.pop(image, None) is not None

    def is_verified(self, image: int, now_ms: int, window_ms: int) -> bool:
        """Return whether the last evidence of an advertised image is at most `window_ms` old."""
        return now_ms - self._images[image].verified_ms <= window_ms

    def want_touch(self, image: int, now_ms: int) -> TouchTicket | None:
        """Return a ticket for a touch to send now, or None within 0.5 s of the last one."""
        entry = self._images[image]
        if entry.touch_sent_ms is not None and now_ms - entry.touch_sent_ms < TOUCH_INTERVAL_MS:
            return None
        entry.touch_sent_ms = now_ms
        return TouchTicket(image, self._next_moment())

    def apply_verdict(self, ticket: TouchTicket, is_resident: bool, now_ms: int) -> VerdictEffect:
        """A touch was answered; a GONE older than the last evidence changes nothing."""
        entry = self._images.get(ticket.image)
        if entry is None:
            return VerdictEffect.UNKNOWN
        if is_resident:
            self._verify(entry, now_ms)
            return VerdictEffect.VERIFIED
        if entry.verified_at > ticket.sent_at:
            return VerdictEffect.STALE
        del self._images[ticket.image]
        return VerdictEffect.FORGOTTEN

    def hear_stored(self, image: int, seq: int, now_ms: int) -> None:
        """Event `seq` says that a copy of the image can be read."""
        entry = self._images.get(image)
        if entry is None:
            entry = self._images[image] = _Advertised(now_ms, self._next_moment())
        entry.seen_at_seq = max(entry.seen_at_seq, seq)

    def hear_gone(self, image: int, seq: int) -> bool:
        """Event `seq` says that the last copy left; returns whether the image was forgotten."""
        entry = self._images.get(image)
        if entry is None or entry.seen_at_seq > seq:
            return False
        del self._images[image]
        return True

    def resync(self, residents: Collection[int]) -> list[int]:
        """Forget whatever is not resident, after events were lost; returns what was forgotten."""
        gone = [image for image in self._images if image not in residents]
        for image in gone:
            del self._images[image]
        return gone

    def _verify(self, entry: _Advertised, now_ms: int) -> None:
        entry.verified_ms = now_ms
        entry.verified_at = self._next_moment()

    def _next_moment(self) -> int:
        self._order += 1
        return self._order
