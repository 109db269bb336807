"""Any sequence of calls and faults over CPU and disk, against plain lists; files are real.

Checked after every step: the disk's order, the events replayed from a snapshot, the bytes of what
is served, the budget, and that nothing leaks. The writer does a round when the machine says so, and
fails when it says so. `slow` (nightly) runs other steps every time.
"""

import errno
import os
import tempfile

import pytest
from builders import (
    CHUNK_BYTES,
    CPU,
    allocate,
    is_filled,
    keys,
    make_config,
    make_metadata,
    until,
)
from disk_builders import DISK, FILE_BYTES, bytes_on_disk, disk_settings, flip_a_bit, gate_files
from event_fakes import follow
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from plain_disk import PlainDisk

from lmcache.v1.storage_backend.placement import Placement
from lmcache.v1.storage_backend.storage_manager import StorageManager
from lmcache.v1.storage_backend.touch import TouchVerdict

KEYS = keys(9)
SOME_KEYS = st.lists(st.sampled_from(KEYS), min_size=1, max_size=5, unique=True)
A_KEY = st.sampled_from(KEYS)
A_SIZE = st.sampled_from([CHUNK_BYTES, CHUNK_BYTES // 2, 2 * CHUNK_BYTES])
A_PLACEMENT = st.sampled_from(list(Placement))
MOSTLY = st.sampled_from([True, True, False])
RARELY = st.sampled_from([False, False, True])
NUM_CHUNKS, NUM_FILES = 48, 6
A_WRITE_FAULT = st.sampled_from([0, 0, 0, errno.EIO, errno.ENOSPC])
A_READ_FAULT = st.sampled_from([0, 0, 0, 0, errno.EIO, errno.EMFILE])
DAMAGES = ["vanished", "truncated", "altered"]


class DiskMachine(RuleBasedStateMachine):
    """One manager after another over one directory."""

    num_served = num_lost = 0  # over all runs

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.gates = gate_files(self.patch, is_gated=True)
        self.directory = tempfile.TemporaryDirectory()
        self.model = PlainDisk(NUM_FILES * FILE_BYTES)
        self.num_owners = 0
        self.open()

    def open(self):
        config = make_config(NUM_CHUNKS, **disk_settings(self.directory.name, NUM_FILES))
        self.sm = StorageManager(config, make_metadata())
        self.disk = self.sm.local_disk_backend
        self.files = self.gates[-1]
        self.disk.drain()
        self.subscription, self.mirror = follow(self.sm)

    # --- storing ---------------------------------------------------------------------------------
    @rule(
        some_keys=SOME_KEYS,
        nbytes=A_SIZE,
        placement=A_PLACEMENT,
        below=MOSTLY,
    )
    def put(self, some_keys, nbytes, placement, below):
        if self.disk.gauges().in_flight_bytes > NUM_CHUNKS * CHUNK_BYTES // 4:
            self.write(0)  # so that no put finds the queue full
        made = []
        for key in some_keys:
            obj = allocate(self.sm, nbytes, eviction=placement is not Placement.SPARE)
            if obj is None:
                break
            obj.raw_tensor.fill_(key.chunk_hash % 251)
            made.append(obj)
        stored = some_keys[: len(made)]
        self.sm.batched_put(stored, made, location=DISK if below else None, placement=placement)
        may_evict = placement is not Placement.SPARE
        for key in self.model.put(dict.fromkeys(stored, nbytes), placement.is_cold, may_evict):
            self.model.copies[key].name = os.path.basename(self.disk.dict[key].path)

    # --- the writer ------------------------------------------------------------------------------
    @rule(fault=A_WRITE_FAULT)
    def write(self, fault):
        num_queued = self.disk.gauges().num_queued
        if not num_queued:
            return
        num_written = len(self.files.written)
        self.files.write_fault = fault
        self.files.open_gate()
        until(lambda: self.disk.gauges().num_queued < num_queued, poll_seconds=0.0005)
        for name, status in self.files.written[num_written:]:
            self.model.written(name, status == 0)
            DiskMachine.num_lost += status != 0

    @rule(key=A_KEY, damage=st.sampled_from(DAMAGES))
    def damage(self, key, damage):
        copy = self.model.copies.get(key)
        if copy is None or not copy.is_written or copy.damage:
            return
        path = f"{self.disk.path}/{copy.name}"
        if damage == "vanished":
            os.unlink(path)
        elif damage == "truncated":
            os.truncate(path, 5000)
        else:
            flip_a_bit(path)
        copy.damage = damage

    # --- using -----------------------------------------------------------------------------------
    def in_cpu(self, key):
        return key in self.sm.local_cpu_backend.hot_cache

    @rule(some_keys=SOME_KEYS, forget_above=MOSTLY, fault=A_READ_FAULT)
    def get(self, some_keys, forget_above, fault):
        if forget_above:
            self.sm.clear([CPU])
        below = [key for key in some_keys if not self.in_cpu(key)]
        self.model.use(below)
        expected = [key not in below or self.model.read(key, fault) for key in some_keys]

        self.files.read_fault = fault
        found = self.sm.batched_get(some_keys)
        self.files.read_fault = 0

        assert [obj is not None for obj in found] == expected
        for key, obj in zip(some_keys, found, strict=True):
            if obj is not None:
                assert is_filled(obj, key.chunk_hash)
                obj.ref_count_down()
                DiskMachine.num_served += key in below

    @rule(some_keys=SOME_KEYS, is_demotion=st.booleans())
    def touch_or_demote(self, some_keys, is_demotion):
        (self.model.demote if is_demotion else self.model.use)(some_keys)

        result = (self.sm.demote if is_demotion else self.sm.touch)(some_keys)

        for key, verdict, location in zip(some_keys, result, result.locations, strict=True):
            if self.in_cpu(key):
                assert (verdict, location) == (TouchVerdict.REFRESHED, CPU)
            elif key in self.model.copies:
                assert (verdict, location) == (TouchVerdict.PRESENT, DISK)
            else:
                assert (verdict, location) == (TouchVerdict.GONE, None)

    @rule(some_keys=SOME_KEYS)
    def look_up(self, some_keys):
        owner = f"lookup {self.num_owners}"
        self.num_owners += 1
        above = next((i for i, k in enumerate(some_keys) if not self.in_cpu(k)), len(some_keys))
        below = self.model.prefix(some_keys[above:])

        length, _ = self.sm.batched_contains(some_keys, pin=True, owner=owner)
        self.sm.touch_cache(owner)

        assert length == above + len(below)
        self.model.pin(owner, below)

    @precondition(lambda self: self.model.pins)
    @rule()
    def release(self):
        owner = next(iter(self.model.pins))
        self.sm.release_lookup(owner)
        del self.model.pins[owner]

    # --- removing --------------------------------------------------------------------------------
    @rule(some_keys=SOME_KEYS)
    def remove(self, some_keys):
        self.sm.batched_remove(some_keys)
        self.model.remove(some_keys)

    @rule(really=RARELY)
    def clear(self, really):
        if really:
            self.sm.clear()
            self.model.clear()

    @rule()
    def restart(self):
        self.settle()
        self.close()
        self.model.restart()
        self.open()

    def settle(self):
        while self.disk.gauges().num_queued:
            self.write(0)

    def close(self):
        self.sm.close()
        self.mirror.apply(self.subscription.take())
        assert self.mirror.is_closed and not self.mirror.residents

    # --- what must hold --------------------------------------------------------------------------
    @invariant()
    def the_order_is_the_model_s(self):
        assert list(self.disk.dict) == list(self.model.copies)
        for key, copy in self.model.copies.items():
            assert self.disk.dict[key].size == copy.nbytes
            assert self.disk.exists_in_put_tasks(key) == (not copy.is_written)

    @invariant()
    def the_replay_is_the_truth(self):
        self.mirror.apply(self.subscription.take())
        snapshot = self.sm.snapshot()
        assert self.mirror.residents == snapshot.residents
        assert self.mirror.keys_in(DISK) == set(self.disk.dict)
        assert self.mirror.keys_in(CPU) == set(self.sm.local_cpu_backend.hot_cache)

    @invariant()
    def the_books_are_in_order(self):
        self.sm.check_integrity()
        assert self.disk.current_cache_size == self.model.used_bytes
        assert bytes_on_disk(self.sm) <= self.disk.max_cache_size
        if not self.disk.gauges().num_queued:
            self.sm.drain()
            missing = sum(
                copy.file_bytes if copy.damage == "vanished" else copy.file_bytes - 5000
                for copy in self.model.copies.values()
                if copy.damage in ("vanished", "truncated")
            )
            assert bytes_on_disk(self.sm) == self.model.used_bytes - missing

    def teardown(self):
        self.settle()
        for owner in list(self.model.pins):
            self.sm.release_lookup(owner)
        self.sm.drain()
        self.sm.set_hot_cache(False)
        gauges = self.sm.gauges()
        assert (gauges.cpu.num_memory_objs, gauges.cpu.num_pins, gauges.disk.num_pins) == (0, 0, 0)
        self.close()
        self.patch.undo()
        self.directory.cleanup()


COMMON = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "print_blob": False,
}


class TestDisk(DiskMachine.TestCase):
    settings = settings(**COMMON, derandomize=True, max_examples=300, stateful_step_count=60)

    def runTest(self):
        """The runs would prove little if hardly anything were read back, or failed."""
        DiskMachine.num_served = DiskMachine.num_lost = 0
        super().runTest()
        assert DiskMachine.num_served > 100
        assert DiskMachine.num_lost > 30


@pytest.mark.slow
class TestDiskNightly(DiskMachine.TestCase):
    settings = settings(**COMMON, max_examples=1000, stateful_step_count=60)
