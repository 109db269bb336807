"""Faults of the disk cost a miss, a count and one log line; bad settings are refused at start."""

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest
from builders import CHUNK_BYTES, allocate, keys, put, put_all
from disk_builders import (
    DISK,
    FILE_BYTES,
    bytes_on_disk,
    check_disk,
    disk_of,
    disk_settings,
    file_of,
    files_of,
    flip_a_bit,
    gate_files,
    order_below,
    read,
    small_file_system,
    store_below,
)

from lmcache.v1.storage_backend.cache_events import EventKind, RemovalReason
from lmcache.v1.storage_backend.disk.chunk_directory import ChunkDirectory


def reported(caplog, word):
    """How many lines of the log are about `word`."""
    return len([record for record in caplog.records if word in record.getMessage()])


def removals(subscription):
    """(hash, reason) of the removals told so far."""
    return [
        (event.key.chunk_hash, event.reason)
        for event in subscription.take()
        if event.kind is EventKind.REMOVED
    ]


def test_a_full_file_system_costs_misses_and_is_used_again_once_there_is_room(make_manager, caplog):
    with small_file_system(8 * FILE_BYTES) as directory:
        sm = make_manager(num_chunks=32, **disk_settings(directory, num_files=100))
        filler = Path(directory) / "filler"
        filler.write_bytes(bytes(4 * FILE_BYTES))
        events = sm.subscribe(tiers=[DISK])

        store_below(sm, keys(8))

        lost = removals(events)
        stored = order_below(sm)
        assert 1 <= len(stored) <= 4
        assert lost == [(n, RemovalReason.ERROR) for n in range(len(stored) + 1, 9)]
        assert disk_of(sm).gauges().failed_writes == len(lost)
        assert reported(caplog, "No space left on device") == 1
        check_disk(sm)
        filler.unlink()
        store_below(sm, keys(1, first=20))
        assert read(sm, keys(1, first=20)[0])
        assert all(read(sm, key) for key in keys(len(stored)))
        sm.close()


def test_a_large_chunk_that_does_not_fit_the_file_system_leaves_nothing_behind(make_manager):
    with small_file_system(2**20) as directory:
        sm = make_manager(num_chunks=400, **disk_settings(directory, num_files=1000))

        put(sm, keys(1)[0], nbytes=4 * 2**20, location=DISK)

        check_disk(sm)
        assert os.listdir(disk_of(sm).path) == []
        assert sm.gauges().cpu.num_memory_objs == 0
        sm.close()


def test_a_write_that_fails_ends_in_an_error_event_and_frees_the_buffer(
    make_disk, monkeypatch, caplog
):
    gates = gate_files(monkeypatch)
    sm = make_disk()
    events = sm.subscribe(tiers=[DISK])
    called = []
    gates[0].write_fault = errno.EIO
    obj = allocate(sm)

    disk_of(sm).batched_submit_put_task(keys(1), [obj], on_complete_callback=called.append)
    obj.ref_count_down()
    sm.drain()

    assert [event.kind for event in events.take()] == [EventKind.STORED, EventKind.REMOVED]
    assert called == []
    assert sm.contains(keys(1)[0]) is None
    assert sm.gauges().cpu.num_memory_objs == 0
    put(sm, keys(1)[0], location=DISK)
    sm.drain()
    assert reported(caplog, os.strerror(errno.EIO)) == 1
    gates[0].write_fault = 0
    store_below(sm, keys(1))
    assert read(sm, keys(1)[0])


