"""Who pinned which memory object, and whether the pin was counted as a use."""

import asyncio
import queue
import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import NewType, TypeVar

from lmcache.logging import init_logger
from lmcache.v1.cache_key import CacheEngineKey
from lmcache.v1.clock import Clock, SystemClock
from lmcache.v1.memory_object import MemoryObj

logger = init_logger(__name__)

Key = CacheEngineKey
PinOwner = NewType("PinOwner", str)
_Result = TypeVar("_Result")


@dataclass(slots=True)
class _Pin:
    memory_obj: MemoryObj
    count: int
    deadline_s: float
    is_counted: bool = False


@dataclass(frozen=True, slots=True)
class _Anonymous:
    """Owner of pins without one: the thread, and the asyncio task in it, that took them."""

    thread_id: int
    task_id: int


def _anonymous_owner() -> _Anonymous:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        task = None
    return _Anonymous(threading.get_ident(), id(task) if task is not None else 0)


def _unpin(memory_objs: Iterable[MemoryObj]) -> None:
    # Outside the table's lock: the last pin may free the object, and a foreign allocator is told.
    for memory_obj in memory_objs:
        memory_obj.unpin()


class PinTable:
    """The pins of one tier, each belonging to a lookup id or, without one, to its thread or task.

        pin's state   meaning                                            who may leave it
        uncounted     taken; its use has not moved the order yet         take_uncounted, release
        counted       its use is in the order                            release
        released      the object lost this pin; forgotten here           nobody

    A pin that is older than `timeout_seconds` is released by `expire`. Releasing what is not there
    is a counted no-op. Owner-less pins of one key are interchangeable: their release takes this
    thread's or task's first, then another's: callers of 0.5.6 pin and unpin on different threads.

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
        self._deferred: queue.SimpleQueue[tuple[PinOwner | None, tuple[Key, ...]]] = (
            queue.SimpleQueue()
        )
        self._pins: dict[Hashable, dict[Key, _Pin]] = {}
        self._anonymous_by_key: dict[Key, dict[_Anonymous, None]] = {}
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
        while not was_busy and not self._deferred.empty():
            self.release(*self._deferred.get())
        return result

    def add(self, owner: PinOwner | None, key: Key, memory_obj: MemoryObj) -> None:
        """Take over one pin that `memory_obj` already carries.

        A named owner has at most one pin a key, however often its request repeats the lookup.
        """
        holder: Hashable = _anonymous_owner() if owner is None else owner
        deadline_s = self.clock.monotonic() + self.timeout_seconds
        _unpin(self._alone(lambda: self._add_locked(holder, key, memory_obj, deadline_s)))

    def _add_locked(
        self, holder: Hashable, key: Key, memory_obj: MemoryObj, deadline_s: float
    ) -> list[MemoryObj]:
        """Return the objects that have a pin too many now."""
        pins = self._pins.setdefault(holder, {})
        pin = pins.get(key)
        if pin is None:
            pins[key] = _Pin(memory_obj, 1, deadline_s)
            if isinstance(holder, _Anonymous):
                self._anonymous_by_key.setdefault(key, {})[holder] = None
            return []
        pin.deadline_s = deadline_s
        if pin.memory_obj is not memory_obj:  # replaced meanwhile: the newer copy is the pinned one
            surplus = [pin.memory_obj] * pin.count
            pin.memory_obj, pin.count = memory_obj, 1
            return surplus
        if not isinstance(holder, _Anonymous):
            return [memory_obj]
        pin.count += 1
        pin.is_counted = False
        return []

    def uncounted(self, owner: PinOwner | None) -> list[Key]:
        """Return the keys whose use is not in the order yet, as pinned."""
        holder: Hashable = _anonymous_owner() if owner is None else owner
        return self._alone(
            lambda: [k for k, pin in self._pins.get(holder, {}).items() if not pin.is_counted]
        )

    def take_uncounted(self, owner: PinOwner | None) -> list[Key]:
        """Return the keys whose use is not in the order yet, as pinned; they count as of now."""
        holder: Hashable = _anonymous_owner() if owner is None else owner

        def take() -> list[Key]:
            pins = self._pins.get(holder, {})
            taken = [key for key, pin in pins.items() if not pin.is_counted]
            for key in taken:
                pins[key].is_counted = True
            return taken

        return self._alone(take)

    def release(self, owner: PinOwner | None, keys: Iterable[Key]) -> tuple[int, list[Key]]:
        """Release one pin of each key that belongs to `owner`, and of nobody else.

        Returns:
            How many were released, and which of the keys were not counted as used yet. Called by a
            finaliser inside this very table: (0, []), and they are released when the table is free.
        """
        wanted = tuple(keys)
        with self._lock:
            if self._is_busy:
                self._deferred.put((owner, wanted))
                return 0, []
        released, uncounted = self._alone(lambda: self._release_locked(owner, wanted))
        _unpin(released)
        return len(released), uncounted

    def _release_locked(
        self, owner: PinOwner | None, keys: tuple[Key, ...]
    ) -> tuple[list[MemoryObj], list[Key]]:
        released: list[MemoryObj] = []
        uncounted: list[Key] = []
        for key in keys:
            holder = self._holder_of(owner, key)
            pins = self._pins.get(holder)
            pin = pins.get(key) if pins is not None else None
            if pins is None or pin is None:
                self.num_unmatched_releases += 1
                continue
            released.append(pin.memory_obj)
            if not pin.is_counted:
                uncounted.append(key)
                pin.is_counted = True
            if pin.count <= 1:
                self._forget(holder, key)
            else:
                pin.count -= 1
        return released, uncounted

    def release_all(self, owner: PinOwner) -> list[Key]:
        """Release every pin of `owner`; returns the keys that were not counted as used yet."""
        keys = self._alone(lambda: list(self._pins.get(owner, ())))
        return self.release(owner, keys)[1]

    def expire(self) -> int:
        """Release every pin past its deadline; returns how many."""
        if self.timeout_seconds <= 0:
            return 0
        now_s = self.clock.monotonic()
        expired = self._alone(lambda: self._expire_locked(now_s))
        _unpin(expired)
        if expired:
            logger.warning(
                "%d pins were older than %s s (pin_timeout_sec) and were released: a lookup was "
                "neither followed by a retrieve nor by lookup_unpin",
                len(expired),
                self.timeout_seconds,
            )
        return len(expired)

    def _expire_locked(self, now_s: float) -> list[MemoryObj]:
        expired: list[MemoryObj] = []
        for holder, pins in list(self._pins.items()):
            for key, pin in list(pins.items()):
                if pin.deadline_s <= now_s:
                    expired += [pin.memory_obj] * pin.count
                    self._forget(holder, key)
        self.num_forced_releases += len(expired)
        return expired

    def _holder_of(self, owner: PinOwner | None, key: Key) -> Hashable:
        if owner is not None:
            return owner
        mine = _anonymous_owner()
        holders = self._anonymous_by_key.get(key, {})
        return mine if mine in holders else next(iter(holders), mine)

    def _forget(self, holder: Hashable, key: Key) -> None:
        pins = self._pins[holder]
        del pins[key]
        if not pins:
            del self._pins[holder]
        if isinstance(holder, _Anonymous):
            holders = self._anonymous_by_key[key]
            del holders[holder]
            if not holders:
                del self._anonymous_by_key[key]

    @property
    def num_pins(self) -> int:
        """Pins held now, over all owners."""
        return self._alone(
            lambda: sum(pin.count for pins in self._pins.values() for pin in pins.values())
        )

    def check_integrity(self) -> None:
        """Raise AssertionError when a pin is not on its object, or an index names none."""
        with self._lock:
            for holder, pins in self._pins.items():
                if not pins:
                    raise AssertionError(f"{holder} is listed without a pin")
                for key, pin in pins.items():
                    if pin.count <= 0 or pin.memory_obj.pin_count < pin.count:
                        raise AssertionError(f"{key} lacks pins of {holder}")
            for key, holders in self._anonymous_by_key.items():
                for holder in holders:
                    if key not in self._pins.get(holder, {}):
                        raise AssertionError(f"{key} names a holder without a pin")
