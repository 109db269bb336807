"""A refresh call beside an evicting writer: CPU time of its thread plus its wait for the lock.

The wait for the interpreter (wall time less both) is reported apart.
"""

import random
import threading
import time
from typing import Any

from common import ENTRY_BYTES, fill, is_fork, make_keys, make_manager, parse, put, report

options = parse(__doc__, resident=100_000, held=0, calls=1000, batch=256)
manager = make_manager(options.resident * ENTRY_BYTES)
keys = make_keys(options.resident + 400_000)
fill(manager, keys[: options.resident])
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
            self.waited_ns += max(0, self.released_at_ns - start)
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
backend.cpu_lock = lock
if is_fork():
    backend.order_lock = backend.hot.lock = lock  # what touch and the writer take


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
    """Store fresh keys until told to stop."""
    global written
    for key in keys[options.resident :]:
        if stop.is_set():
            return
        put(manager, key)
        written += 1


writer = threading.Thread(target=write, daemon=True)
numbers = random.Random(1)
batches = [numbers.sample(keys[: options.resident], options.batch) for _ in range(options.calls)]
call = manager.touch if is_fork() else refresh
own_us, interpreter_us = [], []
writer.start()
for batch in batches:
    lock.waited_ns = 0
    wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
    call(batch)
    cpu = time.thread_time_ns() - cpu
    wall = time.perf_counter_ns() - wall
    own_us.append((cpu + lock.waited_ns) / 1e3)
    interpreter_us.append(max(0, wall - cpu - lock.waited_ns) / 1e3)
stop.set()


def percentile(values: list[float], share: float) -> float:
    """Return the value below which `share` of them lie."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


report(
    {
        "refresh_p99_us": percentile(own_us, 0.99),
        "refresh_p50_us": percentile(own_us, 0.5),
        "interpreter_wait_p99_us": percentile(interpreter_us, 0.99),
        "writes": written,
    }
)
