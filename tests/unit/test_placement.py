"""Placement and admission: cold and spare puts, `would_admit`, `demote`."""

import pytest
import torch
from builders import (
    CHUNK_BYTES,
    CHUNK_SHAPE,
    allocate,
    evict,
    gauges,
    hold,
    keys,
    order,
    put,
    put_all,
    put_batch,
)
from fakes import OldPlugin, PlacingPlugin, ReportingPlugin

from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import AdHocMemoryAllocator
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.placement import Placement
from lmcache.v1.storage_backend.touch import TouchVerdict

WITH_PLACEMENT = ("LRU", "LFU")
WITHOUT_PLACEMENT = ("FIFO", "MRU")
COLD, SPARE, YOUNG = Placement.COLD, Placement.SPARE, Placement.YOUNG


@pytest.mark.parametrize("policy", WITH_PLACEMENT)
def test_cold_entries_leave_before_all_others_the_newest_first(make_manager, policy):
    sm = make_manager(policy, num_chunks=5)
    put_all(sm, keys(3))
    put_all(sm, keys(2, first=10), placement=COLD)

    assert order(sm) == [11, 10, 1, 2, 3]
    assert evict(sm, 5) == [11, 10, 1, 2, 3]


@pytest.mark.parametrize("policy", WITH_PLACEMENT)
@pytest.mark.parametrize("placement", [COLD, SPARE])
def test_of_a_cold_batch_the_tail_leaves_before_the_head(make_manager, policy, placement):
    sm = make_manager(policy, num_chunks=5)
    put_all(sm, keys(2))
    put_batch(sm, keys(3, first=10), placement)

    assert order(sm) == [12, 11, 10, 1, 2]


@pytest.mark.parametrize("policy", WITH_PLACEMENT)
def test_of_a_young_batch_the_tail_leaves_before_the_head(make_manager, policy):
    sm = make_manager(policy, num_chunks=5)
    put_all(sm, keys(2))
    put_batch(sm, keys(3, first=10))

    assert order(sm) == [1, 2, 12, 11, 10]


@pytest.mark.parametrize("use", ["touch", "get", "batched_get", "put again", "pinned lookup"])
def test_a_use_makes_a_cold_entry_an_ordinary_one(make_manager, use):
    sm = make_manager(num_chunks=3)
    put_all(sm, keys(2))
    cold = keys(1, first=10)[0]
    put(sm, cold, placement=COLD)

    if use == "touch":
        assert sm.touch([cold]).all_refreshed
    elif use == "get":
        sm.get(cold).ref_count_down()
    elif use == "batched_get":
        sm.batched_get([cold])[0].ref_count_down()
    elif use == "put again":
        sm.batched_put([cold], [hold(sm, cold)])
    else:
        sm.contains(cold, pin=True)
        sm.batched_unpin([cold])

    assert order(sm) == [1, 2, 10]


def test_under_lfu_a_cold_entry_has_no_uses(make_manager):
    sm = make_manager("LFU", num_chunks=4)
    put_all(sm, keys(2))
    put(sm, keys(1, first=10)[0], placement=COLD)

    sm.touch(keys(1, first=10))

    assert order(sm) == [1, 2, 10]
    sm.touch(keys(2))
    assert order(sm) == [10, 2, 1]


@pytest.mark.parametrize("policy", WITHOUT_PLACEMENT)
@pytest.mark.parametrize("placement", [COLD, SPARE])
def test_fifo_and_mru_ignore_placement(make_manager, policy, placement):
    sm = make_manager(policy, num_chunks=4)
    put_all(sm, keys(2))
    put(sm, keys(1, first=10)[0], placement=placement)

    assert order(sm) == [1, 2, 10]


@pytest.mark.parametrize("policy", WITHOUT_PLACEMENT)
def test_fifo_and_mru_say_that_they_ignore_placement(make_manager, policy, caplog):
    with caplog.at_level("INFO", logger="lmcache"):
        make_manager(policy)

    assert f"cache_policy {policy} ignores placement" in caplog.text


