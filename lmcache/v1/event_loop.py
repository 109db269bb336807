"""Running an asyncio loop for as long as its owner lives."""

import asyncio
from typing import Any

from lmcache.logging import init_logger

logger = init_logger(__name__)


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
