"""The clock that everything timed is given, so that tests can turn its hands."""

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that never go backwards; only differences mean anything."""

    def monotonic(self) -> float:
        """Return the current reading in seconds."""
        ...


class SystemClock:
    """The machine's own monotonic clock."""

    def monotonic(self) -> float:
        """Return `time.monotonic()`."""
        return time.monotonic()
