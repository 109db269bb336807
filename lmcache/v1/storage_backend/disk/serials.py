"""The numbers in the names of chunk files."""

import threading
import time


class Serials:
    """Numbers that rise, also over restarts: the clock at the start, or above what was found.

    Threads: safe from any thread; `_lock`, a leaf, guards the next number.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = time.time_ns()

    def next(self) -> int:
        """Return a number that was not given yet."""
        with self._lock:
            self._next += 1
            return self._next

    def raise_above(self, serial: int) -> None:
        """Give numbers above `serial` from now on: a clock may have been set back."""
        with self._lock:
            self._next = max(self._next, serial)
