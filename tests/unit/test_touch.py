"""Touch with the CPU tier alone: order, verdicts, and what it leaves be."""

import pytest
from builders import (
    CPU,
    allocate,
    evict,
    gauges,
    hashes,
    hold,
    keys,
    make_config,
    make_metadata,
    order,
    put,
    put_all,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache.v1.storage_backend.storage_manager import StorageManager
from lmcache.v1.storage_backend.touch import TouchResult, TouchVerdict

POLICIES = ("LRU", "LFU", "FIFO", "MRU")
WITH_RECENCY = ("LRU", "LFU")
WITHOUT_RECENCY = ("FIFO", "MRU")


@pytest.mark.parametrize("policy", WITH_RECENCY)
def test_a_touched_key_is_refreshed_and_the_next_oldest_leaves(make_manager, policy):
    sm = make_manager(policy, num_chunks=3)
    k1, k2, k3 = keys(3)
    put_all(sm, (k1, k2, k3))

    result = sm.touch([k1])

    assert list(result) == [TouchVerdict.REFRESHED]
    assert result.locations == [CPU]
    assert order(sm) == [2, 3, 1]
    assert evict(sm) == [2]


@pytest.mark.parametrize("policy", WITHOUT_RECENCY)
def test_without_recency_a_resident_key_is_present_and_nothing_moves(make_manager, policy):
    sm = make_manager(policy, num_chunks=3)
    put_all(sm, keys(3))
    victim = {"FIFO": 1, "MRU": 3}[policy]

    result = sm.touch(keys(1))

    assert list(result) == [TouchVerdict.PRESENT]
    assert result.locations == [CPU]
    assert order(sm) == [1, 2, 3]
    assert evict(sm) == [victim]


def test_under_mru_a_get_moves_nothing_but_a_pinned_lookup_does(make_manager):
    sm = make_manager("MRU", num_chunks=3)
    put_all(sm, keys(3))

    sm.get(keys(1)[0]).ref_count_down()
    assert order(sm) == [1, 2, 3]

    sm.contains(keys(1)[0], pin=True)
    sm.touch_cache()
    sm.batched_unpin(keys(1))
    assert order(sm) == [2, 3, 1]
    assert evict(sm) == [1]


@pytest.mark.parametrize("policy", POLICIES)
def test_an_absent_key_is_gone_with_no_location(make_manager, policy):
    sm = make_manager(policy)

    result = sm.touch(keys(1))

    assert list(result) == [TouchVerdict.GONE]
    assert result.locations == [None]


@pytest.mark.parametrize("policy", POLICIES)
def test_an_evicted_key_is_gone(make_manager, policy):
    sm = make_manager(policy, num_chunks=1)
    put_all(sm, keys(2))

    assert list(sm.touch(keys(2))) == [
        TouchVerdict.GONE,
        TouchVerdict.REFRESHED if policy in WITH_RECENCY else TouchVerdict.PRESENT,
    ]


@pytest.mark.parametrize("policy", WITH_RECENCY)
def test_the_head_of_a_batch_ends_youngest(make_manager, policy):
    sm = make_manager(policy, num_chunks=4)
    put_all(sm, keys(4))

    sm.touch(keys(3))

    assert order(sm) == [4, 3, 2, 1]


def test_a_duplicate_counts_once_at_its_first_position(manager):
    k1, k2, k3 = keys(3)
    put_all(manager, (k1, k2, k3))

    result = manager.touch([k1, k2, k1, k1])

    assert list(result) == [TouchVerdict.REFRESHED] * 4
    assert order(manager) == [3, 2, 1]


def test_under_lfu_a_key_given_five_times_has_one_more_use(make_manager):
    sm = make_manager("LFU", num_chunks=3)
    k1, k2, k3 = keys(3)
    put_all(sm, (k1, k2, k3))

    sm.touch([k1] * 5)
    sm.touch([k2])
    sm.touch([k2])

    assert order(sm) == [3, 1, 2]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("empty", [[], ()], ids=["list", "tuple"])
def test_empty_input_gives_an_empty_result(make_manager, policy, empty):
    result = make_manager(policy).touch(empty)

    assert (len(result), result.verdicts, result.locations) == (0, [], [])
    assert result.all_refreshed
    assert not result.any_gone


@pytest.mark.parametrize("policy", WITH_RECENCY)
@given(touched=st.lists(st.integers(1, 8), max_size=12))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_keys_that_are_not_given_never_move(policy, touched):
    sm = _manager(policy, num_chunks=6)
    put_all(sm, keys(6))

    sm.touch([keys(1, first=n)[0] for n in touched])

    others = [n for n in range(1, 7) if n not in touched]
    assert [n for n in order(sm) if n in others] == others
    sm.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_touch_takes_no_pin_and_no_reference(make_manager, policy):
    sm = make_manager(policy)
    put_all(sm, keys(3))

    sm.touch(keys(4))

    objs = list(sm.local_cpu_backend.hot_cache.values())
    assert [(o.get_ref_count(), o.pin_count, o.can_evict) for o in objs] == [(1, 0, True)] * 3
    assert gauges(sm)["held_bytes"] == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "wrong", [None, 7, "key", b"key", {1, 2}, iter(())], ids=lambda v: type(v).__name__
)
def test_what_is_no_sequence_is_a_type_error_that_moves_nothing(make_manager, policy, wrong):
    sm = make_manager(policy)
    put_all(sm, keys(3))

    with pytest.raises(TypeError, match="sequence of CacheEngineKey"):
        sm.touch(wrong)

    assert order(sm) == [1, 2, 3]


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("wrong", ["m@1@0@1@bfloat16", None, 1], ids=repr)
def test_one_wrong_element_is_a_type_error_naming_it_that_moves_nothing(manager, position, wrong):
    put_all(manager, keys(3))
    given = list(keys(2))
    given.insert(position, wrong)

    with pytest.raises(TypeError, match=rf"keys\[{position}\]"):
        manager.touch(given)

    assert order(manager) == [1, 2, 3]


