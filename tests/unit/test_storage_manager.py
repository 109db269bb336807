"""The storage manager over several tiers: put, get, lookups, removal, switches, faults, life."""

import pytest
import torch
from builders import (
    CHUNK_BYTES,
    CHUNK_SHAPE,
    CHUNK_TOKENS,
    CPU,
    allocate,
    gauges,
    is_filled,
    keys,
    make_config,
    make_metadata,
    order,
    put,
    put_all,
)
from fakes import OldPlugin, ReportingPlugin

from lmcache.v1.errors import ConfigError, UnsupportedFeatureError
from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import AdHocMemoryAllocator
from lmcache.v1.memory_management import BytesBufferMemoryObj
from lmcache.v1.storage_backend.storage_manager import StorageManager

PLUGIN = {
    "storage_plugins": ["mine"],
    "extra_config": {
        "storage_plugin.mine.module_path": "fakes",
        "storage_plugin.mine.class_name": "OldPlugin",
    },
}


class FaultyPlugin(OldPlugin):
    """A tier of which every data call fails."""

    def _fail(self, *args, **kwargs):
        raise OSError("the medium is gone")

    contains = batched_submit_put_task = get_blocking = remove = unpin = _fail


@pytest.fixture(params=[OldPlugin, ReportingPlugin])
def two_tiers(request, make_manager):
    """A CPU pool of three chunks over a lower tier; returns manager and lower tier."""
    sm = make_manager(num_chunks=3, tiers={"lower": request.param})
    return sm, sm.storage_backends["lower"]


def test_a_put_goes_to_every_tier_and_drops_one_reference(two_tiers):
    sm, lower = two_tiers
    obj = allocate(sm)

    sm.batched_put(keys(1), [obj])

    assert (order(sm), list(lower.data)) == ([1], keys(1))
    assert (obj.get_ref_count(), obj.can_evict) == (1, True)


def test_a_put_to_one_location_goes_nowhere_else(two_tiers):
    sm, lower = two_tiers

    put(sm, keys(1)[0], location="lower")
    put(sm, keys(2)[1], location=CPU)

    assert (order(sm), list(lower.data)) == ([2], keys(1))
    assert gauges(sm)["num_blocks"] == 1


def test_an_unknown_location_is_an_error_and_the_references_stay_the_callers(two_tiers):
    sm, _ = two_tiers
    obj = allocate(sm)

    with pytest.raises(ValueError, match="no storage backend 'nowhere'"):
        sm.batched_put(keys(1), [obj], location="nowhere")

    assert obj.get_ref_count() == 1
    obj.ref_count_down()


def test_unequal_numbers_and_wrong_types_are_refused(manager):
    obj = allocate(manager)

    with pytest.raises(ValueError, match="2 keys do not go with 1"):
        manager.batched_put(keys(2), [obj])
    with pytest.raises(TypeError, match=r"keys\[0\] is a str"):
        manager.batched_put(["key"], [obj])
    with pytest.raises(TypeError, match=r"memory_objs\[0\]"):
        manager.batched_put(keys(1), [None])
    obj.ref_count_down()
    with pytest.raises(ValueError, match=r"memory_objs\[0\]"):
        manager.batched_put(keys(1), [obj])


def test_a_get_below_the_cpu_tier_is_right_and_written_back(two_tiers):
    sm, _ = two_tiers
    put_all(sm, keys(4))
    assert 1 not in order(sm)

    obj = sm.get(keys(1)[0])

    assert is_filled(obj, 1)
    assert 1 in order(sm)
    obj.ref_count_down()


def test_a_batched_get_takes_each_key_from_the_first_tier_that_has_it(two_tiers):
    sm, lower = two_tiers
    put(sm, keys(1)[0], location=CPU)
    put(sm, keys(2)[1], location="lower")
    lower.calls.clear()

    objs = sm.batched_get(keys(3))

    assert [obj is not None for obj in objs] == [True, True, False]
    assert is_filled(objs[0], 1)
    assert is_filled(objs[1], 2)
    assert set(order(sm)) == {1, 2}
    assert lower.calls.count("get") == 2
    for obj in objs[:2]:
        obj.ref_count_down()


def test_a_get_at_one_location_asks_no_other(two_tiers):
    sm, _ = two_tiers
    put(sm, keys(1)[0], location="lower")

    assert sm.get(keys(1)[0], location=CPU) is None
    assert sm.batched_get(keys(1), location=CPU) == [None]
    sm.get(keys(1)[0], location="lower").ref_count_down()


