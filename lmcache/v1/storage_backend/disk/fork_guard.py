"""What must happen to a disk tier when its process forks."""

import os
import threading
import weakref
from typing import Protocol


class Forkable(Protocol):
    """Something with a lock and a thread of its own."""

    lock: threading.Lock

    def make_inert(self) -> None:
        """In the child, which has no such thread; `lock` is held."""
        ...


_guarded: weakref.WeakSet[Forkable] = weakref.WeakSet()
_held: list[Forkable] = []


def guard_at_fork(item: Forkable) -> None:
    """See that a child never inherits the lock taken, and that it knows what it is."""
    _guarded.add(item)


def _before() -> None:
    _held[:] = list(_guarded)
    for item in _held:
        item.lock.acquire()


def _release() -> None:
    while _held:
        _held.pop().lock.release()


def _after_in_child() -> None:
    for item in _held:
        item.make_inert()
    _release()


os.register_at_fork(before=_before, after_in_parent=_release, after_in_child=_after_in_child)
