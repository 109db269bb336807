"""A lock that many may share or one have alone."""

import threading
from contextlib import contextmanager


class Gate:
    """Many calls share it, or one has it alone; who wants it alone lets no new one in before it.

    Threads: safe from any thread. Not re-entrant.
    """

    def __init__(self):
        self._changed = threading.Condition()
        self._num_inside = 0
        self._num_waiting = 0
        self._is_alone = False

    @contextmanager
    def shared(self):
        """Enter beside others."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_alone and not self._num_waiting)
            self._num_inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self):
        """Enter when nobody is inside, and keep everybody out."""
        with self._changed:
            self._num_waiting += 1
            self._changed.wait_for(lambda: not self._is_alone and not self._num_inside)
            self._num_waiting -= 1
            self._is_alone = True
        try:
            yield
        finally:
            with self._changed:
                self._is_alone = False
                self._changed.notify_all()
