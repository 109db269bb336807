"""The disk tier: what it keeps, what is served meanwhile, how it works with the tier above."""

import asyncio

import pytest
import torch
from builders import (
    CHUNK_BYTES,
    CPU,
    allocate,
    evict,
    is_filled,
    keys,
    put,
    put_all,
)
from disk_builders import (
    DISK,
    FILE_BYTES,
    check_disk,
    disk_of,
    file_of,
    files_of,
    gate_files,
    order_below,
    read,
    store_below,
)

from lmcache.v1.memory_format import MemoryFormat
from lmcache.v1.storage_backend.cache_events import EventKind, RemovalReason
from lmcache.v1.storage_backend.touch import TouchVerdict


def test_a_chunk_stored_comes_back_from_its_file_with_every_byte(make_disk):
    sm = make_disk()
    put_all(sm, keys(4))
    sm.drain()
    sm.set_hot_cache(False)

    assert all(read(sm, key) for key in keys(4))
    assert len(files_of(sm)) == 4
    check_disk(sm)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, CHUNK_BYTES, 300_000, 2**20 + 8])
def test_chunks_of_any_size_come_back(make_disk, nbytes, direct):
    sm = make_disk(200, 200, extra_config={"use_odirect": direct})
    obj = allocate(sm, nbytes)
    content = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    obj.raw_tensor.copy_(content)
    sm.batched_put(keys(1), [obj], location=DISK)
    sm.drain()

    found = sm.get(keys(1)[0])

    assert torch.equal(found.raw_tensor, content)
    found.ref_count_down()
    check_disk(sm)


def test_shapes_dtypes_and_format_come_back(make_disk):
    sm = make_disk()
    shapes = [torch.Size([2, 3, 8, 4]), torch.Size([5, 7])]
    obj = sm.allocate(shapes, [torch.bfloat16, torch.float8_e4m3fnuz], MemoryFormat.KV_2LTD)
    obj.raw_tensor.fill_(3)
    sm.batched_put(keys(1), [obj], location=DISK)
    sm.drain()

    found = sm.get(keys(1)[0])

    assert found.get_shapes() == shapes
    assert found.get_dtypes() == [torch.bfloat16, torch.float8_e4m3fnuz]
    assert found.get_memory_format() is MemoryFormat.KV_2LTD
    found.ref_count_down()


def test_a_put_in_flight_is_present_and_served_from_its_buffer(make_disk, monkeypatch):
    files = gate_files(monkeypatch, is_gated=True)
    sm = make_disk()
    (key,) = keys(1)
    events = sm.subscribe()
    put(sm, key, location=DISK)

    assert disk_of(sm).exists_in_put_tasks(key)
    assert sm.contains(key) == DISK
    assert sm.touch([key]).verdicts == [TouchVerdict.PRESENT]
    assert [event.kind for event in events.take()] == [EventKind.STORED]
    assert disk_of(sm).current_cache_size == FILE_BYTES
    assert read(sm, key)
    assert files_of(sm) == {}
    files[0].open_gate()
    sm.drain()
    assert not disk_of(sm).exists_in_put_tasks(key)
    assert len(files_of(sm)) == 1


def test_drain_waits_for_what_was_admitted_before_it(make_disk, monkeypatch):
    gates = gate_files(monkeypatch, is_gated=True)
    sm = make_disk()
    put_all(sm, keys(3), location=DISK)
    gates[0].open_gate(3)

    sm.drain()

    assert len(files_of(sm)) == 3


def test_a_put_of_another_size_replaces_the_file(make_disk):
    sm = make_disk(8)
    (key,) = keys(1)
    put(sm, key, location=DISK)
    sm.drain()
    events = sm.subscribe()

    put(sm, key, nbytes=2 * CHUNK_BYTES, location=DISK)
    sm.drain()

    removed, stored = events.take()
    assert (removed.reason, removed.still_in) == (RemovalReason.REPLACED, {DISK})
    assert (stored.kind, stored.size_bytes) == (EventKind.STORED, 2 * CHUNK_BYTES)
    found = sm.get(key)
    assert found.get_size() == 2 * CHUNK_BYTES
    found.ref_count_down()
    check_disk(sm)


def test_a_put_that_replaces_one_in_flight_leaves_one_file(make_disk, monkeypatch):
    gates = gate_files(monkeypatch, is_gated=True)
    sm = make_disk(8)
    (key,) = keys(1)
    for num_chunks in (1, 2, 1):
        put(sm, key, nbytes=num_chunks * CHUNK_BYTES - 8, location=DISK)
    gates[0].open_gate(3)

    check_disk(sm)

    assert len(files_of(sm)) == 1
    assert read(sm, key)


def test_a_removal_in_flight_leaves_no_file_and_no_reference(make_disk, monkeypatch):
    gates = gate_files(monkeypatch, is_gated=True)
    sm = make_disk()
    put_all(sm, keys(3), location=DISK)

    assert sm.batched_remove(keys(3)) == 3
    gates[0].open_gate(3)
    check_disk(sm)

    assert files_of(sm) == {}
    assert sm.gauges().cpu.num_memory_objs == 0


def test_a_hit_on_disk_is_promoted_and_stays_below(make_disk):
    sm = make_disk()
    store_below(sm, keys(2))
    events = sm.subscribe()

    assert read(sm, keys(1)[0])

    assert sm.contains(keys(1)[0]) == CPU
    (promoted,) = events.take()
    assert (promoted.kind, promoted.tier, promoted.still_in) == (EventKind.STORED, CPU, {CPU, DISK})


