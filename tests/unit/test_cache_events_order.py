"""Numbers: of events, of copies, of touches and of snapshots; and two of them compared."""

import pytest
from builders import CHUNK_BYTES, CPU, evict, keys, put, put_all
from event_fakes import REMOVED, STORED, BoundedPlugin, Mirror, follow

from lmcache.v1.storage_backend.touch import TouchVerdict

GONE, REFRESHED = TouchVerdict.GONE, TouchVerdict.REFRESHED


def churn(sm, num_rounds=3):
    """Store, replace, evict, remove and clear."""
    for n in range(num_rounds):
        put_all(sm, keys(10, first=1 + 3 * n))
        put(sm, keys(1, first=4 + 3 * n)[0], nbytes=CHUNK_BYTES // (2 + n))
        sm.remove(keys(1, first=9 + 3 * n)[0])
    sm.clear()


def test_seq_rises_by_one_per_event(manager):
    subscription = manager.subscribe()
    first = manager.snapshot().seq

    churn(manager)

    numbers = [event.seq for event in subscription.take()]
    assert numbers == list(range(first + 1, first + 1 + len(numbers)))
    assert manager.snapshot().seq == numbers[-1]


def test_seq_rises_for_each_subscriber_whatever_it_filters(make_manager):
    sm = make_manager(num_chunks=4, tiers={"lower": BoundedPlugin})
    subscriptions = [
        sm.subscribe(),
        sm.subscribe(kinds=[REMOVED]),
        sm.subscribe(tiers=["lower"]),
        sm.subscribe(capacity=3),
    ]
    churn(sm)
    sm.close()

    for subscription in subscriptions:
        numbers = [event.seq for event in subscription.take()]
        assert numbers == sorted(set(numbers))
        assert len(numbers) > 3


def test_two_subscribers_hear_the_same_events(manager):
    one, other = manager.subscribe(), manager.subscribe()

    churn(manager)

    assert one.take() == other.take()


def test_events_are_numbered_although_nobody_listens(manager):
    before = manager.snapshot().seq

    put_all(manager, keys(3))

    assert manager.snapshot().seq == before + 3


def test_each_manager_has_an_incarnation_of_its_own(make_manager):
    one, other = make_manager(), make_manager()
    subscription = one.subscribe()
    put(one, keys(1)[0])

    (event,) = subscription.take()
    assert event.incarnation == one.snapshot().incarnation == one.touch(keys(1)).incarnation
    assert event.incarnation != other.snapshot().incarnation


def test_a_removal_names_exactly_the_copy_that_left(manager):
    key = keys(1)[0]
    subscription = manager.subscribe()
    for _ in range(3):
        put(manager, key)
        manager.remove(key)

    told = subscription.take()
    generations = [event.seq for event in told if event.kind is STORED]
    assert len(set(generations)) == 3
    assert [event.generation for event in told if event.kind is REMOVED] == generations


def test_a_stale_removal_is_recognised_by_its_generation(manager):
    key = keys(1)[0]
    subscription = manager.subscribe(tiers=[CPU])
    put(manager, key)
    manager.remove(key)
    put(manager, key)

    first, removal, second = subscription.take()
    assert removal.generation == first.generation < second.generation


def test_a_duplicate_put_keeps_the_generation_of_the_copy(manager):
    key = keys(1)[0]
    subscription = manager.subscribe()
    put(manager, key)
    put(manager, key)
    manager.remove(key)

    entered, left = subscription.take()
    assert left.generation == entered.seq


# --- touch -----------------------------------------------------------------------------------
def test_a_verdict_is_as_of_the_newest_event_and_makes_none(manager):
    put_all(manager, keys(3))

    first, second = manager.touch(keys(3)), manager.touch(keys(3))

    assert first.seq == second.seq == manager.snapshot().seq


def test_a_removal_after_a_touch_has_a_larger_number(manager):
    put_all(manager, keys(8))
    subscription = manager.subscribe(kinds=[REMOVED])
    result = manager.touch(keys(1))

    evict(manager, 8)

    told = subscription.take()
    assert list(result) == [REFRESHED]
    assert all(event.seq > result.seq for event in told)
    assert told[-1].key == keys(1)[0]


def test_a_gone_verdict_has_the_number_of_the_removal_or_a_larger_one(manager):
    key = keys(1)[0]
    put(manager, key)
    subscription = manager.subscribe()
    manager.remove(key)

    result = manager.touch([key])

    (event,) = subscription.take()
    assert list(result) == [GONE]
    assert result.seq >= event.seq


def test_a_verdict_from_before_a_store_is_older_than_it(manager):
    key = keys(1)[0]
    subscription = manager.subscribe()
    stale = manager.touch([key])
    put(manager, key)

    (event,) = subscription.take()
    assert stale.any_gone
    assert stale.seq < event.generation <= manager.touch([key]).seq


@pytest.mark.parametrize("move", ["touch", "demote"])
def test_a_verdict_of_several_tiers_has_one_number(make_manager, move):
    sm = make_manager(num_chunks=2, tiers={"near": BoundedPlugin, "far": BoundedPlugin})
    put_all(sm, keys(5))

    result = sm.touch(keys(5)) if move == "touch" else sm.demote(keys(5))

    assert result.seq == sm.snapshot().seq
    assert [location or "gone" for location in result.locations] == [
        "gone",
        "near",
        "near",
        CPU,
        CPU,
    ]


# --- snapshot --------------------------------------------------------------------------------
def test_a_snapshot_of_an_empty_manager_is_empty(manager):
    snapshot = manager.snapshot()

    assert (snapshot.residents, snapshot.seq) == ({}, 0)


def test_a_snapshot_does_not_change_with_the_cache(manager):
    put_all(manager, keys(2))
    snapshot = manager.snapshot()

    manager.remove(keys(1)[0])

    assert snapshot.residents == dict.fromkeys(keys(2), frozenset({CPU}))


def test_a_snapshot_taken_late_continues_with_the_events_after_its_number(manager):
    subscription = manager.subscribe()
    churn(manager)
    put_all(manager, keys(4))
    mirror = Mirror(manager.snapshot())
    put_all(manager, keys(8, first=3))

    mirror.apply(event for event in subscription.take() if event.seq > mirror.seq)

    assert mirror.residents == manager.snapshot().residents


def test_time_stamps_never_go_back(manager):
    subscription, _ = follow(manager)
    churn(manager)

    stamps = [event.monotonic_s for event in subscription.take()]
    assert stamps == sorted(stamps)
    assert stamps[0] > 0
