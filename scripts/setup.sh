#!/usr/bin/env bash
# Make .venv with everything that the replay, the tests and the linters need, and the package built
# from this tree. Does nothing when what it would install has not changed.
set -euo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-python3}"
venv="${DEV_VENV:-.venv}"

if ! command -v "${CXX:-g++}" >/dev/null; then
    echo "setup: no C++ compiler; install g++ (Debian: apt-get install g++), or set CXX" >&2
    exit 1
fi

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "setup: $("$python" --version) is too old; set PYTHON to Python 3.10 or newer" >&2
    exit 1
}

fingerprint="$(find pyproject.toml setup.py scripts/setup.sh csrc -type f -print0 | sort -z | xargs -0 sha256sum | sha256sum | cut -d' ' -f1)"
if [ -x "$venv/bin/python" ] && [ "$(cat "$venv/.fingerprint" 2>/dev/null)" = "$fingerprint" ]; then
    exit 0
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
# Any torch that is there already stays (a ROCm build, say); otherwise the one the project is tested with.
"$venv/bin/python" -c "import torch" 2>/dev/null || "${pip[@]}" "torch==2.13.0"
"${pip[@]}" -e ".[replay,test,lint]"
echo "$fingerprint" >"$venv/.fingerprint"
