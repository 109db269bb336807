"""`EventManager`: statuses, counts and what may be taken when."""

import threading
from concurrent.futures import Future

import pytest

from lmcache.v1.errors import EventStateError
from lmcache.v1.event_manager import EventManager, EventStatus, EventType

LOADING = EventType.LOADING


@pytest.fixture
def manager():
    return EventManager()


def test_an_event_is_ongoing_until_it_is_done_and_gone_once_popped(manager):
    future = Future()
    manager.add_event(LOADING, "a", future)
    assert manager.get_event_status(LOADING, "a") is EventStatus.ONGOING

    manager.update_event_status(LOADING, "a", EventStatus.DONE)
    assert manager.get_event_status(LOADING, "a") is EventStatus.DONE
    assert manager.get_event_future(LOADING, "a") is future

    assert manager.pop_event(LOADING, "a") is future
    assert manager.get_event_status(LOADING, "a") is EventStatus.NOT_FOUND


def test_an_event_that_is_not_done_cannot_be_taken(manager):
    manager.add_event(LOADING, "a", Future())

    for take in (manager.pop_event, manager.get_event_future):
        with pytest.raises(EventStateError, match="a of type .* is not done"):
            take(LOADING, "a")
        with pytest.raises(AssertionError):
            take(LOADING, "unknown")


def test_the_status_of_an_unknown_event_cannot_change(manager):
    with pytest.raises(KeyError, match="not found"):
        manager.update_event_status(LOADING, "a", EventStatus.DONE)


def test_setting_the_same_status_again_keeps_the_event(manager):
    manager.add_event(LOADING, "a", Future())

    manager.update_event_status(LOADING, "a", EventStatus.ONGOING)

    assert manager.get_event_status(LOADING, "a") is EventStatus.ONGOING


def test_counts_follow_the_statuses(manager):
    for name in "abc":
        manager.add_event(LOADING, name, Future())
    manager.update_event_status(LOADING, "b", EventStatus.DONE)

    assert manager.get_events_count_by_status(LOADING, EventStatus.ONGOING) == 2
    assert manager.get_events_count_by_status(LOADING, EventStatus.DONE) == 1
    assert manager.get_events_count_by_status(LOADING, EventStatus.NOT_FOUND) == 0


def test_threads_lose_no_event(manager):
    barrier = threading.Barrier(4)

    def work(thread):
        barrier.wait()
        for number in range(200):
            manager.add_event(LOADING, f"{thread}-{number}", Future())
            manager.update_event_status(LOADING, f"{thread}-{number}", EventStatus.DONE)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert manager.get_events_count_by_status(LOADING, EventStatus.DONE) == 800
