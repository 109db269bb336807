"""Who pinned what, and whether the pin was counted as a use."""

import asyncio
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from lmcache.logging import init_logger
from lmcache.v1.cache_key import CacheEngineKey
from lmcache.v1.clock import Clock, SystemClock
from lmcache.v1.native import call_each
from lmcache.v1.pin_holders import (
    AnonymousHolder,
    AnonymousPins,
    LookupPins,
    Pinned,
    PinOwner,
    Released,
)

logger = init_logger(__name__)

Key = CacheEngineKey
_Result = TypeVar("_Result")

__all__ = ["PinOwner", "PinTable", "Pinned"]


def _anonymous_holder() -> AnonymousHolder:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        task = None
    return AnonymousHolder(threading.get_ident(), id(task) if task is not None else 0)


def _unpin(carriers: list[Pinned]) -> None:
    # Outside the table's lock: the last pin may free the object, and a foreign allocator is told.
    # One native step: an interrupt must not leave the rest pinned, in no table.
    call_each(carriers, "unpin")


class PinTable:
    """The pins of one tier, each belonging to a lookup id or, without one, to its thread or task.

        pin's state   meaning                                            who may leave it
        uncounted     taken; its use has not moved the order yet         take_uncounted, release
        counted       its use is in the order                            release
        released      the carrier lost this pin; forgotten here          nobody

    A pin that is older than `timeout_seconds` is released by `expire`. Releasing what is not there
    is a counted no-op.

    `_lock` guards every member, and no other lock is taken inside. A release that a finaliser makes
    while its own thread holds the lock waits in a queue that the holder empties when it is done.

    Args:
        timeout_seconds: 0 or less: pins never expire.
        clock: For the deadlines.
    """

    def __init__(self, timeout_seconds: float, clock: Clock | None = None) -> None:
        self.timeout_seconds = timeout_seconds
        self.clock: Clock = clock or SystemClock()
        self._lock = threading.RLock()
        self._is_busy = False
        self._deferred: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._lookups = LookupPins()
        self._anonymous = AnonymousPins()
        self.num_forced_releases = 0
        self.num_unmatched_releases = 0

    def _alone(self, step: Callable[[], _Result]) -> _Result:
        with self._lock:
            was_busy = self._is_busy
            try:
                self._is_busy = True
                result = step()
            finally:
                self._is_busy = was_busy
        if not was_busy:
            self._run_deferred()
        return result

    def _run_deferred(self) -> None:
        while True:
            try:
                release = self._deferred.get_nowait()
            except queue.Empty:  # another thread may have taken what was there
                return
            release()

    def take(
        self,
        owner: PinOwner | None,
        keys: Sequence[Key],
        pin_prefix: Callable[[Sequence[Key], list[Pinned]], object],
    ) -> int:
        """Let `pin_prefix` append the carriers of a prefix of `keys`, each pinned once, and add.

        Returns:
            How many it pinned.
        """
        carriers: list[Pinned] = []
        try:
            pin_prefix(keys, carriers)
            if carriers:
                self.add(owner, keys[: len(carriers)], carriers)
        except BaseException:  # interrupted: a pin in no table would never be released
            if not self._holds(owner, keys[: len(carriers)], carriers):
                _unpin(carriers)
            raise
        return len(carriers)

    def _holds(
        self, owner: PinOwner | None, keys: Sequence[Key], carriers: Sequence[Pinned]
    ) -> bool:
        if owner is None:
            return self._anonymous.holds(_anonymous_holder(), keys, carriers)
        return self._lookups.holds(owner, keys, carriers)

    def add(self, owner: PinOwner | None, keys: Sequence[Key], carriers: Sequence[Pinned]) -> None:
        """Take over one pin that each carrier has already.

        A named owner keeps at most one pin a key: what it has twice is released.
        """
        deadline_s = self.clock.monotonic() + self.timeout_seconds
        if owner is None:
            holder = _anonymous_holder()
            surplus = self._alone(lambda: self._anonymous.add(holder, keys, carriers, deadline_s))
        else:
            surplus = self._alone(lambda: self._lookups.add(owner, keys, carriers, deadline_s))
        _unpin(surplus)

    def uncounted(self, owner: PinOwner | None) -> list[Key]:
        """Return the keys whose use is not in the order yet, as pinned."""
        if owner is None:
            holder = _anonymous_holder()
            return self._alone(lambda: self._anonymous.uncounted(holder))
        return self._alone(lambda: self._lookups.uncounted(owner))

    def take_uncounted(self, owner: PinOwner | None) -> list[Key]:
        """Return the keys whose use is not in the order yet, as pinned; they count as of now."""
        if owner is None:
            holder = _anonymous_holder()
            return self._alone(lambda: self._anonymous.take_uncounted(holder))
        return self._alone(lambda: self._lookups.take_uncounted(owner))

    def release(self, owner: PinOwner | None, keys: Iterable[Key]) -> tuple[int, list[Key]]:
        """Release one pin of each key that belongs to `owner`, and of nobody else.

        Returns:
            How many were released, and which of the keys were not counted as used yet. Called by a
            finaliser inside this very table: (0, []), and they are released when the table is free.
        """
        wanted = tuple(keys)
        if self._is_deferred(lambda: self.release(owner, wanted)):
            return 0, []
        if owner is None:
            holder = _anonymous_holder()
            return self._move_out(lambda out: self._anonymous.release(holder, wanted, out))
        return self._move_out(lambda out: self._lookups.release(owner, wanted, out))

    def release_all(self, owner: PinOwner) -> tuple[int, list[Key]]:
        """Release every pin of `owner`; answers like `release`."""
        if self._is_deferred(lambda: self.release_all(owner)):
            return 0, []
        return self._move_out(lambda out: self._lookups.release_all(owner, out))

    def _move_out(self, move: Callable[[Released], object]) -> tuple[int, list[Key]]:
        released, num_released = Released(), 0
        try:
            try:
                self._alone(lambda: move(released))
                num_released = len(released.carriers)
            finally:  # what left the books must lose its pins, also when this is interrupted
                self._settle(released)
        finally:  # an interrupt on the way into the first call
            self._settle(released)
        return num_released, released.uncounted

    def _is_deferred(self, release: Callable[[], object]) -> bool:
        with self._lock:
            if self._is_busy:
                self._deferred.put(release)
            return self._is_busy

    def _settle(self, released: Released) -> None:
        _unpin(released.carriers)
        if released.num_unmatched:
            with self._lock:
                self.num_unmatched_releases += released.num_unmatched
                released.num_unmatched = 0

    def expire(self) -> int:
        """Release every pin past its deadline; returns how many."""
        if self.timeout_seconds <= 0:
            return 0
        now_s = self.clock.monotonic()
        num_expired = self._move_out(lambda out: self._expire_locked(now_s, out))[0]
        if num_expired:
            with self._lock:
                self.num_forced_releases += num_expired
            logger.warning(
                "%d pins were older than %s s (pin_timeout_sec) and were released: a lookup was "
                "neither followed by a retrieve nor by lookup_unpin",
                num_expired,
                self.timeout_seconds,
            )
        return num_expired

    def _expire_locked(self, now_s: float, released: Released) -> None:
        self._lookups.expire(now_s, released)
        self._anonymous.expire(now_s, released)

    def pins_by_owner(self) -> dict[PinOwner, list[Key]]:
        """Return what each lookup id holds, as pinned."""
        return self._alone(self._lookups.keys_by_owner)

    @property
    def num_pins(self) -> int:
        """Pins held now, over all owners."""
        return self._alone(lambda: self._lookups.num_pins + self._anonymous.num_pins)

    @property
    def num_uncounted(self) -> int:
        """Keys pinned now whose use is not in the order yet, over all owners."""
        return self._alone(lambda: self._lookups.num_uncounted + self._anonymous.num_uncounted)

    def check_integrity(self) -> None:
        """Raise AssertionError when a pin is not on its carrier, or an index names none."""
        with self._lock:
            self._lookups.check_integrity()
            self._anonymous.check_integrity()
