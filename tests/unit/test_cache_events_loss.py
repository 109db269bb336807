"""A subscriber that is too slow: bounded memory, one LOST, and a way back."""

import pytest
from builders import CPU, keys, put, put_all
from event_fakes import CLOSED, LOST, REMOVED, STORED, Mirror


def lost_of(event):
    """The first and last number and the count of a LOST event, which has nothing else."""
    assert event.kind is LOST
    assert (event.key, event.tier, event.reason, event.generation) == (None, None, None, 0)
    assert event.still_in == frozenset()
    return event.first_lost, event.last_lost, event.num_lost


def test_a_full_ring_drops_its_oldest_and_the_next_delivery_starts_with_one_lost(manager):
    subscription = manager.subscribe(capacity=3)
    start = manager.snapshot().seq
    put_all(manager, keys(8))

    lost, *rest = subscription.take()

    assert lost_of(lost) == (start + 1, start + 5, 5)
    assert [event.key.chunk_hash for event in rest] == [6, 7, 8]
    assert [event.seq for event in rest] == [start + 6, start + 7, start + 8]


def test_a_ring_that_is_exactly_full_lost_nothing(manager):
    subscription = manager.subscribe(capacity=3)
    put_all(manager, keys(3))

    assert [event.kind for event in subscription.take()] == [STORED] * 3
    assert subscription.num_lost == 0


def test_a_loss_is_announced_once(manager):
    subscription = manager.subscribe(capacity=2)
    put_all(manager, keys(4))
    subscription.take()

    put(manager, keys(1, first=5)[0])

    assert [event.kind for event in subscription.take()] == [STORED]
    assert subscription.take() == []


def test_a_second_loss_is_announced_with_its_own_range(manager):
    subscription = manager.subscribe(capacity=2)
    start = manager.snapshot().seq
    put_all(manager, keys(3))
    first = subscription.take()[0]
    put_all(manager, keys(4, first=4))

    second = subscription.take()[0]

    assert lost_of(first) == (start + 1, start + 1, 1)
    assert lost_of(second) == (start + 4, start + 5, 2)
    assert subscription.num_lost == 3


def test_the_number_of_a_lost_event_lies_between_its_neighbours(manager):
    subscription = manager.subscribe(capacity=2)
    put(manager, keys(1)[0])
    before = subscription.take()[-1].seq
    put_all(manager, keys(4, first=2))

    lost, after, _ = subscription.take()

    assert before < lost.seq == lost.last_lost < after.seq
    assert lost.incarnation == after.incarnation


def test_a_range_counts_only_what_the_subscriber_would_have_heard(manager):
    put_all(manager, keys(8))
    removals = manager.subscribe(kinds=[REMOVED], capacity=1)
    everything = manager.subscribe(kinds=[REMOVED])
    put_all(manager, keys(4, first=9))

    lost, last = removals.take()

    told = [event.seq for event in everything.take()]
    assert lost_of(lost) == (told[0], told[2], 3)
    assert last.seq == told[3]


def test_take_gives_at_most_max_events_lost_included(manager):
    subscription = manager.subscribe(capacity=3)
    put_all(manager, keys(8))

    kinds = []
    while taken := subscription.take(max_events=2):
        assert len(taken) <= 2
        kinds.append([event.kind for event in taken])

    assert kinds == [[LOST, STORED], [STORED, STORED]]


def test_a_take_of_one_gives_the_lost_alone_and_then_the_events(manager):
    subscription = manager.subscribe(capacity=2)
    put_all(manager, keys(3))

    assert [event.kind for event in subscription.take(1)] == [LOST]
    assert [event.key.chunk_hash for event in subscription.take(1)] == [2]
    put_all(manager, keys(2, first=4))
    assert [event.kind for event in subscription.take(1)] == [LOST]
    assert [event.key.chunk_hash for event in subscription.take()] == [4, 5]


def test_a_take_of_some_leaves_the_rest_in_order(manager):
    subscription = manager.subscribe()
    put_all(manager, keys(5))

    assert [event.key.chunk_hash for event in subscription.take(2)] == [1, 2]
    assert subscription.num_pending == 3
    assert [event.key.chunk_hash for event in subscription.take(10)] == [3, 4, 5]
    assert subscription.num_pending == 0


def test_closed_is_never_lost(manager):
    subscription = manager.subscribe(capacity=1)
    put_all(manager, keys(3))
    start = manager.snapshot().seq - 3

    manager.close()

    lost, closed = subscription.take()
    assert closed.kind is CLOSED
    assert lost_of(lost) == (start + 1, closed.seq - 1, closed.seq - 1 - start)


def test_one_slow_subscriber_costs_another_nothing(manager):
    slow, quick = manager.subscribe(capacity=1), manager.subscribe()

    put_all(manager, keys(8))

    assert [event.kind for event in quick.take()] == [STORED] * 8
    assert slow.num_lost == 7


def test_a_loser_rebuilds_from_a_snapshot_and_continues_after_its_number(manager):
    subscription = manager.subscribe(capacity=4)
    put_all(manager, keys(12))
    taken = subscription.take(2)
    assert taken[0].kind is LOST
    mirror = Mirror(manager.snapshot())
    put(manager, keys(1, first=30)[0])

    rest = [event for event in subscription.take() if event.seq > mirror.seq]
    mirror.apply(event for event in rest if event.kind is not LOST)

    assert mirror.residents == manager.snapshot().residents


def test_the_gauges_of_a_subscription_follow_its_ring(manager):
    subscription = manager.subscribe(capacity=2)
    assert (subscription.num_pending, subscription.num_lost, subscription.lag_seconds) == (0, 0, 0)

    put_all(manager, keys(3))

    assert (subscription.num_pending, subscription.num_lost) == (3, 1)  # two and a LOST
    assert subscription.lag_seconds >= 0
    subscription.take()
    assert (subscription.num_pending, subscription.num_lost, subscription.lag_seconds) == (0, 1, 0)


def test_the_manager_counts_every_loss_also_of_subscriptions_that_ended(manager):
    first, second = manager.subscribe(capacity=1), manager.subscribe(capacity=2)
    put_all(manager, keys(4))
    assert manager.num_events_lost == 3 + 2

    first.close()
    del first, second

    assert manager.num_events_lost == 3 + 2


def test_a_large_capacity_is_no_memory_until_it_is_used(manager):
    subscription = manager.subscribe(capacity=1 << 40, tiers=[CPU])
    put(manager, keys(1)[0])

    assert len(subscription.take()) == 1


@pytest.mark.parametrize("max_events", [0, -1])
def test_a_take_of_no_events_is_an_error(manager, max_events):
    with pytest.raises(ValueError, match="max_events"):
        manager.subscribe().take(max_events)


@pytest.mark.parametrize("max_events", [1.5, "2"])
def test_a_take_of_something_else_is_an_error_and_loses_nothing(manager, max_events):
    subscription = manager.subscribe()
    put(manager, keys(1)[0])

    with pytest.raises(TypeError):
        subscription.take(max_events)

    assert len(subscription.take()) == 1
