"""Exporting one engine's numbers at an interval."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from lmcache.logging import init_logger
from lmcache.observability import EngineNames, PrometheusLogger
from lmcache.v1.gauges import ManagerGauges
from lmcache.v1.stats_monitor import StatsMonitor

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig

logger = init_logger(__name__)

_JOIN_SECONDS = 5.0
_Reading = TypeVar("_Reading")


class LMCacheStatsLogger:
    """Exports one engine's numbers at an interval, on a thread of its own.

        state    meaning                            who may leave it
        idle     no thread; `log_now` works         start, close
        running  a daemon thread exports            close
        closed   no thread; `log_now` still works   nobody

    Args:
        metadata: Gives the labels.
        monitor: The engine's.
        read_gauges: Gives the manager's gauges, None while there is no manager.
        log_interval_seconds: From the end of one round to the next.
        config: See `PrometheusLogger`.
        read_is_healthy: Gives the engine's health.

    Raises:
        ValueError: The interval is not positive.
        ConfigError: See `PrometheusLogger`.

    Attributes:
        num_errors: Rounds in which a reader raised or exporting failed. What a reader had not
            to do with is exported; what could not be exported is, with the next round.

    Threads: safe from any thread; `_lock` guards the state.
    """

    def __init__(
        self,
        metadata: EngineNames,
        monitor: StatsMonitor,
        read_gauges: Callable[[], ManagerGauges | None] | None = None,
        log_interval_seconds: float = 10.0,
        config: "LMCacheEngineConfig | None" = None,
        read_is_healthy: Callable[[], bool] | None = None,
    ) -> None:
        if log_interval_seconds <= 0:
            raise ValueError(f"log_interval_seconds must be positive, not {log_interval_seconds}")
        self._monitor = monitor
        self._prometheus = PrometheusLogger.GetOrCreate(metadata, config)
        self._read_gauges = read_gauges
        self._read_is_healthy = read_is_healthy
        self._interval_seconds = log_interval_seconds
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.num_errors = 0

    def start(self) -> None:
        """Start the thread; a no-op while it runs.

        Raises:
            RuntimeError: The logger was closed.
        """
        with self._lock:
            if self._stop.is_set():
                raise RuntimeError("the stats logger is closed")
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="lmcache-stats-logger", daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        """End the thread and export once more what it had not. Twice is a no-op."""
        with self._lock:
            was_closed = self._stop.is_set()
            self._stop.set()
            thread = self._thread
        if was_closed:
            return
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)
        self.log_now()

    def log_now(self) -> None:
        """Export what was counted since the last round, on this thread. Never raises."""
        interval = None
        try:
            interval = self._monitor.take_interval()
            self._prometheus.log_prometheus(
                interval.stats(),
                self._reading(self._read_gauges),
                self._reading(self._read_is_healthy),
            )
        except Exception:  # exporting must not end the thread, let alone the engine
            if interval is not None:
                self._monitor.put_back(interval)  # nothing of it was exported
            self._note_error()

    def remove_gauges(self) -> None:
        """Take this engine's gauges out of the registry. Never raises."""
        try:
            self._prometheus.remove_gauges()
        except Exception:  # what cannot be written must not keep an engine from closing
            self._note_error()

    def _reading(self, read: Callable[[], _Reading] | None) -> _Reading | None:
        try:
            return None if read is None else read()
        except Exception:  # the engine's fault must not keep the other numbers back
            self._note_error()
            return None

    def _note_error(self) -> None:
        with self._lock:
            self.num_errors += 1
            is_first = self.num_errors == 1
        if is_first:
            logger.exception("exporting metrics failed; it goes on, and this is logged once")

    def _run(self) -> None:
        while not self._stop.wait(self._interval_seconds):
            self.log_now()
