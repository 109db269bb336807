"""Callbacks: on a thread of their own, under no lock, free to call everything, free to fail."""

import itertools
import logging
import threading

import pytest
from builders import allocate, keys, put, put_all
from event_fakes import (
    BOUND_SECONDS,
    CLOSED,
    LOST,
    REMOVED,
    STORED,
    BoundedPlugin,
    Mirror,
    Recorder,
    WatchfulKeys,
    in_thread,
)


class Gate:
    """A callback that holds its first batch until it is opened."""

    def __init__(self):
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self, events):
        self.entered.set()
        assert self.opened.wait(BOUND_SECONDS)

    def wait_until_entered(self):
        assert self.entered.wait(BOUND_SECONDS)


def test_events_come_on_one_daemon_thread_of_the_subscription(manager):
    one, other = Recorder(), Recorder()
    manager.subscribe(one)
    manager.subscribe(other)

    for key in keys(3):
        put(manager, key)
        one.wait_until(lambda events, key=key: events[-1:] and events[-1].key == key)
    other.wait_for_count(3)

    (thread,) = set(one.threads)
    assert thread.daemon
    assert thread is not threading.current_thread()
    assert thread not in other.threads
    manager.close()


def test_a_callback_hears_what_take_would_give(manager):
    recorder, subscription = Recorder(), manager.subscribe()
    mirror = Mirror(manager.snapshot())
    manager.subscribe(recorder)

    put_all(manager, keys(12))
    manager.clear()
    manager.close()

    told = recorder.wait_for_close()
    assert told == subscription.take()
    mirror.apply(told)


def test_what_happens_during_a_delivery_comes_as_one_batch(manager):
    gate = Gate()
    recorder = Recorder(then=gate)
    manager.subscribe(recorder)
    put(manager, keys(1)[0])
    gate.wait_until_entered()

    put_all(manager, keys(5, first=2))
    gate.opened.set()

    recorder.wait_for_count(6)
    assert [len(batch) for batch in recorder.batches] == [1, 5]
    manager.close()


def test_an_idle_callback_thread_wakes_for_every_event(manager):
    recorder = Recorder()
    manager.subscribe(recorder)

    for count, key in enumerate(keys(50), start=1):
        put(manager, key)
        manager.remove(key)
        recorder.wait_for_count(2 * count)
    manager.close()


def test_events_from_before_the_callback_thread_looks_are_not_missed(make_manager):
    for _ in range(20):
        sm, recorder = make_manager(), Recorder()
        sm.subscribe(recorder)
        put(sm, keys(1)[0])
        recorder.wait_for_count(1)
        sm.close()


# --- every call is legal ---------------------------------------------------------------------
def put_that_evicts(sm, _):
    put_all(sm, keys(12, first=100))


def subscribe_again(sm, _):
    with sm.subscribe() as pulled:
        put(sm, keys(1, first=200)[0])
        assert pulled.take()
    other = Recorder()
    sm.subscribe(other)
    put(sm, keys(1, first=201)[0])
    other.wait_for_count(1)


