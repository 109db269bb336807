"""Disk tiers for tests, their files, and a layer that makes I/O fail or wait.

Sizes are counted in files of one chunk: CHUNK_BYTES and a head.
"""

import errno
import os
import subprocess
import tempfile
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

from builders import CHUNK_BYTES, hashes, is_filled, put

from lmcache.v1.native import ChunkFiles, chunk_head_bytes

DISK = "LocalDiskBackend"
HEAD_BYTES = chunk_head_bytes(64, 64)
FILE_BYTES = CHUNK_BYTES + HEAD_BYTES


def disk_settings(directory, num_files=16, **extra_config):
    """Settings of a disk tier that holds `num_files` files of one chunk each."""
    return {
        "local_disk": str(directory),
        "max_local_disk_size": num_files * FILE_BYTES / 2**30,
        "extra_config": extra_config,
    }


def disk_of(sm):
    """The disk tier of a manager."""
    return sm.storage_backends[DISK]


def files_of(sm):
    """The chunk files of a manager's disk tier, by name."""
    return {path.name: path for path in Path(disk_of(sm).path).glob("*.pt")}


def file_of(sm, key):
    """The file of a resident key."""
    return Path(disk_of(sm).dict[key].path)


def bytes_on_disk(sm):
    """Bytes of everything in a disk tier's directory."""
    total = 0
    for entry in os.scandir(disk_of(sm).path):
        with suppress(FileNotFoundError):  # removed since it was listed
            total += entry.stat().st_size
    return total


def check_disk(sm):
    """The tier's books are in order, and files and budget agree once nothing is in flight."""
    sm.drain()
    sm.check_integrity()
    assert bytes_on_disk(sm) == disk_of(sm).current_cache_size


def flip_a_bit(path, offset=HEAD_BYTES + 5):
    """Change one bit of a file."""
    with open(path, "r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@contextmanager
def small_file_system(num_bytes):
    """A directory on a file system of its own that holds so many bytes, and no more."""
    with tempfile.TemporaryDirectory() as directory:
        command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", directory]
        subprocess.run(command, check=True)
        try:
            yield directory
        finally:
            subprocess.run(["umount", "--lazy", directory], check=True)


def store_below(sm, some_keys, **options):
    """Store keys one by one in the disk tier alone, each written before the next."""
    for key in some_keys:
        assert put(sm, key, location=DISK, **options)
        sm.drain()


def read(sm, key):
    """Whether a key can be read, with the bytes that were stored for it."""
    obj = sm.get(key)
    if obj is None:
        return False
    assert is_filled(obj, key.chunk_hash)
    obj.ref_count_down()
    return True


def order_below(sm):
    """The disk tier's chunk hashes, coldest first."""
    return hashes(disk_of(sm).dict)


class GatedFiles:
    """The real files of a tier, but the test says when a round is written, and what fails.

    Use `gate_files` to put it into every disk tier made after.

    Attributes:
        write_fault: errno to answer writes with; nothing is written then.
        read_fault, head_fault: errno to answer reads, and reads of heads alone, with.
        before_read: Called before files are read, or None.
        is_waiting: Whether a round is at the gate.
        written: (file name, status) of every job so far.
    """

    def __init__(self, directory_fd, direct, num_threads):
        self._files = ChunkFiles(directory_fd, direct, num_threads)
        self._permits = threading.Semaphore(0)
        self.is_gated = self.is_waiting = False
        self.write_fault = self.read_fault = self.head_fault = 0
        self.before_read = None
        self.written = []

    @property
    def num_not_direct(self):
        return self._files.num_not_direct

    def open_gate(self, rounds=1):
        """Let so many rounds be written."""
        self._permits.release(rounds)

    def write(self, jobs):
        if jobs and self.is_gated:
            self.is_waiting = True
            self._permits.acquire()
            self.is_waiting = False
        fault = self.write_fault
        statuses = [fault] * len(jobs) if fault else self._files.write(jobs)
        self.written += [(job[0], status) for job, status in zip(jobs, statuses, strict=True)]
        return statuses

    def read(self, jobs):
        if self.before_read is not None:
            self.before_read()
        if self.read_fault:
            return [self.read_fault] * len(jobs)
        return self._files.read(jobs)

    def read_heads(self, names):
        if self.head_fault:
            return [(self.head_fault, b"", b"", 0, 0)] * len(names)
        return self._files.read_heads(names)

    def remove(self, names):
        return self._files.remove(names)


def gate_files(monkeypatch, is_gated=False, head_fault=0):
    """Give every disk tier made from now on `GatedFiles`; returns the list that they join."""
    made = []

    def make(directory_fd, direct, num_threads):
        files = GatedFiles(directory_fd, direct, num_threads)
        files.is_gated, files.head_fault = is_gated, head_fault
        made.append(files)
        return files

    monkeypatch.setattr("lmcache.v1.storage_backend.local_disk_backend.ChunkFiles", make)
    return made


EIO, ENOSPC = errno.EIO, errno.ENOSPC
