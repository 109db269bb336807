"""Any sequence of cache calls: the events replayed from a snapshot are the residents, at each step.

On every change the machines run for seconds, the same steps each time. `slow` (nightly) runs other
steps every time, 5,000 in a run.
"""

from unittest import mock

import hypothesis.internal.conjecture.engine
import hypothesis.stateful
import pytest
from builders import CHUNK_BYTES, CPU, allocate, hold, keys, make_config, make_metadata, put
from event_fakes import BoundedPlugin, follow
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmcache.v1.storage_backend.cache_events import EventKind, RemovalReason
from lmcache.v1.storage_backend.placement import Placement
from lmcache.v1.storage_backend.storage_manager import StorageManager
from lmcache.v1.storage_backend.touch import TouchVerdict

NUM_KEYS = 12
NUM_CHUNKS = 6
KEYS = keys(NUM_KEYS)
A_KEY = st.sampled_from(KEYS)
SOME_KEYS = st.lists(A_KEY, min_size=1, max_size=5)
A_SIZE = st.sampled_from([CHUNK_BYTES, CHUNK_BYTES // 2, 2 * CHUNK_BYTES])
A_PLACEMENT = st.sampled_from(list(Placement))
HAS_RECENCY = ("LRU", "LFU")


class EventMachine(RuleBasedStateMachine):
    """One CPU tier."""

    lower_tiers = ()
    longest_run = 0  # steps after which the replay was compared, over all runs

    @initialize(policy=st.sampled_from(["LRU", "LFU", "FIFO", "MRU"]), resident=SOME_KEYS)
    def open(self, policy, resident):
        self.policy = policy
        self.sm = StorageManager(make_config(NUM_CHUNKS, cache_policy=policy), make_metadata())
        for name in self.lower_tiers:
            tier = BoundedPlugin(local_cpu_backend=self.sm.local_cpu_backend)
            self.sm.storage_backends[name] = tier
        for key in resident:
            put(self.sm, key)
        self.subscription, self.mirror = follow(self.sm)
        self.removals = self.sm.subscribe(kinds=[EventKind.REMOVED], tiers=[CPU])
        self.readers = []
        self.pinned = []
        self.num_steps = 0

    # --- storing -----------------------------------------------------------------------------
    @rule(key=A_KEY, nbytes=A_SIZE, placement=A_PLACEMENT)
    def put(self, key, nbytes, placement):
        put(self.sm, key, nbytes, placement)

    @rule(key=A_KEY)
    def duplicate_put(self, key):
        for _ in range(2):
            put(self.sm, key)

    @rule(some_keys=SOME_KEYS, placement=A_PLACEMENT)
    def put_batch(self, some_keys, placement):
        made = [allocate(self.sm, eviction=placement is not Placement.SPARE) for _ in some_keys]
        pairs = [(key, obj) for key, obj in zip(some_keys, made, strict=True) if obj is not None]
        self.sm.batched_put([k for k, _ in pairs], [obj for _, obj in pairs], placement=placement)

    @rule(some_keys=SOME_KEYS)
    def put_one_object_under_several_keys(self, some_keys):
        obj = allocate(self.sm)
        if obj is None:
            return
        for _ in some_keys[1:]:
            obj.ref_count_up()
        self.sm.batched_put(some_keys, [obj] * len(some_keys))

    @rule(nbytes=A_SIZE)
    def allocate_and_release(self, nbytes):
        obj = allocate(self.sm, nbytes)
        if obj is not None:
            obj.ref_count_down()

    # --- using -------------------------------------------------------------------------------
    @rule(key=A_KEY)
    def get(self, key):
        obj = self.sm.get(key)
        if obj is not None:
            obj.ref_count_down()

    @rule(some_keys=SOME_KEYS)
    def batched_get(self, some_keys):
        for obj in self.sm.batched_get(some_keys):
            if obj is not None:
                obj.ref_count_down()

    @rule(some_keys=SOME_KEYS, is_demotion=st.booleans())
    def touch_or_demote(self, some_keys, is_demotion):
        result = self.sm.demote(some_keys) if is_demotion else self.sm.touch(some_keys)
        self.replay()
        assert (result.seq, result.incarnation) == (self.mirror.seq, self.mirror.incarnation)
        for key, verdict, location in zip(some_keys, result, result.locations, strict=True):
            tiers = self.mirror.residents.get(key, frozenset())
            first = next((name for name in self.tier_names if name in tiers), None)
            assert location == first
            is_moved = first == CPU and self.policy in HAS_RECENCY
            held = TouchVerdict.REFRESHED if is_moved else TouchVerdict.PRESENT
            assert verdict is (held if tiers else TouchVerdict.GONE)

    @rule(key=A_KEY)
    def pin(self, key):
        if self.sm.contains(key, pin=True) == CPU:
            self.pinned.append(key)

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self):
        self.sm.batched_unpin([self.pinned.pop(0)])

    @rule(key=A_KEY)
    def hold_reader(self, key):
        reader = hold(self.sm, key)
        if reader is not None:
            self.readers.append(reader)

    @precondition(lambda self: self.readers)
    @rule()
    def release_reader(self):
        self.readers.pop(0).ref_count_down()

    # --- removing ----------------------------------------------------------------------------
    @rule(some_keys=SOME_KEYS)
    def remove(self, some_keys):
        self.sm.batched_remove(some_keys)

    @rule()
    def clear(self):
        self.sm.clear()

    @rule(enabled=st.booleans())
    def switch_hot_cache(self, enabled):
        self.sm.set_hot_cache(enabled)

    # --- what must hold ----------------------------------------------------------------------
    @property
    def tier_names(self):
        return (CPU, *self.lower_tiers)

    def replay(self):
        told = self.subscription.take()
        self.mirror.apply(told)
        mine = [event for event in told if event.kind is EventKind.REMOVED and event.tier == CPU]
        assert self.removals.take() == mine

    @invariant()
    def the_replay_is_the_truth(self):
        self.num_steps += 1
        EventMachine.longest_run = max(EventMachine.longest_run, self.num_steps)
        self.replay()
        snapshot = self.sm.snapshot()
        assert self.mirror.residents == snapshot.residents
        assert self.mirror.seq == snapshot.seq
        assert self.mirror.keys_in(CPU) == set(self.sm.local_cpu_backend.hot_cache)
        for name in self.lower_tiers:
            assert self.mirror.keys_in(name) == set(self.sm.storage_backends[name].data)
        self.sm.check_integrity()

    def teardown(self):
        for reader in self.readers:
            reader.ref_count_down()
        self.sm.batched_unpin(self.pinned)
        self.sm.close()
        self.replay_to_the_end()

    def replay_to_the_end(self):
        self.mirror.apply(self.subscription.take())
        assert self.mirror.is_closed
        assert self.mirror.keys_in(CPU) == set()
        assert self.subscription.take() == []


class TieredEventMachine(EventMachine):
    """A CPU tier over two tiers that report, of which each loses copies by itself."""

    lower_tiers = ("near", "far")

    @rule(key=A_KEY, location=st.sampled_from([CPU, *lower_tiers]), nbytes=A_SIZE)
    def put_to(self, key, location, nbytes):
        put(self.sm, key, nbytes, location=location)

    @rule(key=A_KEY, location=st.sampled_from([CPU, *lower_tiers]))
    def remove_from(self, key, location):
        self.sm.remove(key, [location])

    @rule(location=st.sampled_from([CPU, *lower_tiers]))
    def clear_one(self, location):
        self.sm.clear([location])

    @rule(
        location=st.sampled_from(lower_tiers),
        reason=st.sampled_from([RemovalReason.EXPIRED, RemovalReason.ERROR]),
    )
    def lose_oldest(self, location, reason):
        tier = self.sm.storage_backends[location]
        if tier.data:
            tier.drop(next(iter(tier.data)), reason)


COMMON = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "print_blob": False,
}
NIGHTLY_STEPS = 5_000
MODEST = settings(**COMMON, derandomize=True, max_examples=100, stateful_step_count=40)
NIGHTLY = settings(
    **COMMON, max_examples=4, stateful_step_count=NIGHTLY_STEPS, phases=[Phase.generate]
)

TestEvents = EventMachine.TestCase
TestEvents.settings = MODEST
TestTieredEvents = TieredEventMachine.TestCase
TestTieredEvents.settings = MODEST


class LongRuns:
    """Room for whole runs: Hypothesis ends one after some 500 steps, when its buffer is full."""

    def setUp(self):
        for module in (hypothesis.stateful, hypothesis.internal.conjecture.engine):
            patcher = mock.patch.object(module, "BUFFER_SIZE", 200 * NIGHTLY_STEPS)
            patcher.start()
            self.addCleanup(patcher.stop)
        EventMachine.longest_run = 0

    def runTest(self):
        super().runTest()
        assert EventMachine.longest_run >= NIGHTLY_STEPS


class TestEventsNightly(LongRuns, EventMachine.TestCase):
    settings = NIGHTLY


class TestTieredEventsNightly(LongRuns, TieredEventMachine.TestCase):
    settings = NIGHTLY


TestEventsNightly = pytest.mark.slow(TestEventsNightly)
TestTieredEventsNightly = pytest.mark.slow(TestTieredEventsNightly)
