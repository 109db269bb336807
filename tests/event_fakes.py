"""What tests of cache events need: a replay, a callback that can be waited for, tiers that lose."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence

from builders import CPU
from fakes import ReportingPlugin, StoredBytes

from lmcache.v1.storage_backend.cache_events import EventKind, RemovalReason

STORED, REMOVED, LOST, CLOSED = (
    EventKind.STORED,
    EventKind.REMOVED,
    EventKind.LOST,
    EventKind.CLOSED,
)
BOUND_SECONDS = 60  # how long a test waits for another thread before it fails


class Mirror:
    """The residents by a snapshot and the events after it; checks what each event promises.

    Made for one subscription that hears everything: numbers must follow without a gap.
    """

    def __init__(self, snapshot):
        self.incarnation = snapshot.incarnation
        self.first_seq = self.seq = snapshot.seq
        # key -> tier -> (generation, bytes); None: a copy from before the snapshot
        self.copies = {k: dict.fromkeys(tiers) for k, tiers in snapshot.residents.items()}
        self.is_closed = False
        self._replacing = None

    @property
    def residents(self):
        return {key: frozenset(tiers) for key, tiers in self.copies.items()}

    def keys_in(self, tier):
        return {key for key, tiers in self.copies.items() if tier in tiers}

    def apply(self, events):
        for event in events:
            assert not self.is_closed, f"after CLOSED: {event}"
            assert event.incarnation == self.incarnation
            assert event.seq == self.seq + 1, f"{event} follows event {self.seq}"
            self.seq = event.seq
            if event.kind is CLOSED:
                assert (event.key, event.tier, event.reason) == (None, None, None)
                self.is_closed = True
            elif event.kind is STORED:
                self._store(event)
            else:
                assert event.kind is REMOVED
                self._remove(event)
            assert event.kind is CLOSED or event.still_in == self._expected_still_in(event)
        assert self._replacing is None, "a REMOVED(REPLACED) was delivered without its STORED"

    def _store(self, event):
        tiers = self.copies.setdefault(event.key, {})
        assert event.tier not in tiers, f"stored twice: {event}"
        assert event.generation == event.seq
        assert event.reason is None
        assert self._replacing in (None, (event.key, event.tier))
        self._replacing = None
        tiers[event.tier] = (event.generation, event.size_bytes)

    def _remove(self, event):
        assert self._replacing is None
        tiers = self.copies.get(event.key, {})
        assert event.tier in tiers, f"removed, but it was not there: {event}"
        copy = tiers.pop(event.tier)
        if copy is None:
            assert 0 < event.generation <= self.first_seq
        else:
            assert (event.generation, event.size_bytes) == copy
        if not tiers:
            del self.copies[event.key]
        if event.reason is RemovalReason.REPLACED:
            self._replacing = (event.key, event.tier)

    def _expected_still_in(self, event):
        held = frozenset(self.copies.get(event.key, ()))
        return held | {event.tier} if event.reason is RemovalReason.REPLACED else held


def follow(sm, **options):
    """A subscription to everything from now on, and the mirror of what is resident now."""
    subscription = sm.subscribe(**options)
    return subscription, Mirror(sm.snapshot())


def brief(events):
    """Events as (kind, chunk hash, tier, reason), for comparing whole lists."""
    return [(e.kind, None if e.key is None else e.key.chunk_hash, e.tier, e.reason) for e in events]


def stored(chunk_hash, tier=CPU):
    return (STORED, chunk_hash, tier, None)


def removed(chunk_hash, reason, tier=CPU):
    return (REMOVED, chunk_hash, tier, reason)


class WatchfulKeys(Sequence):
    """Keys as a caller's own sequence, which runs `when_read(n)` each n-th time it is read."""

    def __init__(self, keys, when_read):
        self._keys, self._when_read, self._num_reads = keys, when_read, 0

    def __len__(self):
        return len(self._keys)

    def __getitem__(self, index):
        return self._keys[index]

    def __iter__(self):
        self._num_reads += 1
        self._when_read(self._num_reads)
        return iter(self._keys)


class Recorder:
    """A callback that keeps what it is given, and lets a test wait for it."""

    def __init__(self, then=None):
        self.batches = []
        self.threads = []
        self._then = then
        self._changed = threading.Condition()

    def __call__(self, events):
        with self._changed:
            self.batches.append(events)
            self.threads.append(threading.current_thread())
            self._changed.notify_all()
        if self._then is not None:
            self._then(events)

    @property
    def events(self):
        return [event for batch in list(self.batches) for event in batch]

    def wait_until(self, is_enough):
        with self._changed:
            came = self._changed.wait_for(lambda: is_enough(self.events), BOUND_SECONDS)
        assert came, f"waited in vain; the callback was given {brief(self.events)}"
        return self.events

    def wait_for_count(self, count):
        return self.wait_until(lambda events: len(events) >= count)

    def wait_for_close(self):
        return self.wait_until(lambda events: any(event.kind is CLOSED for event in events))


class BoundedPlugin(ReportingPlugin):
    """A reporting tier of a few entries: it evicts, replaces, clears, expires and fails."""

    max_entries = 4

    def batched_submit_put_task(self, keys, objs, transfer_spec=None, on_complete_callback=None):
        with self.lock:
            for key, obj in zip(keys, objs, strict=True):
                old, new = self.data.get(key), obj.raw_tensor.clone()
                self.data[key] = new
                self.data.move_to_end(key)
                if old is None:
                    self.page.stored(key, StoredBytes(new.numel()))
                elif old.numel() != new.numel():
                    self.page.replaced(key, StoredBytes(old.numel()), StoredBytes(new.numel()))
            while len(self.data) > self.max_entries:
                self._drop_locked(next(iter(self.data)), RemovalReason.CAPACITY)

    def get_blocking(self, key):
        with self.lock:
            data = self.data.get(key)
        return None if data is None else self._read_into_pool(data)

    def drop(self, key, reason):
        with self.lock:
            self._drop_locked(key, reason)

    def clear(self):
        with self.lock:
            for key in list(self.data):
                self._drop_locked(key, RemovalReason.CLEAR)
        return 0

    def _drop_locked(self, key, reason):
        data = self.data.pop(key)
        self.page.removed(key, StoredBytes(data.numel()), reason)


def in_child(check):
    """Fork, run `check` in the child, and fail with its traceback when it raises or hangs."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(BOUND_SECONDS)
        try:
            check()
        except BaseException:
            os.write(write_end, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        report = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert not report, report
    assert status == 0, f"the child ended with status {status}: it hung, or crashed"


def in_thread(work):
    """Run `work` on a thread of its own; fail when it raises or does not return."""
    failures = []

    def run():
        try:
            work()
        except BaseException:
            failures.append(traceback.format_exc())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(BOUND_SECONDS)
    assert not thread.is_alive(), "the other thread hangs"
    assert not failures, failures[0]


def run_together(works):
    """Run each of `works` on a thread of its own, all from one barrier; fail if one does."""
    barrier = threading.Barrier(len(works))
    failures = []

    def run(work):
        try:
            barrier.wait(BOUND_SECONDS)
            work()
        except BaseException:
            failures.append(traceback.format_exc())

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # as many interleavings as the interpreter allows
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * BOUND_SECONDS)
    finally:
        sys.setswitchinterval(interval_s)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    assert not failures, failures[0]