def test_a_cold_put_of_a_resident_key_moves_nothing(make_manager):
    sm = make_manager(num_chunks=4)
    put_all(sm, keys(3))

    put(sm, keys(1, first=3)[0], placement=COLD)

    assert order(sm) == [1, 2, 3]


def test_a_spare_put_that_finds_no_free_room_evicts_nothing(make_manager):
    sm = make_manager(num_chunks=3)
    put_all(sm, keys(3))

    assert not put(sm, keys(1, first=10)[0], placement=SPARE)

    assert order(sm) == [1, 2, 3]


def test_a_spare_put_of_a_foreign_object_evicts_nothing_for_its_copy(make_manager):
    sm = make_manager(num_chunks=3)
    put_all(sm, keys(3))
    foreign = AdHocMemoryAllocator().allocate(CHUNK_SHAPE, torch.bfloat16)

    sm.batched_put(keys(1, first=10), [foreign], placement=SPARE)

    assert order(sm) == [1, 2, 3]


@pytest.mark.parametrize("placement", [YOUNG, COLD, SPARE])
def test_the_placement_reaches_every_tier_that_takes_one(make_manager, placement):
    sm = make_manager(tiers={"lower": PlacingPlugin})

    put(sm, keys(1)[0], placement=placement)

    assert sm.storage_backends["lower"].placements == [placement]


@pytest.mark.parametrize("tier_class", [OldPlugin, ReportingPlugin])
def test_a_tier_that_cannot_tell_its_free_budget_gets_no_spare_put(make_manager, tier_class):
    sm = make_manager(tiers={"lower": tier_class})
    k1, k2 = keys(2)

    put(sm, k1, placement=SPARE)
    put(sm, k2, placement=COLD)

    assert list(sm.storage_backends["lower"].data) == [k2]


@pytest.mark.parametrize("wrong", ["cold", None, 1])
def test_a_placement_of_the_wrong_type_is_refused_and_stores_nothing(manager, wrong):
    obj = allocate(manager)

    with pytest.raises(TypeError, match="placement must be a Placement"):
        manager.batched_put(keys(1), [obj], placement=wrong)
    with pytest.raises(TypeError, match="placement must be a Placement"):
        manager.would_admit(1, wrong)

    assert order(manager) == []
    assert obj.get_ref_count() == 1
    obj.ref_count_down()


def test_spare_is_admitted_only_into_a_free_extent_of_that_size(make_manager):
    sm = make_manager(num_chunks=4)
    assert sm.would_admit(4 * CHUNK_BYTES, SPARE)
    put_all(sm, keys(3))

    assert sm.would_admit(CHUNK_BYTES, SPARE)
    assert not sm.would_admit(CHUNK_BYTES + 1, SPARE)


def test_free_bytes_in_two_pieces_do_not_admit_one_spare_object_of_both(make_manager):
    sm = make_manager(num_chunks=4)
    put_all(sm, keys(4))
    k1, _, k3, _ = keys(4)
    sm.batched_remove([k1, k3])

    assert gauges(sm)["free_bytes"] == 2 * CHUNK_BYTES
    assert not sm.would_admit(2 * CHUNK_BYTES, SPARE)
    assert sm.would_admit(2 * CHUNK_BYTES, YOUNG)


@pytest.mark.parametrize("placement", [YOUNG, COLD])
def test_others_are_admitted_when_room_can_be_made_and_nothing_is_evicted_by_asking(
    make_manager, placement
):
    sm = make_manager(num_chunks=4)
    put_all(sm, keys(4))

    assert sm.would_admit(4 * CHUNK_BYTES, placement)
    assert not sm.would_admit(4 * CHUNK_BYTES + 1, placement)
    assert order(sm) == [1, 2, 3, 4]


def test_what_is_held_is_no_room(make_manager):
    sm = make_manager(num_chunks=4)
    put_all(sm, keys(4))
    reader = hold(sm, keys(2)[1])

    assert sm.would_admit(2 * CHUNK_BYTES)
    assert not sm.would_admit(3 * CHUNK_BYTES)

    reader.ref_count_down()
    assert sm.would_admit(4 * CHUNK_BYTES)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_asking_for_no_bytes_is_an_error(manager, nbytes):
    with pytest.raises(ValueError, match="nbytes must be positive"):
        manager.would_admit(nbytes)