def test_a_write_that_fails_after_its_key_was_put_again_takes_only_its_own_copy(
    make_disk, monkeypatch
):
    gates = gate_files(monkeypatch, is_gated=True)
    sm = make_disk()
    (key,) = keys(1)
    put(sm, key, nbytes=CHUNK_BYTES // 2, location=DISK)
    put(sm, key, location=DISK)
    gates[0].write_fault = errno.EIO
    gates[0].open_gate()

    assert sm.contains(key) == DISK
    assert read(sm, key)
    gates[0].open_gate(9)
    sm.drain()


@pytest.mark.parametrize("how", ["vanished", "truncated", "altered", "of another key"])
def test_a_file_that_went_bad_is_a_miss_and_is_removed(make_disk, caplog, how):
    sm = make_disk(local_cpu=False)
    store_below(sm, keys(3))
    events = sm.subscribe()
    path = file_of(sm, keys(1)[0])
    if how == "vanished":
        path.unlink()
    elif how == "truncated":
        os.truncate(path, FILE_BYTES - 1)
    elif how == "altered":
        flip_a_bit(path)
    else:
        shutil.copy(file_of(sm, keys(1, first=2)[0]), path)

    assert not read(sm, keys(1)[0])
    assert read(sm, keys(1, first=2)[0])

    assert removals(events) == [(1, RemovalReason.ERROR)]
    assert disk_of(sm).gauges().failed_reads == 1
    assert disk_of(sm).gauges().bad_files == (how != "vanished")
    assert reported(caplog, "reading") == 1
    check_disk(sm)
    assert len(files_of(sm)) == 2


@pytest.mark.parametrize("fault", [errno.EMFILE, errno.ENOMEM])
def test_a_read_that_fails_for_want_of_something_is_a_miss_and_keeps_the_file(
    make_disk, monkeypatch, fault
):
    gates = gate_files(monkeypatch)
    sm = make_disk()
    store_below(sm, keys(1))
    gates[0].read_fault = fault

    assert not read(sm, keys(1)[0])
    gates[0].read_fault = 0

    assert read(sm, keys(1)[0])
    assert sm.gauges().disk.failed_reads == 1


def test_a_good_prefix_is_read_in_spite_of_a_bad_file_behind_it(make_disk):
    sm = make_disk()
    store_below(sm, keys(4))
    flip_a_bit(file_of(sm, keys(1, first=3)[0]))

    found = disk_of(sm).batched_get_blocking(keys(4))

    assert [obj is not None for obj in found] == [True, True, False, True]
    for obj in found:
        if obj is not None:
            obj.ref_count_down()
    assert sm.gauges().cpu.num_memory_objs == 0


def test_a_directory_that_vanishes_costs_misses_and_nothing_hangs(make_disk, caplog, tmp_path):
    sm = make_disk()
    store_below(sm, keys(2))
    shutil.rmtree(tmp_path / "lmcache-v1")

    assert not read(sm, keys(1)[0])
    put_all(sm, keys(3, first=5), location=DISK)
    sm.drain()

    assert order_below(sm) == [2]
    assert reported(caplog, "recreate the backend") >= 1
    sm.recreate_backend(DISK)
    store_below(sm, keys(1, first=9))
    assert read(sm, keys(1, first=9)[0])


def test_a_file_that_cannot_be_removed_keeps_its_room_until_it_can(make_disk, monkeypatch):
    gates = gate_files(monkeypatch)
    sm = make_disk(3)
    store_below(sm, keys(3))
    remove = gates[0].remove
    gates[0].remove = lambda names: [(n, errno.EBUSY) for n in range(len(names))]
    sm.remove(keys(1)[0])
    sm.drain()

    store_below(sm, keys(1, first=7), nbytes=CHUNK_BYTES - 8)
    assert bytes_on_disk(sm) <= 3 * FILE_BYTES
    gates[0].remove = remove
    store_below(sm, keys(3, first=8))

    assert order_below(sm) == [8, 9, 10]
    check_disk(sm)


def test_what_no_longer_fits_beside_a_file_that_stays_is_not_written(make_disk, monkeypatch):
    gates = gate_files(monkeypatch)
    sm = make_disk(3)
    store_below(sm, keys(3))
    gates[0].remove = lambda names: [(n, errno.EBUSY) for n in range(len(names))]

    store_below(sm, keys(1, first=7), nbytes=CHUNK_BYTES - 8)  # 1 leaves for it, but its file stays

    assert order_below(sm) == [2, 3]
    assert bytes_on_disk(sm) == 3 * FILE_BYTES


@pytest.mark.parametrize("call", ["write", "remove", "read_heads"])
def test_an_unforeseen_error_in_the_writer_costs_a_round_and_not_the_tier(
    make_disk, monkeypatch, call
):
    gates = gate_files(monkeypatch)
    sm = make_disk()
    store_below(sm, keys(1))
    sm.close()
    sm = make_disk()
    real = vars(type(gates[1]))[call]
    monkeypatch.setattr(gates[1], call, lambda *arguments: 1 / 0)
    sm.drain()
    put(sm, keys(1, first=5)[0], location=DISK)
    sm.remove(keys(1, first=5)[0])
    sm.drain()
    monkeypatch.setattr(gates[1], call, lambda *arguments: real(gates[1], *arguments))

    store_below(sm, keys(1, first=6))

    assert read(sm, keys(1, first=6)[0])
    sm.check_integrity()


def test_a_removal_during_a_read_is_a_miss_or_a_hit_and_never_a_fault(make_disk, monkeypatch):
    gates = gate_files(monkeypatch)
    sm = make_disk()
    store_below(sm, keys(2))
    real_read = gates[0].read

    def remove_first(jobs):
        sm.remove(keys(1)[0])
        sm.drain()
        return real_read(jobs)

    gates[0].read = remove_first
    events = sm.subscribe()

    assert disk_of(sm).get_blocking(keys(1)[0]) is None

    assert removals(events) == [(1, RemovalReason.EXPLICIT)]
    assert sm.gauges().cpu.num_memory_objs == 0
    assert sm.gauges().disk.failed_reads == 0


def test_a_listing_that_fails_stores_nothing_since_nobody_knows_what_room_is_left(
    make_disk, monkeypatch, caplog
):
    def fail(self):
        raise OSError(errno.EIO, "no")
        yield

    sm = make_disk(3)
    store_below(sm, keys(3))
    sm.close()
    with monkeypatch.context() as patch:
        patch.setattr(ChunkDirectory, "found_files", fail)
        sm = make_disk(3)
        sm.drain()

    put(sm, keys(1, first=9)[0])
    sm.drain()

    assert order_below(sm) == []
    assert bytes_on_disk(sm) == 3 * FILE_BYTES
    assert reported(caplog, "listing /") == 1
    assert reported(caplog, "recreate the backend") == 1
    sm.recreate_backend(DISK)
    check_disk(sm)
    assert order_below(sm) == [1, 2, 3]


def test_close_gives_up_on_a_disk_that_hangs_and_another_tier_takes_another_directory(
    make_disk, monkeypatch
):
    monkeypatch.setattr("lmcache.v1.storage_backend.local_disk_backend._CLOSE_SECONDS", 0.05)
    gates = gate_files(monkeypatch, is_gated=True)
    sm = make_disk()
    put_all(sm, keys(4), location=DISK)
    hung = disk_of(sm).path

    sm.close_backend(DISK)
    sm.recreate_backend(DISK)

    assert disk_of(sm).path != hung
    assert not list(Path(hung).glob("*.pt"))
    for gate in gates:
        gate.is_gated = False
        gate.open_gate(9)
    store_below(sm, keys(1, first=9))
    assert read(sm, keys(1, first=9)[0])


def test_close_writes_what_is_in_flight_and_twice_is_a_no_op(make_disk):
    sm = make_disk()
    put_all(sm, keys(4), location=DISK)
    disk = disk_of(sm)

    disk.close()
    disk.close()

    assert len(list(Path(disk.path).glob("*.pt"))) == 4
    put(sm, keys(1, first=9)[0])
    assert disk.get_blocking(keys(1)[0]) is None
    disk.drain()


def test_no_lock_is_held_over_a_read_or_a_write(make_disk, monkeypatch):
    gates = gate_files(monkeypatch, is_gated=True)
    sm = make_disk()
    put_all(sm, keys(2), location=DISK)
    files, disk = gates[0], disk_of(sm)
    locked = []
    files.read = lambda jobs: (
        locked.append((disk.disk_lock.locked(), sm.local_cpu_backend.cpu_lock.locked())),
        type(files).read(files, jobs),
    )[1]

    def others():
        sm.touch(keys(2))
        put(sm, keys(1, first=5)[0])
        sm.remove(keys(1, first=5)[0])

    thread = threading.Thread(target=others)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "a write in progress kept others waiting"
    files.open_gate(9)
    sm.drain()
    assert read(sm, keys(1)[0])

    assert locked == [(False, False)]