def test_the_key_of_a_layer_is_another_key_than_that_of_its_chunk(manager):
    put_all(manager, keys(1))

    assert manager.touch(keys(1)[0].split_layers(1)).verdicts == [TouchVerdict.GONE]


@given(
    num_held=st.integers(0, 3),
    uses=st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=20),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_refreshed_key_survives_until_pool_minus_held_bytes_were_used_after_it(num_held, uses):
    num_chunks = 8
    sm = _manager("LRU", num_chunks)
    put_all(sm, keys(num_chunks))
    target, held_keys = keys(1)[0], keys(num_held, first=2)
    held = [hold(sm, key) for key in held_keys]
    assert sm.touch([target]).all_refreshed

    used_after, fresh = set(), 100
    for is_store, which in uses:
        if is_store:
            key = keys(1, first=fresh)[0]
            fresh += 1
            put(sm, key)
        else:
            resident = [n for n in order(sm) if n != 1 and n not in hashes(held_keys)]
            key = keys(1, first=resident[which % len(resident)])[0]
            sm.touch([key])
        used_after.add(key)
        if len(used_after) < num_chunks - num_held:
            assert 1 in order(sm)

    while len(used_after) < num_chunks - num_held:
        used_after.update(keys(1, first=fresh))
        assert 1 in order(sm)
        put(sm, keys(1, first=fresh)[0])
        fresh += 1
    for obj in held:
        obj.ref_count_down()
    sm.close()


def test_a_refreshed_key_leaves_when_exactly_that_many_bytes_were_stored_after_it(make_manager):
    sm = make_manager(num_chunks=6)
    put_all(sm, keys(6))
    held = [hold(sm, key) for key in keys(2, first=2)]
    sm.touch(keys(1))

    put_all(sm, keys(3, first=10))
    assert 1 in order(sm)

    put_all(sm, keys(1, first=13))
    assert 1 not in order(sm)
    for obj in held:
        obj.ref_count_down()


@given(extra_uses=st.lists(st.integers(1, 6), max_size=20))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_under_lfu_a_touched_key_leaves_after_every_entry_with_fewer_uses(extra_uses):
    sm = _manager("LFU", num_chunks=6)
    put_all(sm, keys(6))
    uses = dict.fromkeys(range(1, 7), 1)
    stamps = {n: n for n in range(1, 7)}
    for turn, n in enumerate(extra_uses):
        assert sm.touch(keys(1, first=n)).all_refreshed
        uses[n] += 1
        stamps[n] = 100 + turn

    expected = sorted(uses, key=lambda n: (uses[n], stamps[n]))
    assert order(sm) == expected
    assert evict(sm, 6) == expected
    sm.close()


def test_seq_and_incarnation_are_those_of_the_snapshot(manager):
    put_all(manager, keys(3))

    result, residents = manager.touch(keys(3)), manager.snapshot()

    assert (result.incarnation, result.seq) == (residents.incarnation, residents.seq)


def test_seq_tells_a_stale_verdict_from_a_later_removal(make_manager):
    sm = make_manager(num_chunks=1)
    with sm.subscribe() as events:
        put_all(sm, keys(1))
        before = sm.touch(keys(1))
        put_all(sm, keys(1, first=2))
        after = sm.touch(keys(1))

        removal = next(event for event in events.take() if event.kind.value == "removed")
    assert before.seq < removal.seq <= after.seq
    assert after.any_gone


def test_the_result_counts_and_lists_what_is_gone(manager):
    k1, k2, k3 = keys(3)
    put_all(manager, (k1,))

    result = manager.touch([k2, k1, k3, k2])

    assert (result.refreshed, result.present, result.gone) == (1, 0, 3)
    assert (result.all_refreshed, result.any_gone) == (False, True)
    assert result.gone_keys() == [k2, k3]
    assert result[1] is result.REFRESHED is TouchResult.REFRESHED is TouchVerdict.REFRESHED
    assert (result.PRESENT, result.GONE) == (TouchVerdict.PRESENT, TouchVerdict.GONE)
    assert result[1:3] == [TouchVerdict.REFRESHED, TouchVerdict.GONE]
    assert result[-1] is TouchVerdict.GONE
    assert (len(result), result.locations) == (4, [None, CPU, None, None])


@pytest.mark.parametrize("policy", WITH_RECENCY)
def test_a_held_key_is_refreshed_too(make_manager, policy):
    sm = make_manager(policy, num_chunks=3)
    put_all(sm, keys(3))
    reader = hold(sm, keys(1)[0])
    assert evict(sm) == [2]

    assert sm.touch(keys(1)).all_refreshed

    reader.ref_count_down()
    assert evict(sm, 2) == [3, 1]


def test_the_hot_cache_switched_off_makes_every_key_gone(manager):
    put_all(manager, keys(2))

    manager.set_hot_cache(False)

    assert manager.touch(keys(2)).gone == 2


def test_a_touch_and_an_allocation_never_wait_for_each_other(manager):
    put_all(manager, keys(8))
    reader = allocate(manager)

    assert manager.touch(keys(8)).refreshed == 7
    reader.ref_count_down()


def _manager(policy, num_chunks):
    return StorageManager(make_config(num_chunks, cache_policy=policy), make_metadata())
