"""Entry point of `python -m benchmarks.replay`."""

import os
import sys

from benchmarks.replay.cli import main

if __name__ == "__main__":
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")  # one line per pool would split the bars
    sys.exit(main())
