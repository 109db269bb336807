"""The one thread of a process that releases pins past their deadline."""

import threading
import weakref
from collections.abc import Iterable

from lmcache.v1.pin_table import PinTable


class PinMonitor:
    """Expires the pins of every table given to `watch`.

        state    meaning                                  who may leave it
        idle     no thread; no pin was taken yet          wake
        running  a daemon thread expires pins             stop_monitoring
        stopped  no thread; pins do not expire            wake

    Threads: safe from any thread; `_lock` guards every member and is held over no other lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: weakref.WeakKeyDictionary[PinTable, float] = weakref.WeakKeyDictionary()
        self._poke = threading.Event()  # set: look at the intervals and at `_thread` again
        self._thread: threading.Thread | None = None

    def watch(self, table: PinTable, check_interval_seconds: float) -> None:
        """Expire `table`'s pins every `check_interval_seconds` once `wake` was called."""
        if check_interval_seconds <= 0:
            raise ValueError(
                f"check_interval_seconds must be positive, not {check_interval_seconds}"
            )
        with self._lock:
            self._tables[table] = check_interval_seconds
            self._poke.set()

    def wake(self) -> None:
        """Start the thread unless it runs: called when a pin is taken."""
        if self._thread is not None and self._thread.is_alive():
            return
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                return
            self._poke = threading.Event()
            self._thread = threading.Thread(
                target=self._run, args=(self._poke,), name="lmcache-pin-monitor", daemon=True
            )
            self._thread.start()

    def start_monitoring(self) -> None:
        """As `wake`, under the name of 0.5.6."""
        self.wake()

    def check_now(self) -> int:
        """Expire what is due in every table; returns how many pins were released."""
        return sum(table.expire() for table in self._watched())

    def get_monitored_count(self) -> int:
        """Return the pins held now, over all tables."""
        return sum(table.num_pins for table in self._watched())

    def stop_monitoring(self) -> None:
        """End the thread; the next pin starts it again."""
        with self._lock:
            self._thread = None
            self._poke.set()

    def _watched(self) -> Iterable[PinTable]:
        with self._lock:
            return list(self._tables)

    def _interval_seconds(self) -> float:
        with self._lock:
            return min(self._tables.values(), default=60.0)

    def _run(self, poke: threading.Event) -> None:
        while self._thread is threading.current_thread():
            if poke.wait(self._interval_seconds()):
                poke.clear()  # a shorter interval counts from now on
            else:
                self.check_now()

    @staticmethod
    def GetOrCreate(config: object = None, metadata: object = None) -> "PinMonitor":  # noqa: N802
        """Return the process's monitor. The arguments of 0.5.6 are accepted and not read."""
        return _MONITOR

    @staticmethod
    def DestroyInstance() -> None:  # noqa: N802
        """Stop the process's monitor; the next pin starts it again."""
        _MONITOR.stop_monitoring()


_MONITOR = PinMonitor()
