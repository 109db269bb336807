"""What cache events cost the eviction path: without a subscriber, and with one. This fork only."""

import statistics
import time

from common import ENTRY_BYTES, fill, make_keys, make_manager, parse, put, report

options = parse(__doc__, resident=100_000, puts=8000, rounds=7)
manager = make_manager(options.resident * ENTRY_BYTES)
keys = make_keys(options.resident + options.puts * options.rounds * 4)
fill(manager, keys[: options.resident])
fresh = iter(keys[options.resident :])


def put_us() -> float:
    """Return microseconds per evicting put, which makes two events."""
    start = time.perf_counter()
    for _ in range(options.puts):
        put(manager, next(fresh))
    return (time.perf_counter() - start) / options.puts * 1e6


never, closed, one = [], [], []
put_us()
for _ in range(options.rounds):
    never.append(put_us())
for _ in range(options.rounds):
    subscription = manager.subscribe()
    one.append(put_us())
    subscription.take()
    subscription.close()
    closed.append(put_us())
base, after = statistics.median(never), statistics.median(closed)
with_one = statistics.median(one)
report(
    {
        "put_us_before_any_subscriber": base,
        "put_us_after_the_subscriber_left": after,
        "put_us_with_one_subscriber": with_one,
        "no_subscriber_share": max(0.0, after / base - 1),
        "one_subscriber_us_per_event": (with_one - after) / 2,
        "one_subscriber_share": with_one / after - 1,
    }
)