@pytest.mark.parametrize("placement", [YOUNG, SPARE])
@pytest.mark.parametrize("nbytes", [1, CHUNK_BYTES, 2 * CHUNK_BYTES, 3 * CHUNK_BYTES])
def test_what_is_admitted_can_be_allocated_and_what_is_not_cannot(make_manager, placement, nbytes):
    sm = make_manager(num_chunks=3)
    put_all(sm, keys(2))
    reader = hold(sm, keys(1)[0])

    admitted = sm.would_admit(nbytes, placement)
    obj = allocate(sm, nbytes, eviction=placement is not SPARE)

    assert (obj is not None) == admitted
    reader.ref_count_down()
    if obj is not None:
        obj.ref_count_down()


@pytest.mark.parametrize("policy", WITH_PLACEMENT)
def test_demoted_keys_answer_like_a_touch_and_leave_first_tail_before_head(make_manager, policy):
    sm = make_manager(policy, num_chunks=5)
    put_all(sm, keys(5))
    sm.touch(keys(2, first=3))

    result = sm.demote([*keys(2, first=3), *keys(1, first=9)])

    assert list(result) == [TouchVerdict.REFRESHED] * 2 + [TouchVerdict.GONE]
    assert order(sm)[:2] == [4, 3]
    assert evict(sm, 2) == [4, 3]


@pytest.mark.parametrize("policy", WITHOUT_PLACEMENT)
def test_fifo_and_mru_demote_nothing_and_say_present(make_manager, policy):
    sm = make_manager(policy, num_chunks=3)
    put_all(sm, keys(3))

    assert list(sm.demote(keys(1, first=3))) == [TouchVerdict.PRESENT]

    assert order(sm) == [1, 2, 3]


def test_a_demoted_key_is_ordinary_again_after_a_touch(make_manager):
    sm = make_manager(num_chunks=3)
    put_all(sm, keys(3))
    sm.demote(keys(1, first=2))

    sm.touch(keys(1, first=2))

    assert order(sm) == [1, 3, 2]


def test_a_demoted_key_reaches_the_lower_tiers_cold_end(make_manager):
    sm = make_manager(tiers={"lower": ReportingPlugin})
    put_all(sm, keys(3))

    sm.demote(keys(2, first=2))

    assert [key.chunk_hash for key in sm.storage_backends["lower"].data] == [3, 2, 1]


def test_a_demoted_entry_that_is_held_leaves_first_once_released(make_manager):
    sm = make_manager(num_chunks=3)
    put_all(sm, keys(3))
    reader = hold(sm, keys(1, first=3)[0])

    sm.demote(keys(1, first=3))
    assert evict(sm) == [1]
    reader.ref_count_down()

    assert evict(sm, 2) == [3, 2]


def test_a_demoted_entry_that_is_parked_leaves_first_once_released(make_manager):
    sm = make_manager(num_chunks=4)
    put_all(sm, keys(4))
    readers = [hold(sm, key) for key in keys(2)]
    assert evict(sm) == [3]
    assert gauges(sm)["num_parked"] == 2

    assert sm.demote(keys(1, first=2)).all_refreshed
    assert gauges(sm)["num_parked"] == 2
    for reader in readers:
        reader.ref_count_down()

    assert evict(sm, 3) == [2, 1, 4]


@pytest.mark.parametrize("wrong", [None, "key", [1]])
def test_demoting_what_is_no_key_is_a_type_error(manager, wrong):
    with pytest.raises(TypeError):
        manager.demote(wrong)


def test_a_tier_without_a_pool_admits_anything_and_evicts_nothing_for_it(make_config, metadata):
    backend = LocalCPUBackend(make_config(), metadata, memory_allocator=AdHocMemoryAllocator("cpu"))
    for key in keys(2):
        obj = backend.allocate(CHUNK_SHAPE, torch.bfloat16)
        backend.submit_put_task(key, obj)
        obj.ref_count_down()

    for placement in Placement:
        assert backend.would_admit(1 << 40, placement)
    assert backend.get_keys() == list(keys(2))
    backend.check_integrity()
    backend.close()
