"""Events over several tiers: who still holds the key, promotion, filters, plug-ins of 0.5.6."""

import pytest
from builders import CHUNK_BYTES, CPU, keys, put, put_all
from event_fakes import (
    CLOSED,
    LOST,
    REMOVED,
    STORED,
    BoundedPlugin,
    brief,
    follow,
    removed,
    stored,
)
from fakes import OldPlugin

from lmcache.v1.storage_backend.cache_events import EventKind, RemovalReason

CAPACITY, EXPLICIT, CLEAR, REPLACED, EXPIRED, ERROR = RemovalReason


@pytest.fixture
def tiers(make_manager):
    """A pool of two chunks, over `near` and `far`, which report; and a check of the whole."""
    sm = make_manager(num_chunks=2, tiers={"near": BoundedPlugin, "far": BoundedPlugin})
    sm.storage_backends["far"].max_entries = 8
    subscription, mirror = follow(sm)

    def take():
        taken = subscription.take()
        mirror.apply(taken)
        return taken

    yield sm, take
    take()
    assert mirror.residents == sm.snapshot().residents
    for name in ("near", "far"):
        assert mirror.keys_in(name) == set(sm.storage_backends[name].data)


# --- still_in --------------------------------------------------------------------------------
def test_a_put_tells_each_tier_with_the_tiers_that_hold_the_key_by_then(tiers):
    sm, take = tiers
    put(sm, keys(1)[0])

    told = take()
    assert brief(told) == [stored(1), stored(1, "near"), stored(1, "far")]
    assert [event.still_in for event in told] == [{CPU}, {CPU, "near"}, {CPU, "near", "far"}]


def test_an_eviction_names_its_tier_and_the_tiers_that_still_hold_the_key(tiers):
    sm, take = tiers
    put_all(sm, keys(2))
    take()

    put(sm, keys(1, first=3)[0])

    event = take()[0]
    assert brief([event]) == [removed(1, CAPACITY)]
    assert event.still_in == {"near", "far"}


def test_only_the_last_copys_event_says_that_the_key_is_gone(tiers):
    sm, take = tiers
    key = keys(1)[0]
    put(sm, key)
    take()

    sm.remove(key, [CPU])
    sm.remove(key, ["far"])
    sm.remove(key, ["near"])

    told = take()
    assert brief(told) == [removed(1, EXPLICIT, tier) for tier in (CPU, "far", "near")]
    assert [event.still_in for event in told] == [{"near", "far"}, {"near"}, frozenset()]


def test_removing_a_key_everywhere_gives_one_event_per_copy(tiers):
    sm, take = tiers
    put(sm, keys(1)[0])
    take()

    assert sm.remove(keys(1)[0]) == 3

    assert [event.still_in for event in take()] == [{"near", "far"}, {"far"}, frozenset()]


