"""Events where a process does odd things: forks, and finalisers that run anywhere."""

import gc
import threading

import pytest
from builders import allocate, evict, keys, order, put, put_all
from event_fakes import BoundedPlugin, Recorder, brief, follow, in_child, in_thread, stored


# --- fork ------------------------------------------------------------------------------------
def test_after_a_fork_the_childs_subscriptions_are_inert(manager):
    put_all(manager, keys(2))
    waiting = manager.subscribe()
    put(manager, keys(1, first=3)[0])

    def check():
        assert waiting.num_pending == 0
        assert waiting.take() == []
        put(manager, keys(1, first=4)[0])
        manager.remove(keys(1)[0])
        assert waiting.take() == []
        manager.close()
        assert waiting.take() == []
        waiting.close()

    in_child(check)
    assert brief(waiting.take()) == [stored(3)]


def test_after_a_fork_a_loss_is_not_announced_in_the_child(manager):
    waiting = manager.subscribe(capacity=1)
    put_all(manager, keys(3))

    def check():
        assert waiting.num_pending == 0
        assert waiting.take() == []

    in_child(check)
    assert len(waiting.take()) == 2


def test_after_a_fork_a_callback_is_not_called_in_the_child(manager):
    recorder = Recorder()
    subscription = manager.subscribe(recorder)
    put(manager, keys(1)[0])
    recorder.wait_for_count(1)

    def check():
        put_all(manager, keys(12))
        subscription.close()
        manager.close()
        assert len(recorder.events) == 1

    in_child(check)
    put(manager, keys(1, first=2)[0])
    recorder.wait_for_count(2)
    manager.close()


def test_after_a_fork_the_child_may_use_and_close_the_cache(make_manager):
    sm = make_manager(num_chunks=4, tiers={"lower": BoundedPlugin})
    put_all(sm, keys(4))
    sm.subscribe()

    def check():
        sm.get(keys(1)[0]).ref_count_down()
        put_all(sm, keys(6))
        assert sm.touch(keys(6)).refreshed == 4
        sm.clear()
        assert order(sm) == []
        sm.check_integrity()
        sm.close()

    in_child(check)
    assert order(sm) == [1, 2, 3, 4]


def test_after_a_fork_the_child_may_subscribe_anew(manager):
    put(manager, keys(1)[0])
    manager.subscribe()

    def check():
        subscription, mirror = follow(manager)
        put(manager, keys(1, first=2)[0])
        mirror.apply(subscription.take())
        assert mirror.residents == manager.snapshot().residents
        recorder = Recorder()
        manager.subscribe(recorder)
        put(manager, keys(1, first=3)[0])
        recorder.wait_for_count(1)

    in_child(check)


def test_after_a_fork_the_child_numbers_its_events_in_an_incarnation_of_its_own(manager):
    parents = manager.snapshot().incarnation

    def check():
        subscription = manager.subscribe()
        put(manager, keys(1)[0])
        (event,) = subscription.take()
        assert event.incarnation == manager.snapshot().incarnation != parents
        assert manager.touch(keys(1)).incarnation == event.incarnation

    in_child(check)
    assert manager.snapshot().incarnation == parents


# --- finalisers ------------------------------------------------------------------------------
class Reader:
    """Garbage that only the collector finds, and that releases what it read when it dies."""

    def __init__(self, obj, died):
        self.obj, self.died, self.itself = obj, died, self

    def __del__(self):
        self.obj.ref_count_down()
        self.died.set()


@pytest.fixture
def leave_garbage(manager):
    """`leave_garbage()`: eight resident, one read by garbage, one object that only garbage has."""
    gc.collect()
    gc.disable()

    def leave():
        put_all(manager, keys(7))
        died = threading.Event(), threading.Event()
        Reader(manager.get(keys(1)[0]), died[0])
        Reader(allocate(manager), died[1])
        return died

    yield leave
    gc.enable()


def test_a_finaliser_that_releases_may_run_on_the_thread_that_holds_the_cpu_lock(
    manager, leave_garbage
):
    manager.subscribe(Recorder())
    died = leave_garbage()

    def collect():
        with manager.local_cpu_backend.cpu_lock:
            gc.collect()

    in_thread(collect)
    assert all(event.is_set() for event in died)
    assert evict(manager, 7) == [2, 3, 4, 5, 6, 7, 1]
    manager.close()


def test_a_finaliser_that_releases_does_not_wait_for_another_thread_with_the_lock(
    manager, leave_garbage
):
    died = leave_garbage()

    with manager.local_cpu_backend.cpu_lock:
        in_thread(gc.collect)

    assert all(event.is_set() for event in died)


@pytest.mark.parametrize("after_allocations", range(1, 40))
def test_a_snapshot_is_of_one_moment_although_a_finaliser_removes_meanwhile(
    make_manager, after_allocations
):
    class Remover:
        def __init__(self):
            self.itself = self

        def __del__(self):
            sm.remove(key)

    sm = make_manager(tiers={"near": BoundedPlugin, "far": BoundedPlugin})
    (key,) = keys(1)
    put(sm, key)
    subscription, mirror = follow(sm)
    gc.collect()
    gc.disable()
    Remover()
    try:
        gc.set_threshold(gc.get_count()[0] + after_allocations)
        gc.enable()
        snapshot = sm.snapshot()
    finally:
        gc.set_threshold(700, 10, 10)
        gc.collect()

    mirror.apply(event for event in subscription.take() if event.seq <= snapshot.seq)
    assert snapshot.residents == mirror.residents


def test_a_finaliser_may_run_while_events_are_made_and_taken(manager, leave_garbage):
    subscription, mirror = follow(manager)
    died = leave_garbage()
    gc.enable()
    gc.set_threshold(1)

    try:
        in_thread(lambda: put_all(manager, keys(20, first=20)))
        told = subscription.take()
    finally:
        gc.set_threshold(700, 10, 10)

    assert all(event.is_set() for event in died)
    mirror.apply(told)
    assert mirror.residents == manager.snapshot().residents
