"""Chunks of 0.86 MiB and images of 54 MiB, scaled down by 64, with session-like touches."""

import random

import torch
from common import is_fork, make_keys, make_manager, parse, report

options = parse(__doc__, pool_mib=512, puts=40_000, sessions=64)
CHUNK_BYTES, IMAGE_BYTES = 884 * 1024 // 64, 54 * 2**20 // 64
manager = make_manager(options.pool_mib * 2**20)
keys = iter(make_keys(options.puts + options.puts // 8))
backend = manager.local_cpu_backend
numbers = random.Random(42)
sessions: list[list] = [[] for _ in range(options.sessions)]


def free_bytes() -> int:
    """Return the bytes of the pool that nobody has."""
    if is_fork():
        return backend.hot.pool.gauges()["free_bytes"]
    return backend.memory_allocator.pin_allocator.address_manager.get_free_size()


def refresh(batch: list) -> None:
    """Refresh what a session's next turn hits."""
    if is_fork():
        manager.touch(batch)
        return
    with backend.cpu_lock:
        for key in reversed(batch):
            if key in backend.hot_cache:
                backend.cache_policy.update_on_hit(key, backend.hot_cache)


def store(size_bytes: int) -> tuple[float, object]:
    """Store one object; returns bytes evicted per byte asked for, and its key."""
    before = free_bytes()
    memory_obj = manager.allocate(torch.Size([size_bytes]), torch.uint8, busy_loop=False)
    assert memory_obj is not None
    taken = memory_obj.get_physical_size()
    evicted = free_bytes() + taken - before
    key = next(keys)
    manager.batched_put([key], [memory_obj])
    return evicted / taken, key


ratios, fills = [], []
for step in range(options.puts // 17):
    session = numbers.choice(sessions)
    refresh(session[-200:])
    for index in range(17):
        ratio, key = store(IMAGE_BYTES if index == 16 else CHUNK_BYTES)
        session.append(key)
        if step > options.puts // 34:
            ratios.append(ratio)
            fills.append(1 - free_bytes() / (options.pool_mib * 2**20))
    if numbers.random() < 0.05:
        session.clear()
ratios.sort()
report(
    {
        "mean_fill": sum(fills) / len(fills),
        "evicted_per_byte_p99": ratios[int(len(ratios) * 0.99)],
        "evicted_per_byte_mean": sum(ratios) / len(ratios),
    }
)
