"""Loggers of the package: one formatter, one level, read when the first line is logged."""

import logging
import os
import sys

_LEVEL_VARIABLE = "LMCACHE_LOG_LEVEL"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_FORMAT = "[%(asctime)s] LMCache %(levelname)s: %(message)s (%(filename)s:%(lineno)d:%(name)s)"


class _LazyLevelLogger(logging.Logger):
    """A logger that reads `LMCACHE_LOG_LEVEL` when the first line is about to be logged."""

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 (the standard library's name)
        _configure_root_once()
        return super().isEnabledFor(level)


def init_logger(name: str) -> logging.Logger:
    """Return the logger called `name`; nothing is configured before it logs a line.

    Threads: safe from any thread.
    """
    manager = logging.Logger.manager
    previous = manager.loggerClass
    manager.loggerClass = _LazyLevelLogger
    try:
        return logging.getLogger(name)
    finally:
        manager.loggerClass = previous


def _configure_root_once() -> None:
    root = logging.getLogger("lmcache")
    if root.handlers or root.level != logging.NOTSET:
        return
    wanted = os.environ.get(_LEVEL_VARIABLE, "INFO").strip().upper()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT))
    root.addHandler(handler)
    root.setLevel(wanted if wanted in _LEVELS else "INFO")
    if wanted not in _LEVELS:
        root.warning(
            "%s=%r is not a log level; use one of %s. Using INFO.",
            _LEVEL_VARIABLE,
            wanted,
            ", ".join(_LEVELS),
        )
