"""Misuse, interruptions and odd moments: an error or a miss, never a crash, a leak or a hang."""

import gc
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from builders import CHUNK_BYTES, CHUNK_SHAPE, allocate, gauges, hold, keys, order, put, put_all

from lmcache.v1.cache_key import CacheEngineKey
from lmcache.v1.memory_object import MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.storage_backend.cache_events import EventKind

ROOT = Path(__file__).parents[2]
EXITS_WHILE_A_DAEMON_THREAD = """
import sys, threading
sys.path.insert(0, "tests")
from builders import allocate, keys, make_config, make_metadata, put_all
from lmcache.v1.storage_backend.storage_manager import StorageManager
sm = StorageManager(make_config(num_chunks=2, blocking_timeout_secs=60), make_metadata())
put_all(sm, keys(2))
started = threading.Event()
{work}
threading.Thread(target=lambda: (started.set(), work()), daemon=True).start()
started.wait()
print("main returns")
"""
WORKS = {
    "waits_for_memory": """
held = [sm.get(key) for key in keys(2)]
def work(): sm.batched_allocate(held[0].get_shapes(), held[0].get_dtypes(), 2)
""",
    "waits_for_the_lock": """
import atexit
sm.local_cpu_backend.cpu_lock.acquire()
atexit.register(sm.local_cpu_backend.cpu_lock.release)
def work():
    while True: sm.get(keys(1)[0]).ref_count_down()
""",
    "copies": """
from lmcache.v1.host_copy import copy_memory_objs
source, target = (sm.get(key) for key in keys(2))
def work():
    while True: copy_memory_objs([target], [source])
""",
}


@pytest.mark.parametrize("work", WORKS)
def test_a_process_ends_cleanly_while_a_daemon_thread_is_inside_the_core(work):
    script = EXITS_WHILE_A_DAEMON_THREAD.format(work=WORKS[work])
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout == "main returns\n"


def test_an_object_whose_constructor_never_ran_is_a_type_error(manager):
    class Unmade(TensorMemoryObj):
        __slots__ = ()

        def __init__(self):
            pass

    with pytest.raises(TypeError, match=r"memory_objs\[0\]"):
        manager.batched_put(keys(1), [Unmade()])
    with pytest.raises(TypeError, match=r"keys\[0\]"):
        manager.touch([CacheEngineKey.__new__(CacheEngineKey)])


@pytest.mark.parametrize(
    "raw",
    [
        torch.arange(64, dtype=torch.uint8)[::2],
        torch.zeros(8, 4, dtype=torch.uint8),
        torch.zeros(8, dtype=torch.float32),
        torch.zeros(31, dtype=torch.uint8),
    ],
    ids=["strided", "two axes", "floats", "too short"],
)
def test_bytes_that_are_not_what_the_metadata_says_are_a_value_error(raw):
    metadata = MemoryObjMetadata(torch.Size([32]), torch.uint8, 0, 32, 1)
    with pytest.raises(ValueError, match="raw_data"):
        TensorMemoryObj(raw, metadata, None)


def test_a_put_that_fails_while_copying_leaves_no_copy_behind(manager):
    class Broken(TensorMemoryObj):
        __slots__ = ()

        @property
        def data_ptr(self):
            raise OSError("the device is gone")

    def foreign(kind):
        metadata = MemoryObjMetadata(torch.Size([64]), torch.uint8, 0, 64, 1)
        return kind(torch.zeros(64, dtype=torch.uint8), metadata, None)

    with pytest.raises(OSError, match="the device is gone"):
        manager.batched_put(keys(2), [foreign(TensorMemoryObj), foreign(Broken)])

    assert gauges(manager)["num_leaked"] == 0
    assert gauges(manager)["free_bytes"] == gauges(manager)["capacity_bytes"]
    assert manager.memcheck()


def test_what_can_never_fit_is_refused_at_once_however_long_one_may_wait(make_manager):
    sm = make_manager(num_chunks=4, blocking_timeout_secs=10**6)

    # One byte each, but every object takes a whole alignment unit.
    units = gauges(sm)["capacity_bytes"] // 4096
    assert sm.batched_allocate(torch.Size([1]), torch.uint8, units + 1) is None
    assert not sm.would_admit(1 << 70)