CALLS = {
    "touch": lambda sm, _: sm.touch(keys(4)),
    "demote": lambda sm, _: sm.demote(keys(4)),
    "contains": lambda sm, _: sm.contains(keys(1)[0]),
    "pin and unpin": lambda sm, _: (
        sm.contains(keys(1)[0], pin=True),
        sm.batched_unpin(keys(1)),
    ),
    "get": lambda sm, _: sm.get(keys(1)[0]).ref_count_down(),
    "put that evicts": put_that_evicts,
    "remove": lambda sm, _: sm.remove(keys(1)[0]),
    "clear": lambda sm, _: sm.clear(),
    "hot cache off": lambda sm, _: sm.set_hot_cache(False),
    "snapshot": lambda sm, _: sm.snapshot(),
    "would_admit": lambda sm, _: sm.would_admit(1),
    "memcheck": lambda sm, _: sm.memcheck(),
    "check_integrity": lambda sm, _: sm.check_integrity(),
    "subscribe": subscribe_again,
    "close the subscription": lambda _, subscription: subscription.close(),
    "close the manager": lambda sm, _: sm.close(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("tiers", [{}, {"lower": BoundedPlugin}], ids=["one tier", "two tiers"])
def test_every_cache_call_is_legal_from_a_callback(make_manager, tiers, call):
    sm = make_manager(tiers=tiers)
    subscribed, done, first_only = threading.Event(), threading.Event(), itertools.count()
    failures = []

    def react(events):
        if next(first_only):
            return
        try:
            assert subscribed.wait(BOUND_SECONDS)
            CALLS[call](sm, subscription)
        except BaseException as error:
            failures.append(error)
        done.set()

    subscription = sm.subscribe(react)
    put_all(sm, keys(2))
    subscribed.set()

    assert done.wait(BOUND_SECONDS), f"{call} hangs in a callback"
    assert failures == []


def test_events_made_by_a_callback_come_later_and_never_recursively(manager):
    depth, deepest = [], []

    def react(events):
        depth.append(None)
        deepest.append(len(depth))
        for event in events:
            if event.kind is STORED and event.key.chunk_hash < 5:
                put(manager, keys(1, first=event.key.chunk_hash + 1)[0])
        depth.pop()

    recorder = Recorder(then=react)
    manager.subscribe(recorder)
    put(manager, keys(1)[0])

    told = recorder.wait_for_count(5)
    assert [event.key.chunk_hash for event in told] == [1, 2, 3, 4, 5]
    assert set(deepest) == {1}
    assert len(recorder.batches) == 5
    manager.close()


def test_a_manager_closed_by_a_callback_sends_it_closed_and_nothing_more(manager):
    recorder = Recorder(then=lambda events: manager.close())
    manager.subscribe(recorder)
    put(manager, keys(1)[0])

    told = recorder.wait_for_close()
    assert [event.kind for event in told] == [STORED, REMOVED, CLOSED]
    recorder.threads[0].join(BOUND_SECONDS)
    assert not recorder.threads[0].is_alive()
    assert recorder.events == told


def test_a_subscription_closed_by_its_callback_is_called_no_more(manager):
    holder = []
    recorder = Recorder(then=lambda events: holder[0].close())
    holder.append(manager.subscribe(recorder))
    put(manager, keys(1)[0])
    recorder.wait_for_count(1)
    recorder.threads[0].join(BOUND_SECONDS)

    put_all(manager, keys(3, first=2))
    manager.close()

    assert not recorder.threads[0].is_alive()
    assert len(recorder.events) == 1


@pytest.mark.parametrize(
    "call",
    [
        "touch",
        "demote",
        "put",
        "batched_get",
        "batched_contains",
        "batched_remove",
    ],
)
def test_no_code_of_a_caller_runs_under_the_lock(manager, call):
    under_the_lock = []
    lock = manager.local_cpu_backend.cpu_lock
    watched = WatchfulKeys(keys(2), lambda _: under_the_lock.append(lock.locked()))
    put_all(manager, keys(2))

    if call == "put":
        manager.batched_put(watched, [allocate(manager), allocate(manager)])
    else:
        result = {
            "touch": manager.touch,
            "demote": manager.demote,
            "batched_get": manager.batched_get,
            "batched_contains": manager.batched_contains,
            "batched_remove": manager.batched_remove,
        }[call](watched)
        if call == "batched_get":
            for obj in result:
                obj.ref_count_down()

    assert not any(under_the_lock)


# --- slow ------------------------------------------------------------------------------------
@pytest.fixture
def stuck(manager):
    """A subscription whose callback is in the middle of its first event until the test ends."""
    gate = Gate()
    subscription = manager.subscribe(Recorder(then=gate), capacity=2)
    put(manager, keys(1)[0])
    gate.wait_until_entered()
    yield subscription
    gate.opened.set()
    manager.close()


def test_a_slow_callback_delays_no_other_subscriber(manager, stuck):
    quick, pulled = Recorder(), manager.subscribe()
    manager.subscribe(quick)

    put_all(manager, keys(3, first=2))

    quick.wait_for_count(3)
    assert len(pulled.take()) == 3


def test_a_slow_callback_delays_no_other_threads_call(manager, stuck):
    def work():
        manager.get(keys(1)[0]).ref_count_down()
        put_all(manager, keys(12, first=2))
        assert manager.touch(keys(12, first=2)).refreshed == 8
        manager.remove(keys(1, first=13)[0])
        manager.snapshot()

    in_thread(work)


def test_a_slow_callback_keeps_no_more_events_than_its_capacity(manager, stuck):
    put_all(manager, keys(5, first=2))

    assert stuck.num_pending == 2 + 1
    assert stuck.num_lost == 3


def test_a_slow_callback_hears_first_what_it_lost(manager):
    gate = Gate()
    recorder = Recorder(then=gate)
    manager.subscribe(recorder, capacity=2)
    put(manager, keys(1)[0])
    gate.wait_until_entered()
    put_all(manager, keys(5, first=2))

    gate.opened.set()

    recorder.wait_for_count(4)
    assert [event.kind for event in recorder.batches[1]] == [LOST, STORED, STORED]
    assert recorder.batches[1][0].num_lost == 3
    manager.close()


def test_closing_a_subscription_does_not_wait_for_its_callback(manager, stuck):
    in_thread(stuck.close)


def test_closing_the_manager_does_not_wait_for_a_callback(manager, stuck):
    in_thread(manager.close)


# --- raising ---------------------------------------------------------------------------------
def raise_it(error):
    raise error


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(1), KeyboardInterrupt()])
def test_a_raising_callback_is_counted_and_keeps_being_called(manager, error):
    recorder, well = Recorder(then=lambda events: raise_it(error)), Recorder()
    subscription = manager.subscribe(recorder)
    manager.subscribe(well)

    for count, key in enumerate(keys(4), start=1):
        put(manager, key)
        recorder.wait_for_count(count)
        well.wait_for_count(count)
    manager.close()

    recorder.wait_for_close()
    recorder.threads[0].join(BOUND_SECONDS)
    assert subscription.callback_errors == len(recorder.batches) >= 5


def test_raising_callbacks_are_logged_at_a_limited_rate(manager, caplog):
    recorder = Recorder(then=lambda events: raise_it(ValueError("a broken callback")))
    manager.subscribe(recorder)

    with caplog.at_level(logging.DEBUG):
        for count, key in enumerate(keys(5), start=1):
            put(manager, key)
            recorder.wait_for_count(count)
        manager.close()
        recorder.threads[0].join(BOUND_SECONDS)

    told = [record for record in caplog.records if "callback" in record.getMessage()]
    assert len(told) == 1
    assert told[0].exc_info is not None
    assert "a broken callback" in str(told[0].exc_info[1])


def test_a_raising_callback_is_nothing_to_the_caller_that_made_the_event(manager):
    manager.subscribe(Recorder(then=lambda events: raise_it(ValueError())))

    put_all(manager, keys(12))

    assert manager.touch(keys(12)).refreshed == 8
    manager.close()
