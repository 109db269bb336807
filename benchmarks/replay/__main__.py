"""Entry point of `python -m benchmarks.replay`."""

import os
import signal
import sys
from types import FrameType

from benchmarks.replay.cli import main


def _exit(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")  # one line per pool would split the bars
    signal.signal(signal.SIGTERM, _exit)  # a run that is ended removes its files all the same
    sys.exit(main())
