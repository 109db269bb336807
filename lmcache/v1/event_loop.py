"""Running an asyncio loop for as long as its owner lives."""

import asyncio
import threading
from typing import Any

from lmcache.logging import init_logger

logger = init_logger(__name__)


_JOIN_SECONDS = 10.0


class LazyEventLoop:
    """An asyncio loop on a daemon thread of its own, started when it is first asked for.

        state    meaning                              who may leave it
        idle     nobody asked for it: no thread       get, stop
        running  the thread runs the loop             stop
        stopped  no thread, and none will be started  nobody

    `_lock` guards every member.

    Args:
        thread_name: Of the thread.
        loop: One that somebody else runs; then no thread is started.
    """

    def __init__(self, thread_name: str, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._thread_name = thread_name
        self._lock = threading.Lock()
        self._loop = loop
        self._thread: threading.Thread | None = None
        self._is_stopped = False

    def get(self) -> asyncio.AbstractEventLoop:
        """Return the loop, running.

        Raises:
            RuntimeError: It was stopped.
        """
        with self._lock:
            if self._loop is None:
                if self._is_stopped:
                    raise RuntimeError(f"{self._thread_name} is stopped: its owner was closed")
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_run, args=(self._loop,), name=self._thread_name, daemon=True
                )
                self._thread.start()
            return self._loop

    def stop(self) -> None:
        """Stop the loop and wait for its thread, unless this is the one. Twice is a no-op."""
        with self._lock:
            self._is_stopped = True
            loop, thread = self._loop, self._thread
        if loop is None or thread is None or not thread.is_alive():
            return
        loop.call_soon_threadsafe(loop.stop)
        if thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.close()


def start_loop_in_thread_with_exceptions(loop: asyncio.AbstractEventLoop) -> None:
    """Run `loop` in the calling thread until it is stopped; what a callback raises is logged.

    Meant as the target of a daemon thread.
    """
    asyncio.set_event_loop(loop)
    loop.set_exception_handler(_log_exception)
    loop.run_forever()


def _log_exception(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    message = context.get("message", "Unhandled exception in the event loop")
    logger.error("%s", message, exc_info=context.get("exception"))
