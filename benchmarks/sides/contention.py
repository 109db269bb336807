"""A refresh call beside an evicting writer: CPU time of its thread plus its wait for the lock.

The wait for the interpreter (wall time less both) is reported apart.
"""

import itertools
import random
import threading
import time
from typing import Any

from common import ENTRY_BYTES, fill, is_fork, make_keys, make_manager, parse, put, report

options = parse(__doc__, resident=100_000, held=0, calls=1000, batch=256, hot=20_000, seconds=20)
manager = make_manager(options.resident * ENTRY_BYTES)
keys = make_keys(options.resident + 200_000)
fill(manager, keys[: options.resident])
hot_keys = keys[options.resident - options.hot : options.resident]  # used again and again
backend = manager.local_cpu_backend


class TimedLock:
    """The cache's lock, telling how long the refreshing thread waited for its release.

    What passes between the release and this thread running again is a wait for the interpreter.
    """

    def __init__(self, lock: Any) -> None:
        self.lock = lock
        self.waited_ns = 0
        self.released_at_ns = 0

    def acquire(self, *args: Any) -> bool:
        """Take the lock."""
        if self.lock.acquire(blocking=False):
            return True
        start = time.perf_counter_ns()
        self.lock.acquire()
        if threading.current_thread() is threading.main_thread():
            end = time.perf_counter_ns() if is_fork() else self.released_at_ns
            self.waited_ns += max(0, end - start)
        return True

    def release(self) -> None:
        """Give the lock back."""
        self.released_at_ns = time.perf_counter_ns()
        self.lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *unused: object) -> None:
        self.release()


lock = TimedLock(backend.cpu_lock)
if is_fork():
    # What touch takes. The writer's release happens inside the core and cannot be timed: the wait
    # counts until this thread runs again.
    backend.order_lock = lock
else:
    backend.cpu_lock = lock


def refresh(batch: list[Any]) -> None:
    """Refresh a batch, tail first, as an engine without `touch` has to."""
    with lock:
        for key in reversed(batch):
            if key in backend.hot_cache:
                backend.cache_policy.update_on_hit(key, backend.hot_cache)


if options.held:
    coldest = [key for _, key in zip(range(options.held), iter(backend.hot_cache), strict=False)]
    for memory_obj in [backend.hot_cache[key] for key in coldest]:
        memory_obj.ref_count_up()

stop = threading.Event()
written = 0


def write() -> None:
    """Store keys that are not resident, in a circle, until told to stop."""
    global written
    for key in itertools.cycle(keys[options.resident :]):
        if stop.is_set():
            return
        put(manager, key)
        written += 1


writer = threading.Thread(target=write, daemon=True)
numbers = random.Random(1)
batches = [numbers.sample(hot_keys, options.batch) for _ in range(options.calls)]
call = manager.touch if is_fork() else refresh
cpu_us, lock_us, own_us, interpreter_us = [], [], [], []
give_up_at = time.monotonic() + options.seconds
writer.start()
for batch in batches:
    stop.wait(0.001)  # the engine's own work: meanwhile the writer runs
    lock.waited_ns = 0
    wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
    call(batch)
    cpu = time.thread_time_ns() - cpu
    wall = time.perf_counter_ns() - wall
    cpu_us.append(cpu / 1e3)
    lock_us.append(lock.waited_ns / 1e3)
    own_us.append((cpu + lock.waited_ns) / 1e3)
    interpreter_us.append(max(0, wall - cpu - lock.waited_ns) / 1e3)
    if time.monotonic() > give_up_at:
        break
stop.set()


def percentile(values: list[float], share: float) -> float:
    """Return the value below which `share` of them lie."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


report(
    {
        "refresh_p99_us": percentile(own_us, 0.99),
        "refresh_p50_us": percentile(own_us, 0.5),
        "cpu_p99_us": percentile(cpu_us, 0.99),
        "lock_wait_p99_us": percentile(lock_us, 0.99),
        "calls": len(own_us),
        "interpreter_wait_p99_us": percentile(interpreter_us, 0.99),
        "writes": written,
    }
)
