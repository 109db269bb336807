"""The CPU tier against a plain list: any sequence of calls leaves the same order and victims.

All objects have one size, so that the policy alone decides who leaves.
"""

import pytest
import torch
from builders import (
    CHUNK_BYTES,
    evict,
    gauges,
    hold,
    is_filled,
    keys,
    make_config,
    make_metadata,
    order,
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmcache.v1.memory_format import MemoryFormat
from lmcache.v1.storage_backend.placement import Placement
from lmcache.v1.storage_backend.storage_manager import StorageManager
from lmcache.v1.storage_backend.touch import TouchVerdict

NUM_CHUNKS = 6
NUM_KEYS = 10

numbers = st.integers(1, NUM_KEYS)
batches = st.lists(numbers, min_size=1, max_size=4)
owners = st.sampled_from(["A", "B", None])


class ListModel:
    """What must be true, written as plainly as can be.

    LRU orders entries by their last use, LFU by uses and then by the last use. Cold entries
    come before all others of their number of uses, the newest first.
    """

    def __init__(self, is_lfu):
        self.is_lfu = is_lfu
        self.uses = {}
        self.stamps = {}
        self.clock = 0
        self.cold_clock = 0

    def order(self):
        return sorted(self.stamps, key=lambda n: (self.uses[n], self.stamps[n]))

    def use(self, given):
        for n in dict.fromkeys(reversed(given)):  # an entry's last position from the end ...
            if n in self.stamps and self.is_lfu:
                self.uses[n] += 1
        for n in reversed(given):  # ... and the first position decides where it ends
            if n in self.stamps:
                self.clock += 1
                self.stamps[n] = self.clock

    def insert(self, n, is_cold):
        self.uses[n] = 1 if self.is_lfu and not is_cold else 0
        if is_cold:
            self.cold_clock -= 1
            self.stamps[n] = self.cold_clock
        else:
            self.clock += 1
            self.stamps[n] = self.clock

    def demote(self, given):
        for n in given:
            if n in self.stamps:
                self.uses[n] = 0
                self.cold_clock -= 1
                self.stamps[n] = self.cold_clock

    def remove(self, n):
        del self.uses[n], self.stamps[n]


class HotCacheMachine(RuleBasedStateMachine):
    """Drives a storage manager and the model side by side."""

    policy = "LRU"

    def __init__(self):
        super().__init__()
        self.sm = StorageManager(make_config(NUM_CHUNKS, cache_policy=self.policy), make_metadata())
        self.model = ListModel(self.policy == "LFU")
        self.pins = {}  # (owner, n) -> [object, count, is its use counted]
        self.readers = []  # (n, object)
        self.taken = []  # objects that callers allocated and keep
        self.dtypes = {}

    # --- what the model knows of holders ---------------------------------------------------------
    def is_held(self, n):
        resident = self.sm.local_cpu_backend.hot_cache[key(n)]
        holders = [obj for obj, _, _ in self.pins.values()] + [obj for _, obj in self.readers]
        return any(obj is resident for obj in holders)

    def used_elsewhere(self):
        """Chunks taken by callers, and by entries that were removed while held."""
        listed = set(map(id, self.sm.local_cpu_backend.hot_cache.values()))
        holders = [obj for obj, _, _ in self.pins.values()] + [obj for _, obj in self.readers]
        return len(self.taken) + len({id(obj) for obj in holders} - listed)

    def make_room(self, eviction=True):
        """The entry that an allocation must evict, if any, and whether it succeeds."""
        if len(self.model.stamps) + self.used_elsewhere() < NUM_CHUNKS:
            return None, True
        free = [n for n in self.model.order() if not self.is_held(n)] if eviction else []
        return (free[0], True) if free else (None, False)

    def allocate(self, dtype=torch.bfloat16, eviction=True):
        victim, must_succeed = self.make_room(eviction)
        shape = torch.Size([CHUNK_BYTES // dtype.itemsize])
        obj = self.sm.allocate(shape, dtype, MemoryFormat.BINARY, eviction, busy_loop=False)
        assert (obj is not None) == must_succeed
        if victim is not None:
            self.model.remove(victim)
            del self.dtypes[victim]
        return obj

    # --- storing ---------------------------------------------------------------------------------
    @rule(n=numbers, is_cold=st.booleans(), dtype=st.sampled_from([torch.bfloat16, torch.uint8]))
    def put(self, n, is_cold, dtype):
        obj = self.allocate(dtype)
        if obj is None:
            return
        obj.raw_tensor.fill_(n)
        placement = Placement.COLD if is_cold else Placement.YOUNG
        self.sm.batched_put([key(n)], [obj], placement=placement)
        if n not in self.model.stamps:
            self.model.insert(n, is_cold)
            self.dtypes[n] = dtype
        elif self.dtypes[n] != dtype:
            self.model.remove(n)
            self.model.insert(n, is_cold)
            self.dtypes[n] = dtype
        elif not is_cold:
            self.model.use([n])

    @rule(first=st.integers(1, NUM_KEYS - 2), is_cold=st.booleans())
    def put_three_at_once(self, first, is_cold):
        given = [first, first + 1, first + 2]
        if any(n in self.model.stamps for n in given):
            return
        if NUM_CHUNKS - self.used_elsewhere() - len(self.model.stamps) < 3:
            return
        objs = [self.allocate() for _ in given]
        for n, obj in zip(given, objs, strict=True):
            obj.raw_tensor.fill_(n)
        placement = Placement.COLD if is_cold else Placement.YOUNG
        self.sm.batched_put([key(n) for n in given], objs, placement=placement)
        for n in given if is_cold else reversed(given):
            self.model.insert(n, is_cold)
            self.dtypes[n] = torch.bfloat16

    @rule(n=numbers)
    def put_into_spare_room(self, n):
        obj = self.allocate(eviction=False)
        if obj is None:
            return
        obj.raw_tensor.fill_(n)
        self.sm.batched_put([key(n)], [obj], placement=Placement.SPARE)
        if n not in self.model.stamps:
            self.model.insert(n, True)
        elif self.dtypes[n] != torch.bfloat16:
            self.model.remove(n)
            self.model.insert(n, True)
        self.dtypes[n] = torch.bfloat16

    # --- using -----------------------------------------------------------------------------------
    @rule(given=batches)
    def touch(self, given):
        result = self.sm.touch([key(n) for n in given])

        resident = self.model.stamps
        assert [verdict is TouchVerdict.REFRESHED for verdict in result] == [
            n in resident for n in given
        ]
        assert result.any_gone == any(n not in resident for n in given)
        self.model.use(given)

    @rule(given=batches)
    def demote(self, given):
        given = list(dict.fromkeys(given))
        result = self.sm.demote([key(n) for n in given])

        assert result.gone == sum(n not in self.model.stamps for n in given)
        self.model.demote(given)

    @rule(given=batches)
    def get(self, given):
        objs = self.sm.batched_get([key(n) for n in given])

        assert [obj is not None for obj in objs] == [n in self.model.stamps for n in given]
        for n, obj in zip(given, objs, strict=True):
            if obj is not None:
                assert is_filled(obj, n)
                obj.ref_count_down()
        self.model.use(given)

    # --- holding ---------------------------------------------------------------------------------
    @rule(n=numbers)
    def start_reading(self, n):
        obj = hold(self.sm, key(n))
        assert (obj is not None) == (n in self.model.stamps)
        if obj is not None:
            self.readers.append((n, obj))

    @precondition(lambda self: self.readers)
    @rule(which=st.integers(0, 99))
    def stop_reading(self, which):
        n, obj = self.readers.pop(which % len(self.readers))
        assert obj.is_valid()
        assert is_filled(obj, n)
        obj.ref_count_down()

    @rule(n=numbers, owner=owners)
    def pin(self, n, owner):
        is_there = self.sm.contains(key(n), pin=True, owner=owner) is not None
        assert is_there == (n in self.model.stamps)
        if not is_there:
            return
        obj = self.sm.local_cpu_backend.hot_cache[key(n)]
        pin = self.pins.get((owner, n))
        if pin is None:
            self.pins[owner, n] = [obj, 1, False]
        elif pin[0] is not obj:
            pin[0], pin[1] = obj, 1
        elif owner is None:
            pin[1], pin[2] = pin[1] + 1, False

    @rule(n=numbers, owner=owners)
    def unpin(self, n, owner):
        unmatched_before = self.sm.local_cpu_backend.pins.num_unmatched_releases
        self.sm.batched_unpin([key(n)], owner=owner)
        pin = self.pins.get((owner, n))
        unmatched = self.sm.local_cpu_backend.pins.num_unmatched_releases - unmatched_before
        assert unmatched == (pin is None)
        if pin is None:
            return
        if not pin[2]:
            self.model.use([n])
            pin[2] = True
        pin[1] -= 1
        if pin[1] == 0:
            del self.pins[owner, n]

    @rule(owner=owners)
    def touch_cache(self, owner):
        self.sm.touch_cache(owner)
        uncounted = [n for (who, n), pin in self.pins.items() if who == owner and not pin[2]]
        self.model.use(uncounted)
        for n in uncounted:
            self.pins[owner, n][2] = True

    # --- taking away -----------------------------------------------------------------------------
    @rule(n=numbers)
    def remove(self, n):
        assert self.sm.remove(key(n)) == (n in self.model.stamps)
        if n in self.model.stamps:
            self.model.remove(n)
            del self.dtypes[n]

    @rule()
    def clear(self):
        for n in [n for n in self.model.order() if not self.is_held(n)]:
            self.model.remove(n)
            del self.dtypes[n]
        self.sm.clear()

    @rule()
    def take_memory(self):
        obj = self.allocate()
        if obj is not None:
            self.taken.append(obj)

    @precondition(lambda self: self.taken)
    @rule()
    def give_memory_back(self):
        self.taken.pop().ref_count_down()

    @precondition(lambda self: any(not self.is_held(n) for n in self.model.stamps))
    @rule()
    def evict_one(self):
        expected = next(n for n in self.model.order() if not self.is_held(n))
        assert evict(self.sm) == [expected]
        self.model.remove(expected)
        del self.dtypes[expected]

    # --- always ----------------------------------------------------------------------------------
    @invariant()
    def the_order_is_that_of_the_model(self):
        assert order(self.sm) == self.model.order()

    @invariant()
    def the_next_victims_are_the_coldest_that_nobody_holds(self):
        backend = self.sm.local_cpu_backend
        named = backend.cache_policy.get_evict_candidates(backend.hot_cache, NUM_CHUNKS)

        free = [n for n in self.model.order() if not self.is_held(n)]
        assert sorted(k.chunk_hash for k in named) == sorted(free)
        assert [k.chunk_hash for k in named] == free

    @invariant()
    def bytes_are_conserved(self):
        now = gauges(self.sm)
        num_held = sum(self.is_held(n) for n in self.model.stamps)

        assert now["cached_bytes"] == len(self.model.stamps) * CHUNK_BYTES
        assert now["held_bytes"] == num_held * CHUNK_BYTES
        assert now["num_blocks"] == len(self.model.stamps) + self.used_elsewhere()
        assert now["num_leaked"] == 0

    @invariant()
    def what_is_held_is_intact(self):
        for obj, _, _ in self.pins.values():
            assert obj.is_valid()
        for n, obj in self.readers:
            assert is_filled(obj, n)

    @invariant()
    def the_books_are_in_order(self):
        self.sm.check_integrity()
        assert set(self.sm.snapshot().residents) == {key(n) for n in self.model.stamps}
        assert self.sm.local_cpu_backend.pins.num_pins == sum(p[1] for p in self.pins.values())

    def teardown(self):
        for _, obj in self.readers:
            obj.ref_count_down()
        for obj in self.taken:
            obj.ref_count_down()
        for (owner, n), pin in self.pins.items():
            for _ in range(pin[1]):
                self.sm.batched_unpin([key(n)], owner=owner)
        self.sm.clear()
        assert gauges(self.sm)["free_bytes"] == NUM_CHUNKS * CHUNK_BYTES
        self.sm.close()


class LFUMachine(HotCacheMachine):
    """The same under LFU."""

    policy = "LFU"


def key(n):
    return keys(1, first=n)[0]


SHORT = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
LONG = settings(SHORT, max_examples=3000, stateful_step_count=80, derandomize=False)

TestLRU = HotCacheMachine.TestCase
TestLRU.settings = SHORT
TestLFU = LFUMachine.TestCase
TestLFU.settings = SHORT


@pytest.mark.slow
class TestLRUAtLength(HotCacheMachine.TestCase):
    """The nightly profile."""

    settings = LONG


@pytest.mark.slow
class TestLFUAtLength(LFUMachine.TestCase):
    """The nightly profile."""

    settings = LONG