def test_a_prefix_is_split_over_the_tiers_that_hold_it(two_tiers):
    sm, _ = two_tiers
    put_all(sm, keys(2), location=CPU)
    put_all(sm, keys(2, first=3), location="lower")

    assert sm.batched_contains(keys(5)) == (4, {CPU: keys(2), "lower": keys(2, first=3)})
    assert sm.batched_contains(keys(5), search_range=[CPU]) == (2, {CPU: keys(2)})
    infos = [(key, 16 * n, 16 * n + 16) for n, key in enumerate(keys(5))]
    assert sm.get_block_mapping(infos) == {CPU: infos[:2], "lower": infos[2:4]}


def test_a_lookup_names_the_first_tier(two_tiers):
    sm, _ = two_tiers
    put(sm, keys(1)[0])
    put(sm, keys(2)[1], location="lower")

    assert [sm.contains(key) for key in keys(3)] == [CPU, "lower", None]
    assert sm.contains(keys(1)[0], search_range=["lower"]) == "lower"


def test_a_removal_counts_copies_over_the_tiers_or_those_named(two_tiers):
    sm, _ = two_tiers
    put_all(sm, keys(3))

    assert sm.remove(keys(1)[0]) == 2
    assert sm.remove(keys(1)[0]) == 0
    assert sm.batched_remove(keys(3)) == 4
    put(sm, keys(1)[0])
    assert sm.remove(keys(1)[0], locations=[CPU]) == 1
    assert sm.contains(keys(1)[0]) == "lower"


def test_a_put_of_another_dtype_or_size_replaces_the_entry(manager):
    put(manager, keys(1)[0])
    put(manager, keys(2)[1])

    put(manager, keys(1)[0], nbytes=CHUNK_BYTES // 2)

    obj = manager.get(keys(1)[0])
    assert obj.get_size() == CHUNK_BYTES // 2
    assert order(manager) == [2, 1]
    assert gauges(manager)["cached_bytes"] == CHUNK_BYTES * 3 // 2
    obj.ref_count_down()


def test_a_reader_of_a_replaced_entry_keeps_the_old_bytes(manager):
    put(manager, keys(1)[0])
    reader = manager.get(keys(1)[0])
    replacement = allocate(manager, CHUNK_BYTES // 2)
    replacement.raw_tensor.fill_(9)

    manager.batched_put(keys(1), [replacement])

    assert is_filled(reader, 1)
    assert reader.get_size() == CHUNK_BYTES
    reader.ref_count_down()


def test_one_object_under_two_keys_becomes_two_copies(manager):
    obj = allocate(manager)
    obj.raw_tensor.fill_(7)
    obj.ref_count_up()

    manager.batched_put(keys(2), [obj, obj])

    first, second = (manager.local_cpu_backend.hot_cache[key] for key in keys(2))
    assert first.data_ptr != second.data_ptr
    assert is_filled(first, 7)
    assert is_filled(second, 7)


@pytest.mark.parametrize("kind", ["own memory", "byte buffer"])
def test_an_object_of_another_allocator_is_copied_into_the_pool(manager, kind):
    if kind == "own memory":
        obj = AdHocMemoryAllocator().allocate(CHUNK_SHAPE, torch.bfloat16)
        obj.raw_tensor.fill_(7)
    else:
        obj = BytesBufferMemoryObj(bytearray(b"\x07" * CHUNK_BYTES))

    manager.batched_put(keys(1), [obj])

    stored = manager.local_cpu_backend.hot_cache[keys(1)[0]]
    assert is_filled(stored, 7)
    assert stored.pool() is manager.local_cpu_backend.hot.pool
    assert stored.get_size() == obj.get_size()


def test_callbacks_run_once_per_stored_key_and_may_raise(manager, caplog):
    told = []

    def tell(key):
        told.append(key)
        raise RuntimeError("a fault of the caller")

    objs = [allocate(manager) for _ in range(2)]
    manager.local_cpu_backend.batched_submit_put_task(keys(2), objs, on_complete_callback=tell)
    for obj in objs:
        obj.ref_count_down()

    assert told == keys(2)
    assert order(manager) == [2, 1]
    assert caplog.text.count("on_complete_callback raised") == 2


def test_a_faulty_lower_tier_costs_misses_and_one_log_line_a_call(make_manager, caplog):
    sm = make_manager(tiers={"faulty": FaultyPlugin})

    for _ in range(2):
        put_all(sm, keys(2))
        assert [sm.contains(key) for key in keys(3)] == [CPU, CPU, None]
        assert sm.get(keys(3)[2]) is None
        assert sm.batched_get(keys(3))[2] is None
        sm.batched_unpin(keys(1))
        assert sm.remove(keys(1)[0]) == 1
    for obj in sm.local_cpu_backend.hot_cache.values():
        while obj.get_ref_count() > 1:
            obj.ref_count_down()

    for call in ("put", "contains", "get", "batched_get", "unpin", "remove"):
        assert caplog.text.count(f"faulty failed in {call} and counts as a miss") == 1


def test_switched_off_the_hot_cache_forgets_everything_and_takes_nothing(manager):
    put_all(manager, keys(3))

    manager.set_hot_cache(False)
    put(manager, keys(1, first=9)[0])

    assert not manager.is_hot_cache_enabled()
    assert (order(manager), gauges(manager)["num_blocks"]) == ([], 0)
    assert manager.clear() == 0
    manager.set_hot_cache(True)
    put(manager, keys(1)[0])
    assert order(manager) == [1]


def test_frozen_only_the_cpu_tier_is_searched(two_tiers):
    sm, _ = two_tiers
    put(sm, keys(1)[0], location="lower")

    sm.set_freeze(True)
    assert (sm.contains(keys(1)[0]), sm.is_frozen()) == (None, True)
    sm.set_freeze(False)
    assert sm.contains(keys(1)[0]) == "lower"


def test_a_bypassed_tier_is_skipped_in_every_call(two_tiers):
    sm, lower = two_tiers
    put(sm, keys(1)[0])
    lower.calls.clear()

    sm.set_backend_bypass("lower", True)
    put(sm, keys(2)[1])
    sm.remove(keys(1)[0])
    assert sm.get(keys(1)[0]) is None
    sm.clear()

    assert lower.calls == []
    assert (sm.get_bypassed_backends(), sm.is_backend_bypassed("lower")) == (["lower"], True)
    sm.set_backend_bypass("lower", False)
    assert sm.contains(keys(1)[0]) == "lower"
    with pytest.raises(ValueError, match="no storage backend"):
        sm.set_backend_bypass("nowhere", True)


def test_clearing_counts_tokens_and_warns_of_a_tier_that_cannot(two_tiers, caplog):
    sm, _ = two_tiers
    put_all(sm, keys(3))

    assert sm.clear() == 3 * CHUNK_TOKENS

    assert "lower cannot be cleared" in caplog.text
    assert sm.contains(keys(1)[0]) == "lower"


def test_a_plugin_is_loaded_by_name_below_the_cpu_tier(make_manager):
    sm = make_manager(**PLUGIN)

    assert sm.list_backends() == {CPU: "LocalCPUBackend", "mine": "OldPlugin"}
    assert sm.get_non_allocator_backends() == sm.non_allocator_backends == ["mine"]
    assert [name for name, _ in sm.get_active_storage_backends()] == sm.get_all_backend_names()
    plugin = sm.storage_backends["mine"]
    assert plugin.loop is sm.loop
    assert plugin.metadata is sm.metadata


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"storage_plugin.mine.class_name": None}, "class_name"),
        ({"storage_plugin.mine.module_path": "no_such_module"}, "no_such_module"),
        ({"storage_plugin.mine.class_name": "NoSuchClass"}, "NoSuchClass"),
        ({"storage_plugin.mine.class_name": "FakeClock"}, "is no StoragePluginInterface"),
    ],
)
def test_a_plugin_that_cannot_be_loaded_is_an_error_that_names_it(change, message):
    settings = {**PLUGIN, "extra_config": {**PLUGIN["extra_config"], **change}}

    with pytest.raises(ConfigError, match=message):
        StorageManager(make_config(**settings), make_metadata())


