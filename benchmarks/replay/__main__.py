"""Entry point of `python -m benchmarks.replay`."""

import sys

from benchmarks.replay.cli import main

if __name__ == "__main__":
    sys.exit(main())
