"""Puts into a disk tier that is full: until the last one is readable from disk, and the caller's.

An entry is 16 KiB: small enough that the rate tells what an entry costs and not what the disk's
bandwidth is. Beside it the same files from two plain loops of system calls, which are what the
machine can do: one removes the oldest file and makes a new one, as 0.5.6 does, and one renames it
and writes over it, as the fork does.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Sequence

import torch
from common import CacheEngineKey, StorageManager, is_fork, make_keys, make_manager, parse, report

CHUNK_BYTES = 16 << 10
HEAD_BYTES = 4096  # what a file of the fork has beside its chunk
TIER = "LocalDiskBackend"
SHAPE = torch.Size([CHUNK_BYTES])

options = parse(__doc__, entries=4000, puts=1000, blocks=4, batch=16)
num_keys = options.entries + options.puts * options.blocks
assert options.puts <= options.entries, "a put that a later one evicts might never be written"


def make_tier(directory: str) -> StorageManager:
    """Return a manager with a disk tier that has room for `entries` entries, and no more."""
    entry_bytes = CHUNK_BYTES + (HEAD_BYTES if is_fork() else 0)
    # Half the pool may be in flight to disk, and a block of puts is.
    return make_manager(
        8 * options.puts * CHUNK_BYTES,
        local_disk=directory,
        max_local_disk_size=(options.entries + 0.5) * entry_bytes / 2**30,
    )


def put_all(manager: StorageManager, keys: Sequence[CacheEngineKey]) -> None:
    """Put keys into the disk tier alone, in batches."""
    for start in range(0, len(keys), options.batch):
        batch = list(keys[start : start + options.batch])
        objs = [manager.allocate(SHAPE, torch.uint8, busy_loop=False) for _ in batch]
        assert None not in objs
        manager.batched_put(batch, objs, location=TIER)


def await_readable(manager: StorageManager, keys: Sequence[CacheEngineKey]) -> None:
    """Return once every key can be read from disk."""
    if is_fork():
        manager.drain()
        return
    backend = manager.storage_backends[TIER]
    for key in keys:
        while key not in backend.dict or backend.exists_in_put_tasks(key):
            time.sleep(0.0005)


def check_stored(manager: StorageManager, directory: str, keys: Sequence[CacheEngineKey]) -> None:
    """Check that every put is there, that the tier is full, and that it has no files beside."""
    backend = manager.storage_backends[TIER]
    assert all(backend.contains(key) for key in keys)
    assert len(backend.dict) == options.entries
    files = [name for _, _, names in os.walk(directory) for name in names if name.endswith(".pt")]
    assert len(files) == options.entries, f"{len(files)} files"
    read = backend.get_blocking(keys[-1])
    assert read is not None and read.get_size() == CHUNK_BYTES
    read.ref_count_down()
    if is_fork():
        disk = manager.gauges().disk
        assert disk.dropped_queue_full == disk.dropped_no_room == disk.failed_writes == 0


class PlainFiles:
    """Files of the same number and size, one after the other.

    Args:
        directory: Where they go.
        reuses_files: Whether to write over the oldest file instead of removing it.
    """

    def __init__(self, directory: str, reuses_files: bool) -> None:
        self.directory_fd = os.open(directory, os.O_RDONLY)
        self.reuses_files = reuses_files
        self.buffers = [bytearray(os.urandom(size)) for size in (HEAD_BYTES, CHUNK_BYTES)]
        self.num_written = 0

    def write(self, count: int) -> None:
        """Write files; where there would be more than `entries`, the oldest goes."""
        for number in range(self.num_written, self.num_written + count):
            name, temporary = f"{number:049x}.pt", f"{number:049x}.pt.tmp"
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            if number >= options.entries:
                oldest = f"{number - options.entries:049x}.pt"
                if self.reuses_files:
                    self._rename(oldest, temporary)
                    flags = os.O_WRONLY
                else:
                    os.unlink(oldest, dir_fd=self.directory_fd)
            fd = os.open(temporary, flags, 0o644, dir_fd=self.directory_fd)
            os.pwritev(fd, self.buffers, 0)
            os.close(fd)
            self._rename(temporary, name)
        self.num_written += count

    def _rename(self, old: str, new: str) -> None:
        os.rename(old, new, src_dir_fd=self.directory_fd, dst_dir_fd=self.directory_fd)


def fill(manager: StorageManager, keys: Sequence[CacheEngineKey]) -> None:
    """Fill the tier, in steps that fit in flight."""
    for start in range(0, len(keys), options.puts):
        step = keys[start : start + options.puts]
        put_all(manager, step)
        await_readable(manager, step)


def rate_of(files: PlainFiles) -> float:
    """Return a plain loop's files per second."""
    begin = time.perf_counter()
    files.write(options.puts)
    return options.puts / (time.perf_counter() - begin)


def measure(directory: str) -> dict[str, float]:
    """Return the figures: medians over the blocks, in which all take turns."""
    for name in ("tier", "new", "reused"):
        os.mkdir(f"{directory}/{name}")
    manager = make_tier(f"{directory}/tier")
    new, reused = PlainFiles(f"{directory}/new", False), PlainFiles(f"{directory}/reused", True)
    keys = make_keys(num_keys)
    fill(manager, keys[: options.entries])
    for files in (new, reused):
        files.write(options.entries)
    readable, caller, new_rates, reused_rates = [], [], [], []
    for start in range(options.entries, num_keys, options.puts):
        block = keys[start : start + options.puts]
        begin = time.perf_counter()
        put_all(manager, block)
        caller.append(options.puts / (time.perf_counter() - begin))
        await_readable(manager, block)
        readable.append(options.puts / (time.perf_counter() - begin))
        check_stored(manager, f"{directory}/tier", block)
        new_rates.append(rate_of(new))
        reused_rates.append(rate_of(reused))
    if is_fork():
        manager.close()
    return {
        "readable_puts_per_s": statistics.median(readable),
        "caller_puts_per_s": statistics.median(caller),
        "plain_new_puts_per_s": statistics.median(new_rates),
        "plain_reused_puts_per_s": statistics.median(reused_rates),
    }


with tempfile.TemporaryDirectory(prefix="bench-disk-") as path:
    figures = measure(path)
report(figures)
