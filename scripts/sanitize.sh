#!/usr/bin/env bash
# Build the native module under the address and undefined-behaviour sanitizers in a copy of this tree,
# and run the tests that exercise it from Python. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
python="$(cd "${DEV_VENV:-.venv}/bin" && pwd)/python"
copy="$(mktemp -d)"
trap 'rm -rf "$copy"' EXIT
git ls-files -co --exclude-standard -z | tar -c --null -T - | tar -x -C "$copy"
tests=("$@")
if [ "$#" -eq 0 ]; then
    tests=(tests/properties tests/concurrency tests/unit/test_{touch,touch_tiers,placement,eviction}.py
        tests/unit/test_{allocation_waits,allocators,memory_object,pins,storage_manager}.py
        tests/unit/test_{block_copy,layout_overlap,memory_ops,paged_connector,raw_block_connector}.py
        tests/unit/test_{engine,engine_misuse,engine_tiers,plugin_faults}.py
        tests/unit/test_disk_{tier,order,restart,faults}.py tests/unit/test_engine_disk.py
        tests/contracts/test_gpu_connectors.py
        tests/unit/test_cache_events{,_callbacks,_lifecycle,_loss,_order,_tiers}.py)
fi
cd "$copy"
CXX="${CXX:-g++} -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g" \
    "$python" setup.py --quiet build_ext --inplace
# Python itself is not instrumented: its allocator is bypassed and its leaks at exit are not ours.
env LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)" \
    ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc PYTHONPATH="$copy" \
    "$python" -m pytest -m "not slow and not native" "${tests[@]}"