def test_what_the_cpu_tier_evicts_is_still_on_disk(make_disk):
    sm = make_disk(num_chunks=4)
    for key in keys(4):
        put(sm, key)
        sm.drain()
    events = sm.subscribe(kinds={EventKind.REMOVED})

    assert evict(sm, 2) == [1, 2]

    assert [event.still_in for event in events.take()] == [{DISK}, {DISK}]
    assert read(sm, keys(1)[0])


def test_a_batched_get_fills_each_position_from_the_tier_that_has_it(make_disk):
    sm = make_disk()
    put_all(sm, keys(2), location=CPU)
    store_below(sm, keys(2, first=3))
    wanted = [keys(1, first=n)[0] for n in (3, 1, 9, 4, 2)]

    found = sm.batched_get(wanted)

    assert [obj is not None for obj in found] == [True, True, False, True, True]
    for key, obj in zip(wanted, found, strict=True):
        if obj is not None:
            assert is_filled(obj, key.chunk_hash)
            obj.ref_count_down()


def test_a_prefix_is_split_over_the_tiers(make_disk):
    sm = make_disk()
    put_all(sm, keys(2), location=CPU)
    store_below(sm, keys(3, first=3))

    assert sm.batched_contains(keys(6)) == (5, {CPU: keys(2), DISK: keys(3, first=3)})


def test_without_room_in_the_pool_a_read_gives_fewer_objects_all_of_them_right(make_disk):
    sm = make_disk(16, num_chunks=8)
    store_below(sm, keys(12))
    staging = [allocate(sm) for _ in range(5)]

    found = disk_of(sm).batched_get_blocking(keys(12))

    assert [obj is not None for obj in found] == [True] * 3 + [False] * 9
    for key, obj in zip(keys(3), found, strict=False):
        assert is_filled(obj, key.chunk_hash)
        obj.ref_count_down()
    for obj in staging:
        obj.ref_count_down()
    assert sm.gauges().cpu.num_memory_objs == 0
    assert len(order_below(sm)) == 12


def test_an_asynchronous_read_gives_the_prefix_that_could_be_read(make_disk):
    sm = make_disk()
    store_below(sm, [*keys(2), *keys(1, first=4)])

    found = asyncio.run(disk_of(sm).batched_get_non_blocking("lookup", keys(4)))

    assert [is_filled(obj, number) for number, obj in enumerate(found, 1)] == [True, True]
    for obj in found:
        obj.ref_count_down()
    assert sm.gauges().cpu.num_memory_objs == 0


def test_callbacks_come_once_per_key_and_only_when_its_file_is_there(make_disk, monkeypatch):
    gates = gate_files(monkeypatch, is_gated=True)
    sm = make_disk()
    disk, called = disk_of(sm), []
    objs = [allocate(sm) for _ in range(2)]

    disk.batched_submit_put_task(keys(2), objs, on_complete_callback=called.append)
    assert called == []
    gates[0].open_gate(2)
    sm.drain()
    assert called == keys(2)
    disk.batched_submit_put_task(keys(2), objs, on_complete_callback=called.append)

    assert called == keys(2) * 2
    for obj in objs:
        obj.ref_count_down()


def test_a_callback_that_raises_undoes_nothing(make_disk):
    sm = make_disk()
    obj = allocate(sm)

    disk_of(sm).batched_submit_put_task(keys(1), [obj], on_complete_callback=lambda key: 1 / 0)
    obj.ref_count_down()

    check_disk(sm)
    assert order_below(sm) == [1]


def test_the_disk_view_has_what_upstream_s_index_has(make_disk):
    sm = make_disk()
    store_below(sm, keys(1))
    disk, (key,) = disk_of(sm), keys(1)

    metadata = disk.dict[key]

    assert metadata.path == str(file_of(sm, key))
    assert metadata.path.startswith(disk.path)
    assert (metadata.size, metadata.pin_count) == (CHUNK_BYTES, 0)
    assert (metadata.dtype, metadata.fmt) == (torch.bfloat16, MemoryFormat.KV_2LTD)
    assert key in disk.dict and keys(1, first=2)[0] not in disk.dict
    assert disk.current_cache_size == FILE_BYTES
    with disk.disk_lock:
        disk.cache_policy.update_on_hit(key, disk.dict)
        assert disk.remove(key, force=False)
    with pytest.raises(KeyError):
        disk.dict[key]


def test_bypassed_or_frozen_out_the_disk_is_not_asked(make_disk):
    sm = make_disk()
    store_below(sm, keys(1))

    sm.set_freeze(True)
    assert sm.contains(keys(1)[0]) is None
    assert sm.touch(keys(1)).verdicts == [TouchVerdict.GONE]
    sm.set_freeze(False)
    sm.set_backend_bypass(DISK, True)
    assert sm.get(keys(1)[0]) is None
    put(sm, keys(1, first=2)[0])
    sm.set_backend_bypass(DISK, False)

    assert order_below(sm) == [1]
    assert read(sm, keys(1)[0])


def test_a_disk_only_chunk_that_is_stored_again_has_its_copy_above_back(make_disk):
    sm = make_disk()
    store_below(sm, keys(2))
    assert sm.touch(keys(1)).verdicts == [TouchVerdict.PRESENT]

    put(sm, keys(1)[0])

    assert sm.touch(keys(1)).verdicts == [TouchVerdict.REFRESHED]
    assert order_below(sm) == [2, 1]
    assert disk_of(sm).gauges().num_queued == 0  # the file is the one it had
    assert len(files_of(sm)) == 2
