#!/usr/bin/env bash
# Set up, then replay: real engines over one pool, all arms side by side, and the comparison table.
# Arguments go to the replay; see `scripts/replay.sh --help`.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
exec "${DEV_VENV:-.venv}/bin/python" -m benchmarks.replay "$@"