def test_a_replacing_put_gives_an_adjacent_pair_per_tier_that_keeps_the_tier(tiers):
    sm, take = tiers
    key = keys(1)[0]
    put(sm, key)
    take()

    put(sm, key, nbytes=CHUNK_BYTES // 2)

    told = take()
    names = (CPU, "near", "far")
    pairs = [(removed(1, REPLACED, tier), stored(1, tier)) for tier in names]
    assert brief(told) == [event for pair in pairs for event in pair]
    assert all(event.still_in == set(names) for event in told)


def test_each_copy_has_its_own_generation(tiers):
    sm, take = tiers
    key = keys(1)[0]
    put(sm, key)
    by_tier = {event.tier: event.seq for event in take()}

    sm.remove(key)

    assert {event.tier: event.generation for event in take()} == by_tier


# --- promotion -------------------------------------------------------------------------------
@pytest.mark.parametrize("read", ["get", "batched_get"])
def test_a_hit_below_is_promoted_with_a_stored_event_of_the_cpu_tier(tiers, read):
    sm, take = tiers
    put_all(sm, keys(3))
    first = take()[0]

    if read == "get":
        obj = sm.get(keys(1)[0])
    else:
        (obj,) = sm.batched_get(keys(1))
    obj.ref_count_down()

    told = take()
    assert brief(told) == [removed(2, CAPACITY), stored(1)]
    assert told[1].still_in == {CPU, "near", "far"}
    assert told[1].generation > first.generation


def test_a_put_to_one_tier_gives_that_tiers_event_alone(tiers):
    sm, take = tiers
    put(sm, keys(1)[0], location="far")

    (event,) = take()
    assert (brief([event]), event.still_in) == ([stored(1, "far")], {"far"})


# --- reasons of lower tiers ------------------------------------------------------------------
@pytest.mark.parametrize("reason", list(RemovalReason))
def test_a_tiers_own_reason_arrives_unchanged(tiers, reason):
    sm, take = tiers
    put_all(sm, keys(1), location="near")
    take()

    if reason is REPLACED:
        put(sm, keys(1)[0], nbytes=CHUNK_BYTES // 2, location="near")
    else:
        sm.storage_backends["near"].drop(keys(1)[0], reason)

    assert take()[0].reason is reason


def test_a_write_that_fails_after_it_was_readable_ends_in_an_error_event(tiers):
    sm, take = tiers
    put(sm, keys(1)[0], location="near")

    sm.storage_backends["near"].drop(keys(1)[0], ERROR)

    entered, left = take()
    assert brief([entered, left]) == [stored(1, "near"), removed(1, ERROR, "near")]
    assert (left.generation, left.still_in) == (entered.seq, frozenset())


def test_a_tier_that_evicts_below_is_told_by_its_own_name(tiers):
    sm, take = tiers
    put_all(sm, keys(5), location="near")

    assert brief(take())[-1] == removed(1, CAPACITY, "near")


def test_clearing_one_tier_leaves_the_copies_of_the_others(tiers):
    sm, take = tiers
    put_all(sm, keys(2))
    take()

    sm.clear(["near"])

    told = take()
    assert brief(told) == [removed(n, CLEAR, "near") for n in (1, 2)]
    assert all(event.still_in == {CPU, "far"} for event in told)


def test_a_removal_that_was_never_stored_gives_no_event(tiers):
    sm, take = tiers
    put(sm, keys(1)[0], location="near")
    take()
    near = sm.storage_backends["near"]
    copy = keys(1, first=9)[0]
    near.data[copy] = near.data[keys(1)[0]]

    near.drop(copy, EXPLICIT)

    assert take() == []


# --- the set of tiers ------------------------------------------------------------------------
def test_closing_a_tier_ends_the_residency_of_its_copies(make_manager):
    sm = make_manager(tiers={"lower": BoundedPlugin})
    put(sm, keys(1)[0])
    subscription = sm.subscribe()

    sm.close_backend("lower")

    assert brief(subscription.take()) == [removed(1, CLEAR, "lower")]
    assert sm.snapshot().residents == {keys(1)[0]: {CPU}}


def test_a_tier_made_anew_begins_empty(make_manager):
    sm = make_manager(tiers={"lower": BoundedPlugin})
    put(sm, keys(1)[0])
    sm.close_backend("lower")
    sm.storage_backends["lower"] = BoundedPlugin(local_cpu_backend=sm.local_cpu_backend)

    assert sm.remove(keys(1)[0]) == 1

    assert sm.touch(keys(1)).gone == 1


def test_a_tier_added_later_is_heard_by_an_earlier_subscription(make_manager):
    sm = make_manager()
    put(sm, keys(1)[0])
    everything = sm.subscribe()
    only_late = sm.subscribe(tiers=["late"])

    sm.storage_backends["late"] = BoundedPlugin(local_cpu_backend=sm.local_cpu_backend)
    put(sm, keys(1)[0])

    assert brief(everything.take()) == brief(only_late.take()) == [stored(1, "late")]


# --- filters ---------------------------------------------------------------------------------
def test_a_subscription_to_some_tiers_hears_only_those(tiers):
    sm, _ = tiers
    below = sm.subscribe(tiers={"near", "far"})
    nothing = sm.subscribe(tiers=[])

    put_all(sm, keys(3))

    told = below.take()
    assert {event.tier for event in told} == {"near", "far"}
    assert len(told) == 6
    assert nothing.take() == []


def test_a_filter_by_tier_still_names_every_tier_that_holds_the_key(tiers):
    sm, _ = tiers
    far = sm.subscribe(tiers=["far"])

    put(sm, keys(1)[0])

    (event,) = far.take()
    assert event.still_in == {CPU, "near", "far"}


def test_a_subscription_to_some_kinds_hears_only_those(tiers):
    sm, _ = tiers
    removals = sm.subscribe(kinds=[REMOVED], tiers=[CPU])
    entries = sm.subscribe(kinds=[STORED], tiers=[CPU])

    put_all(sm, keys(3))

    assert brief(removals.take()) == [removed(1, CAPACITY)]
    assert brief(entries.take()) == [stored(1), stored(2), stored(3)]


@pytest.mark.parametrize("kinds", [[], [REMOVED], [STORED]])
def test_closed_comes_through_every_filter(tiers, kinds):
    sm, _ = tiers
    subscription = sm.subscribe(kinds=kinds, tiers=["no such tier"])

    sm.close()

    assert [event.kind for event in subscription.take()] == [CLOSED]


def test_lost_comes_through_a_filter_that_does_not_name_it(tiers):
    sm, _ = tiers
    removals = sm.subscribe(kinds=[REMOVED], tiers=[CPU], capacity=1)

    put_all(sm, keys(5))

    assert [event.kind for event in removals.take()] == [LOST, REMOVED]


def test_what_a_filter_leaves_out_is_not_lost(tiers):
    sm, _ = tiers
    removals = sm.subscribe(kinds=[REMOVED], tiers=[CPU], capacity=1)

    put_all(sm, keys(3))

    assert brief(removals.take()) == [removed(1, CAPACITY)]
    assert removals.num_lost == 0


# --- shared tiers ----------------------------------------------------------------------------
def test_a_plugin_of_0_5_6_gives_no_events_and_counts_for_nothing(make_manager):
    sm = make_manager(num_chunks=2, tiers={"old": OldPlugin})
    subscription, mirror = follow(sm)
    k1 = keys(1)[0]

    put_all(sm, keys(3))
    sm.get(k1).ref_count_down()
    sm.remove(k1)

    told = subscription.take()
    mirror.apply(told)
    assert {event.tier for event in told} == {CPU}
    assert {event.still_in for event in told if event.kind is EventKind.REMOVED} == {frozenset()}
    assert mirror.residents == sm.snapshot().residents
    assert "old" not in set().union(*sm.snapshot().residents.values())


def test_a_snapshot_lists_each_key_with_every_local_tier_that_holds_it(tiers):
    sm, take = tiers
    put_all(sm, keys(5))
    taken = take()

    snapshot = sm.snapshot()

    k1, k2, k3, k4, k5 = keys(5)
    everywhere = frozenset({CPU, "near", "far"})
    assert snapshot.residents == {
        k1: {"far"},
        k2: {"near", "far"},
        k3: {"near", "far"},
        k4: everywhere,
        k5: everywhere,
    }
    assert (snapshot.seq, snapshot.incarnation) == (taken[-1].seq, taken[-1].incarnation)
