#!/usr/bin/env bash
# Set up, then check and test everything. Arguments go to pytest; without any, linters run first and
# the nightly profile is left out.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
bin="$(cd "${DEV_VENV:-.venv}/bin" && pwd)"
if [ "$#" -gt 0 ]; then
    exec "$bin/python" -m pytest "$@"
fi
"$bin/ruff" format --check .
"$bin/ruff" check .
"$bin/mypy"
"$bin/clang-format" --dry-run --Werror csrc/*/*.cpp csrc/*/*.h tests/native/*.cpp tests/native/*.h \
    benchmarks/native/*.cpp
"$bin/python" scripts/make_stub.py --check || {
    echo "lmcache/_native.pyi is out of date: run $bin/python scripts/make_stub.py" >&2
    exit 1
}
exec "$bin/python" -m pytest -m "not slow"
