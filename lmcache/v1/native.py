"""The one importer of the compiled core, and the words to say when it is missing."""

import atexit

try:
    from lmcache._native import (
        FILE_ALTERED,
        FILE_FOREIGN,
        FILE_GOOD,
        FILE_SHORT,
        FILE_SKIPPED,
        AddressRanges,
        Block,
        ChunkFiles,
        EventReader,
        HandleOrder,
        HostPages,
        HotIndex,
        KeyCore,
        Ledger,
        LockIsHeld,
        Pool,
        call_each,
        check_keys,
        check_pairs,
        checksum,
        chunk_head_bytes,
        copy_batch,
        find_overlap,
        gather,
        leave_native_regions,
        make_keys,
        pack_int64,
        scatter,
    )
except ImportError as error:
    raise ImportError(
        "lmcache's native core (lmcache._native) cannot be loaded: "
        f"{error}. Install the wheel for this Python, or build it in a source tree with "
        "`pip install -e .` (needs g++ with C++17)."
    ) from error

__all__ = [
    "FILE_ALTERED",
    "FILE_FOREIGN",
    "FILE_GOOD",
    "FILE_SHORT",
    "FILE_SKIPPED",
    "AddressRanges",
    "Block",
    "ChunkFiles",
    "EventReader",
    "HandleOrder",
    "HostPages",
    "HotIndex",
    "KeyCore",
    "Ledger",
    "LockIsHeld",
    "Pool",
    "call_each",
    "check_keys",
    "check_pairs",
    "checksum",
    "chunk_head_bytes",
    "copy_batch",
    "find_overlap",
    "gather",
    "make_keys",
    "pack_int64",
    "scatter",
]

_EXIT_WAIT_SECONDS = 10.0
# No thread may be inside the core without the interpreter's lock once the interpreter is finalised.
atexit.register(leave_native_regions, _EXIT_WAIT_SECONDS)