def test_a_tier_can_be_closed_and_made_anew_while_the_cpu_tier_stays(make_manager):
    sm = make_manager(**PLUGIN)
    put(sm, keys(1)[0])
    first = sm.storage_backends["mine"]

    sm.recreate_backend("mine")

    assert first.is_closed
    assert sm.storage_backends["mine"] is not first
    assert order(sm) == [1]
    assert sm.touch(keys(1)).all_refreshed
    assert not sm.close_backend("nowhere")
    with pytest.raises(ValueError, match="owns the memory"):
        sm.close_backend(CPU)


def test_closing_closes_the_lower_tiers_first_and_survives_their_faults(make_manager, caplog):
    class Reluctant(OldPlugin):
        def close(self):
            assert not self.local_cpu_backend._is_closed
            raise OSError("cannot close")

    sm = make_manager(tiers={"reluctant": Reluctant})
    put_all(sm, keys(2))
    loop = sm.loop

    sm.close()
    sm.close()

    assert "closing reluctant failed" in caplog.text
    assert order(sm) == []
    assert not loop.is_running()


def test_what_this_fork_lacks_is_refused_by_name():
    with pytest.raises(UnsupportedFeatureError, match="async_lookup_server"):
        StorageManager(make_config(), make_metadata(), async_lookup_server=object())


def test_memcheck_tells_of_a_dropped_reference(manager):
    assert manager.memcheck()

    del [allocate(manager)][0]

    assert not manager.memcheck()
