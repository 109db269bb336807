"""Puts that evict, with nothing held and with the coldest entries held by readers."""

import time

from common import ENTRY_BYTES, fill, make_keys, make_manager, parse, put, report

options = parse(__doc__, resident=100_000, held=10_000, puts=5000, held_puts=1000)
manager = make_manager(options.resident * ENTRY_BYTES)
keys = make_keys(options.resident + 2 * options.puts + options.held_puts)
fill(manager, keys[: options.resident])
fresh = iter(keys[options.resident :])


def puts_per_second(count: int) -> float:
    """Store `count` fresh keys and return the rate."""
    start = time.perf_counter()
    for _ in range(count):
        put(manager, next(fresh))
    return count / (time.perf_counter() - start)


puts_per_second(options.puts // 10)
free_rate = puts_per_second(options.puts - options.puts // 10)
hot_cache = manager.local_cpu_backend.hot_cache
coldest = [key for _, key in zip(range(options.held), iter(hot_cache), strict=False)]
held = [hot_cache[key] for key in coldest]
for memory_obj in held:
    memory_obj.ref_count_up()
held_rate = puts_per_second(options.held_puts)
report({"evicting_puts_per_s": free_rate, "held_evicting_puts_per_s": held_rate})
