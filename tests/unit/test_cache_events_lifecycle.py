"""Opening and closing of streams, arguments, and no subscriber."""

import gc
import sys
import threading

import pytest
from builders import CPU, evict, keys, put, put_all
from event_fakes import (
    BOUND_SECONDS,
    CLOSED,
    REMOVED,
    STORED,
    Recorder,
    brief,
    stored,
)

from lmcache.v1.storage_backend.cache_events import CacheEvent, EventKind, RemovalReason


# --- closing ---------------------------------------------------------------------------------
def test_closing_the_manager_ends_a_stream_with_one_closed_and_nothing_after(manager):
    subscription = manager.subscribe()
    put(manager, keys(1)[0])

    manager.close()
    manager.close()
    manager.touch(keys(1))
    manager.set_hot_cache(True)

    told = subscription.take()
    assert [event.kind for event in told] == [STORED, REMOVED, CLOSED]
    assert subscription.take() == []


def test_every_stream_gets_the_same_closed(manager):
    subscriptions = [manager.subscribe() for _ in range(3)]

    manager.close()

    (closed,) = {tuple(subscription.take()) for subscription in subscriptions}
    assert closed[0].seq == manager.snapshot().seq


def test_a_subscription_made_after_the_manager_closed_gets_closed_alone(manager):
    put(manager, keys(1)[0])
    manager.close()
    recorder = Recorder()

    subscription = manager.subscribe()
    manager.subscribe(recorder)

    (event,) = subscription.take()
    assert event.kind is CLOSED
    assert subscription.take() == []
    assert [event.kind for event in recorder.wait_for_close()] == [CLOSED]
    recorder.threads[0].join(BOUND_SECONDS)
    assert not recorder.threads[0].is_alive()


def test_a_closed_subscription_gives_nothing_and_hears_nothing(manager):
    subscription = manager.subscribe()
    put(manager, keys(1)[0])

    subscription.close()
    put(manager, keys(1, first=2)[0])
    manager.close()

    assert subscription.take() == []
    assert subscription.num_pending == 0


def test_closing_a_subscription_twice_or_after_the_manager_is_a_no_op(manager):
    subscription, other = manager.subscribe(), manager.subscribe()
    subscription.close()
    subscription.close()
    manager.close()
    subscription.close()
    other.close()

    assert other.take() == []


def test_a_subscription_is_a_context_manager_that_closes_it(manager):
    with manager.subscribe() as subscription:
        put(manager, keys(1)[0])
        assert len(subscription.take()) == 1
        put(manager, keys(1, first=2)[0])

    assert subscription.take() == []


def test_closing_one_subscription_leaves_the_others(manager):
    first, second = manager.subscribe(), manager.subscribe()

    first.close()
    put(manager, keys(1)[0])

    assert brief(second.take()) == [stored(1)]


def test_only_close_ends_a_subscription_not_a_switch_or_an_empty_cache(manager):
    subscription = manager.subscribe()
    manager.set_hot_cache(False)
    manager.set_hot_cache(True)
    manager.clear()

    put(manager, keys(1)[0])

    assert brief(subscription.take()) == [stored(1)]


def test_closing_a_callback_subscription_ends_its_thread(manager):
    recorder = Recorder()
    subscription = manager.subscribe(recorder)
    put(manager, keys(1)[0])
    recorder.wait_for_count(1)

    subscription.close()

    recorder.threads[0].join(BOUND_SECONDS)
    assert not recorder.threads[0].is_alive()


def test_a_subscription_outlives_the_managers_names_for_it(make_manager):
    recorder = Recorder()
    make_manager().subscribe(recorder)
    gc.collect()
    sm = make_manager()
    sm.subscribe(recorder)
    gc.collect()

    put(sm, keys(1)[0])

    recorder.wait_for_count(1)
    sm.close()


# --- arguments -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"callback": 5}, TypeError),
        ({"capacity": 0}, ValueError),
        ({"capacity": -1}, ValueError),
        ({"capacity": 1.5}, TypeError),
        ({"capacity": "10"}, TypeError),
        ({"capacity": None}, TypeError),
        ({"capacity": True}, TypeError),
        ({"tiers": "LocalCPUBackend"}, TypeError),
        ({"tiers": 5}, TypeError),
        ({"tiers": [5]}, TypeError),
        ({"tiers": [None]}, TypeError),
        ({"kinds": 5}, TypeError),
        ({"kinds": EventKind.STORED}, TypeError),
        ({"kinds": ["stored"]}, TypeError),
        ({"kinds": [RemovalReason.CLEAR]}, TypeError),
        ({"kinds": [[]]}, TypeError),
    ],
    ids=str,
)
def test_an_argument_that_cannot_be_used_is_an_error_and_subscribes_nothing(
    manager, arguments, error
):
    before = set(threading.enumerate())

    with pytest.raises(error):
        manager.subscribe(**arguments)

    assert set(threading.enumerate()) == before
    assert put(manager, keys(1)[0])


def test_filters_may_be_any_collection(manager):
    subscription = manager.subscribe(tiers={CPU: 1}, kinds=frozenset({STORED}))
    put(manager, keys(1)[0])

    assert brief(subscription.take()) == [stored(1)]


def test_take_is_an_error_beside_a_callback(manager):
    subscription = manager.subscribe(Recorder())

    with pytest.raises(RuntimeError, match="callback"):
        subscription.take()
    manager.close()


def test_an_event_is_an_immutable_value(manager):
    subscription = manager.subscribe()
    put(manager, keys(1)[0])

    (event,) = subscription.take()
    assert isinstance(event, CacheEvent)
    with pytest.raises(AttributeError):
        event.seq = 0


# --- no subscriber ---------------------------------------------------------------------------
def test_what_happened_before_a_subscription_is_not_heard(manager):
    put_all(manager, keys(8))
    evict(manager, 2)

    assert manager.subscribe().take() == []


def test_nothing_is_recorded_without_a_subscriber(manager):
    key = keys(1)[0]
    before = sys.getrefcount(key)
    subscription = manager.subscribe()
    put(manager, key)
    manager.remove(key)
    assert sys.getrefcount(key) == before + 2  # STORED and REMOVED

    subscription.close()
    assert sys.getrefcount(key) == before
    put(manager, key)
    manager.remove(key)
    assert sys.getrefcount(key) == before


def test_a_ring_that_was_taken_keeps_nothing(manager):
    key = keys(1)[0]
    before = sys.getrefcount(key)
    subscription = manager.subscribe()
    put(manager, key)
    manager.remove(key)

    subscription.take()

    assert sys.getrefcount(key) == before


def test_a_subscription_that_nobody_holds_any_more_records_nothing(manager):
    subscription = manager.subscribe()
    ledger = manager._tiers.ledger
    assert ledger.num_subscribers == 1

    del subscription

    assert ledger.num_subscribers == 0
