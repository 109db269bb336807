"""Plain file I/O in batches, from `benchmarks/native/plain_files.cpp`, compiled here."""

import ctypes
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "native" / "plain_files.cpp"
HEAD_BYTES = 4096
PIECE_BYTES = 256 << 10  # as csrc/core/chunk_file.cpp cuts a chunk
DIRECT_PIECE_BYTES = 4 << 20
BYTES_WORTH_A_THREAD = 512 << 10


class _Batch(ctypes.Structure):
    _fields_ = [
        ("directory_fd", ctypes.c_int32),
        ("is_direct", ctypes.c_int32),
        ("reuses_files", ctypes.c_int32),
        ("first_number", ctypes.c_uint64),
        ("old_number", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("addresses", ctypes.c_void_p),
        ("chunk_bytes", ctypes.c_uint64),
        ("heads", ctypes.c_void_p),
        ("head_bytes", ctypes.c_uint64),
        ("piece_bytes", ctypes.c_uint64),
        ("num_threads", ctypes.c_uint64),
    ]


class PlainFiles:
    """Writes, reads and removes one batch of files, with as many threads as the fork would take.

    Args:
        directory: Where they go.
        sources, targets: Addresses of the chunks in memory, to be written and to read into.
        chunk_bytes: Of each.
        is_direct: Whether to bypass the page cache.
        num_threads: At most.
    """

    def __init__(
        self,
        directory: str,
        sources: Sequence[int],
        targets: Sequence[int],
        chunk_bytes: int,
        is_direct: bool,
        num_threads: int,
    ) -> None:
        library = Path(directory) / "plain_files.so"
        flags = ["-std=c++17", "-O3", "-shared", "-fPIC", "-pthread"]
        subprocess.run(["g++", *flags, str(SOURCE), "-o", str(library)], check=True)
        self._library = ctypes.CDLL(str(library))
        count = len(sources)
        self._sources = (ctypes.c_uint64 * count)(*sources)
        self._targets = (ctypes.c_uint64 * count)(*targets)
        self._heads = ctypes.create_string_buffer((count + 1) * HEAD_BYTES)
        heads = ctypes.addressof(self._heads)
        self._batch = _Batch(
            directory_fd=os.open(directory, os.O_RDONLY),
            is_direct=is_direct,
            count=count,
            chunk_bytes=chunk_bytes,
            heads=(heads + HEAD_BYTES - 1) // HEAD_BYTES * HEAD_BYTES,
            head_bytes=HEAD_BYTES,
            piece_bytes=DIRECT_PIECE_BYTES if is_direct else PIECE_BYTES,
            num_threads=min(
                num_threads, count, max(1, count * chunk_bytes // BYTES_WORTH_A_THREAD)
            ),
        )

    def write(self) -> None:
        """Write new files."""
        self._batch.reuses_files = False
        self._call("plain_write", self._sources)

    def write_again(self) -> None:
        """Write into the files of the last write, under new names."""
        self._batch.reuses_files = True
        self._batch.old_number = self._batch.first_number
        self._batch.first_number += self._batch.count
        self._call("plain_write", self._sources)

    def read(self) -> None:
        """Read the files of the last write."""
        self._call("plain_read", self._targets)

    def remove(self) -> None:
        """Remove the files of the last write."""
        self._call("plain_remove", self._targets)

    def _call(self, name: str, addresses: "ctypes.Array[ctypes.c_uint64]") -> None:
        self._batch.addresses = ctypes.addressof(addresses)
        status: int = self._library[name](ctypes.byref(self._batch))
        if status != 0:
            raise OSError(status, f"{name}: {os.strerror(status)}")
