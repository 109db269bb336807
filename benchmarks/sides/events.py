"""What cache events cost the eviction path: without a subscriber, and with one. This fork only."""

import statistics
import time

from common import (
    ENTRY_BYTES,
    StorageManager,
    fill,
    make_keys,
    make_manager,
    parse,
    put,
    report,
)

options = parse(__doc__, resident=50_000, puts=4000, rounds=15)
fresh = iter(make_keys(2 * options.resident + options.puts * options.rounds * 4))
never_heard, heard = (make_manager(options.resident * ENTRY_BYTES) for _ in range(2))
for manager in (never_heard, heard):
    fill(manager, [next(fresh) for _ in range(options.resident)])


def put_us(manager: StorageManager) -> float:
    """Return microseconds per evicting put, which makes two events."""
    start = time.perf_counter()
    for _ in range(options.puts):
        put(manager, next(fresh))
    return (time.perf_counter() - start) / options.puts * 1e6


never, closed, one = [], [], []
for _ in range(options.rounds):
    never.append(put_us(never_heard))
    with heard.subscribe() as subscription:
        one.append(put_us(heard))
        subscription.take()
    closed.append(put_us(heard))

many = make_manager(260_000 * ENTRY_BYTES)
fill(many, make_keys(260_000, seed=7))
ledger = many._tiers.ledger._native  # the one step of a snapshot that nothing can interrupt
steps_ms = []
for _ in range(5):
    start = time.perf_counter()
    ledger.snapshot()
    steps_ms.append((time.perf_counter() - start) * 1e3)
base, after = statistics.median(never), statistics.median(closed)
with_one = statistics.median(one)
report(
    {
        "put_us_never_a_subscriber": base,
        "put_us_after_the_subscriber_left": after,
        "put_us_with_one_subscriber": with_one,
        "no_subscriber_share": after / base - 1,
        "one_subscriber_us_per_event": (with_one - base) / 2,
        "one_subscriber_share": with_one / base - 1,
        "snapshot_step_ms": statistics.median(steps_ms),
    }
)