def test_closing_wakes_an_allocation_that_waits(make_manager):
    sm = make_manager(num_chunks=1, blocking_timeout_secs=10**6)
    put(sm, keys(1)[0])
    reader = hold(sm, keys(1)[0])
    answers = []
    waiter = threading.Thread(target=lambda: answers.append(sm.allocate(CHUNK_SHAPE, torch.uint8)))
    waiter.start()
    while gauges(sm)["num_waiting"] == 0:
        assert waiter.is_alive()

    sm.close()
    waiter.join(timeout=60)

    assert answers == [None]
    reader.ref_count_down()


def test_a_closed_manager_lists_nothing_any_more(manager):
    subscription = manager.subscribe()
    manager.close()
    manager.set_hot_cache(True)
    obj = allocate(manager)

    manager.batched_put(keys(1), [obj])

    assert order(manager) == []
    assert [event.kind for event in subscription.take()] == [EventKind.CLOSED]


@pytest.mark.parametrize("busy", ["unpin", "allocate", "remove", "touch", "get", "put"])
def test_a_finaliser_may_release_pins_and_read_wherever_the_collector_runs_it(manager, busy):
    put_all(manager, keys(3))
    k1, k2, k3 = keys(3)

    class Request:
        def __init__(self, owner):
            self.owner = owner
            self.itself = self  # only the collector frees it

        def __del__(self):
            manager.batched_unpin([k1], owner=self.owner)
            manager.get(k1).ref_count_down()

    work = {
        "unpin": lambda: (manager.contains(k2, pin=True), manager.batched_unpin([k2])),
        "allocate": lambda: allocate(manager).ref_count_down(),
        "remove": lambda: manager.remove(keys(1, first=99)[0]),
        "touch": lambda: manager.touch([k1, k2, k3]),
        "get": lambda: manager.get(k3).ref_count_down(),
        "put": lambda: put(manager, k2),
    }[busy]
    before = gc.get_threshold()
    try:
        for countdown in range(1, 60):  # the collector starts a little later each time
            gc.disable()
            gc.collect()
            manager.contains(k1, pin=True, owner=f"r{countdown}")
            Request(f"r{countdown}")
            gc.set_threshold(gc.get_count()[0] + countdown)
            gc.enable()
            work()
    finally:
        gc.set_threshold(*before)
        gc.enable()
    gc.collect()
    manager.batched_unpin([])  # whatever a finaliser left to do is done by now

    assert manager.local_cpu_backend.pins.num_pins == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda sm: sm.get("m@1@0@1@bfloat16"),
        lambda sm: sm.contains(None),
        lambda sm: sm.batched_get(["x"]),
        lambda sm: sm.batched_contains([1]),
        lambda sm: sm.batched_remove([*keys(1), "x"]),
        lambda sm: sm.batched_unpin(["x"]),
    ],
)
def test_a_key_of_the_wrong_type_is_a_type_error_and_nothing_is_done(manager, call):
    put_all(manager, keys(1))

    with pytest.raises(TypeError, match="not a CacheEngineKey"):
        call(manager)

    assert order(manager) == [1]


def test_a_key_keeps_no_subclass_of_str_that_could_run_code_when_compared():
    class Loud(str):
        def __eq__(self, other):
            raise AssertionError("compared")

        __hash__ = str.__hash__

    configs = {"lmcache.tag.user": Loud("me")}
    key = CacheEngineKey(Loud("m"), 1, 0, 1, torch.bfloat16, configs)

    assert type(key.model_name) is str
    assert [type(part) for tag in key.tags for part in tag] == [str, str]


def test_metadata_that_was_changed_decides_what_is_told_and_what_is_replaced(manager):
    subscription = manager.subscribe()
    obj = allocate(manager)
    obj.metadata.shape, obj.metadata.dtype = torch.Size([100]), torch.uint8

    manager.batched_put(keys(1), [obj])
    put(manager, keys(1)[0])

    sizes = [event.size_bytes for event in subscription.take()]
    assert sizes == [100, 100, CHUNK_BYTES]  # stored, replaced, stored
