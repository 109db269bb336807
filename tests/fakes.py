"""Fakes at the process's edges: a clock, and tiers as a plug-in author would write them."""

import threading
from collections import OrderedDict

import torch

from lmcache.v1.memory_format import MemoryFormat
from lmcache.v1.storage_backend.abstract_backend import Motion, StoragePluginInterface
from lmcache.v1.storage_backend.cache_events import RemovalReason


class FakeClock:
    """A clock whose hands only the test turns."""

    def __init__(self, now_s=1000.0):
        self.now_s = now_s

    def monotonic(self):
        return self.now_s

    def advance(self, seconds):
        self.now_s += seconds


class FakeHostPinner:
    """A device runtime that page-locks, or refuses with its own words."""

    name = "FakeRuntime"

    def __init__(self, refusal=None):
        self.refusal = refusal
        self.pinned = {}

    def pin(self, address, size_bytes):
        if self.refusal is not None:
            raise self.refusal
        self.pinned[address] = size_bytes

    def unpin(self, address):
        del self.pinned[address]


class OldPlugin(StoragePluginInterface):
    """A tier written for 0.5.6: it knows nothing of touch, placement, owners or residency."""

    def __init__(self, local_cpu_backend=None, **settings):
        super().__init__(local_cpu_backend=local_cpu_backend, **settings)
        self.data = OrderedDict()
        self.calls = []
        self.is_closed = False

    def contains(self, key, pin=False):
        self.calls.append("contains")
        return key in self.data

    def exists_in_put_tasks(self, key):
        return False

    def batched_submit_put_task(self, keys, objs, transfer_spec=None, on_complete_callback=None):
        self.calls.append("put")
        for key, obj in zip(keys, objs, strict=True):
            self.data[key] = obj.raw_tensor.clone()

    def get_blocking(self, key):
        self.calls.append("get")
        stored = self.data.get(key)
        return None if stored is None else self._read_into_pool(stored)

    def _read_into_pool(self, stored):
        obj = self.local_cpu_backend.allocate(
            torch.Size([stored.numel()]), torch.uint8, MemoryFormat.BINARY, busy_loop=False
        )
        if obj is not None:
            obj.raw_tensor.copy_(stored)
        return obj

    def pin(self, key):
        self.calls.append("pin")
        return key in self.data

    def unpin(self, key):
        return key in self.data

    def remove(self, key, force=True):
        self.calls.append("remove")
        return self.data.pop(key, None) is not None

    def get_allocator_backend(self):
        return self.local_cpu_backend

    def close(self):
        self.is_closed = True


class StoredBytes:
    """What the reporting tier tells the ledger of a copy."""

    def __init__(self, nbytes):
        self.nbytes = nbytes

    def get_size(self):
        return self.nbytes


class ReportingPlugin(OldPlugin):
    """A tier with a lock and an order of its own, which reports its residency.

    `forbid_reading` makes every call that would do I/O fail the test.
    """

    reports_residency = True

    def __init__(self, local_cpu_backend=None, **settings):
        super().__init__(local_cpu_backend, **settings)
        self.lock = self.order_lock = threading.Lock()
        self.page = None
        self.searchable = True

    @property
    def is_searchable(self):
        return self.searchable

    def attach_ledger(self, page):
        self.page = page

    def batched_submit_put_task(self, keys, objs, transfer_spec=None, on_complete_callback=None):
        self.calls.append("put")
        with self.lock:
            for key, obj in zip(keys, objs, strict=True):
                is_new = key not in self.data
                self.data[key] = obj.raw_tensor.clone()
                if is_new:
                    self.page.stored(key, StoredBytes(obj.get_size()))

    def move_in_order(self, keys, motion):
        assert self.lock.locked()
        self.calls.append(f"move {motion.value}")
        answers = bytearray(len(keys))
        positions = range(len(keys))
        for position in positions if motion is Motion.DEMOTE else reversed(positions):
            if keys[position] in self.data:
                self.data.move_to_end(keys[position], last=motion is not Motion.DEMOTE)
                answers[position] = 1
        return bytes(answers)

    def remove(self, key, force=True):
        self.calls.append("remove")
        with self.lock:
            stored = self.data.pop(key, None)
            if stored is not None:
                self.page.removed(key, StoredBytes(stored.numel()), RemovalReason.EXPLICIT)
        return stored is not None


class PlacingPlugin(ReportingPlugin):
    """A reporting tier that also takes placements, and remembers which."""

    takes_placement = True

    def __init__(self, local_cpu_backend=None, **settings):
        super().__init__(local_cpu_backend, **settings)
        self.placements = []

    def batched_submit_placed_put(
        self, keys, objs, placement, transfer_spec=None, on_complete_callback=None
    ):
        self.placements.append(placement)
        self.batched_submit_put_task(keys, objs)


class RaisingPlugin(ReportingPlugin):
    """A reporting tier that raises while moving keys: all of them, or those in `poison`."""

    def __init__(self, local_cpu_backend=None, poison=None, **settings):
        super().__init__(local_cpu_backend, **settings)
        self.poison = poison

    def move_in_order(self, keys, motion):
        if self.poison is None or any(key in self.poison for key in keys):
            raise RuntimeError("this tier is broken")
        return super().move_in_order(keys, motion)
