"""Batches of chunks to and from disk, as a share of plain file I/O. This fork only.

Three ways take turns in one process: plain I/O (the same system calls and pieces in C++, on as
many threads), the core's `ChunkFiles`, and the whole tier (puts until they are on disk; a get).
Each writes new files, then reads them, then writes again into the room of those files, as a full
tier does. All write from the same memory and read into other memory. Before each step everything
is on the disk; what is read was not just written, so that it is in no processor's cache.
"""

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from common import make_keys, make_manager, parse, report
from plain_files import HEAD_BYTES, PlainFiles

from lmcache.v1.native import ChunkFiles

TIER = "LocalDiskBackend"
KEY, LAYOUT = b"k" * 50, b"l" * 20
PUT_CHUNKS = 16  # of one put: a prompt's

options = parse(__doc__, chunk_kib=880, chunks=64, rounds=15, direct=0, threads=4)
chunk_bytes = options.chunk_kib << 10
is_direct = bool(options.direct)


class Core:
    """The same through the core alone."""

    def __init__(self, directory: str, sources: list[int], targets: list[int]) -> None:
        self.files = ChunkFiles(os.open(directory, os.O_RDONLY), is_direct, options.threads)
        self.sources, self.targets = sources, targets
        self.numbers = itertools.count()
        self.names: list[str] = []

    def write(self) -> None:
        """Write new files."""
        self._write([""] * len(self.sources))

    def write_again(self) -> None:
        """Write into the files of the last write, under new names."""
        self._write(self.names)

    def _write(self, recycled: list[str]) -> None:
        self.names = [f"{next(self.numbers):049x}.pt" for _ in self.sources]
        rows = zip(self.names, self.sources, recycled, strict=True)
        statuses = self.files.write(
            [(name, KEY, LAYOUT, address, chunk_bytes, old) for name, address, old in rows]
        )
        assert not any(statuses), statuses

    def read(self) -> None:
        """Read the files of the last write."""
        rows = zip(self.names, self.targets, strict=True)
        jobs = [(name, KEY, HEAD_BYTES, address, chunk_bytes) for name, address in rows]
        statuses = self.files.read(jobs)
        assert not any(statuses), statuses

    def remove(self) -> None:
        """Remove the files of the last write."""
        assert not self.files.remove(self.names)


class Tier:
    """The same through a storage manager's disk tier, which has room for one batch."""

    def __init__(self, directory: str) -> None:
        batch_bytes = options.chunks * (chunk_bytes + HEAD_BYTES)
        self.manager = make_manager(
            8 * batch_bytes,  # half may be in flight to disk
            local_disk=directory,
            max_local_disk_size=(batch_bytes + HEAD_BYTES) / 2**30,
            extra_config={"use_odirect": is_direct, "disk_io_threads": options.threads},
        )
        self.objs, self.targets = self.allocate(), self.allocate()
        self.backend = self.manager.storage_backends[TIER]
        self.seeds = itertools.count()
        self.keys: list[Any] = []

    def allocate(self) -> list[Any]:
        """Return memory for a batch, with random bytes."""
        objs = self.manager.batched_allocate(
            torch.Size([chunk_bytes]), torch.uint8, options.chunks, busy_loop=False
        )
        assert objs is not None
        for obj in objs:
            obj.tensor.copy_(torch.randint(0, 256, (chunk_bytes,), dtype=torch.uint8))
        return list(objs)

    def write(self) -> None:
        """Put new keys, and wait until they are on disk."""
        for obj in self.objs:
            obj.ref_count_up()  # for the put, which drops one
        self.keys = make_keys(options.chunks, next(self.seeds))
        for first in range(0, options.chunks, PUT_CHUNKS):
            some = slice(first, first + PUT_CHUNKS)
            self.manager.batched_put(self.keys[some], self.objs[some], location=TIER)
        self.manager.drain()

    write_again = write  # the tier is full then

    def read(self) -> None:
        """Get the keys of the last put into other memory."""
        for obj in self.backend.batched_get_blocking(self.keys):
            assert obj is not None
            obj.ref_count_down()

    def remove(self) -> None:
        """Remove the keys of the last put, and wait until their files are gone."""
        assert self.backend.batched_remove(self.keys) == options.chunks
        self.manager.drain()

    def check(self) -> None:
        """Check that nothing was counted that was not stored."""
        disk = self.manager.gauges().disk
        faults = disk.dropped_queue_full + disk.dropped_no_room + disk.failed_writes
        assert faults == disk.failed_reads == disk.bad_files == 0


def seconds_of(call: Callable[[], None]) -> float:
    """Return the seconds of one call, which finds nothing to be written back."""
    os.sync()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


STEPS = ("write", "read", "write_again")
Times = dict[tuple[str, str], list[float]]


def measure(directory: str) -> tuple[Times, int]:
    """Return the seconds of every way and step, one per round, and how often O_DIRECT failed."""
    for name in ("plain", "core", "tier"):
        os.mkdir(f"{directory}/{name}")
    tier = Tier(f"{directory}/tier")
    sources, targets = ([o.data_ptr for o in objs] for objs in (tier.objs, tier.targets))
    core = Core(f"{directory}/core", sources, targets)
    plain = PlainFiles(
        f"{directory}/plain", sources, targets, chunk_bytes, is_direct, options.threads
    )
    ways: list[tuple[str, Any]] = [("plain", plain), ("core", core), ("tier", tier)]
    times: Times = {(way, step): [] for way, _ in ways for step in STEPS}
    for round_number in range(options.rounds + 1):
        turns = ways[round_number % 3 :] + ways[: round_number % 3]
        for step, (way, does) in itertools.product(STEPS, turns):
            seconds = seconds_of(vars(type(does))[step].__get__(does))
            if round_number:  # the first one touches the memory
                times[way, step].append(seconds)
        for _, does in turns:
            does.remove()
    tier.check()
    tier.manager.close()
    return times, core.files.num_not_direct


with tempfile.TemporaryDirectory(prefix="bench-disk-") as path:
    times, num_not_direct = measure(path)
figures: dict[str, Any] = {"files_not_direct": num_not_direct}
batch_gb = options.chunks * chunk_bytes / 1e9
for (way, step), seconds in times.items():
    figures[f"{way}_{step}_gb_per_s"] = batch_gb / statistics.median(seconds)
    shares = sorted(p / s for p, s in zip(times["plain", step], seconds, strict=True))
    figures[f"{way}_{step}_share"] = statistics.median(shares)
    figures[f"{way}_{step}_share_quartiles"] = (
        shares[len(shares) // 4],
        shares[3 * len(shares) // 4],
    )
report(figures)
