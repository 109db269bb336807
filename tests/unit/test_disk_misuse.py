"""Odd files, odd moments, odd callbacks: none of it costs more than it must."""

import errno
import os
import threading

import pytest
from builders import CHUNK_BYTES, allocate, keys, make_config, make_metadata, put, until
from disk_builders import (
    DISK,
    FILE_BYTES,
    bytes_on_disk,
    check_disk,
    disk_of,
    disk_settings,
    file_of,
    files_of,
    gate_files,
    order_below,
    read,
    store_below,
)
from event_fakes import BOUND_SECONDS, in_child, in_thread

from lmcache.v1.memory_object import BytesBufferMemoryObj
from lmcache.v1.storage_backend.disk import serials
from lmcache.v1.storage_backend.disk.chunk_directory import ChunkDirectory
from lmcache.v1.storage_backend.storage_manager import StorageManager


@pytest.mark.parametrize("fault", [errno.EMFILE, errno.ENOMEM])
def test_a_restart_short_of_descriptors_loses_no_file(make_disk, monkeypatch, fault):
    sm = make_disk(8)
    store_below(sm, keys(5))
    sm.close()
    gates = gate_files(monkeypatch, head_fault=fault)

    sm = make_disk(8)
    sm.drain()
    assert order_below(sm) == []
    assert disk_of(sm).current_cache_size == bytes_on_disk(sm) == 5 * FILE_BYTES
    gates[0].head_fault = 0
    store_below(sm, keys(1, first=9))
    sm.drain()

    assert sorted(order_below(sm)) == [1, 2, 3, 4, 5, 9]
    check_disk(sm)


def test_files_that_were_put_off_make_room_for_new_ones(make_disk, monkeypatch):
    sm = make_disk(3)
    store_below(sm, keys(3))
    sm.close()
    gate_files(monkeypatch, head_fault=errno.EMFILE)
    sm = make_disk(3)
    sm.drain()

    store_below(sm, keys(3, first=7))

    assert order_below(sm) == [7, 8, 9]
    check_disk(sm)


@pytest.mark.parametrize("kind", ["directory", "pipe", "link"])
@pytest.mark.parametrize("suffix", ["", ".tmp"])
def test_what_is_no_file_under_our_names_is_left_alone(make_disk, tmp_path, kind, suffix):
    sm = make_disk(8)
    store_below(sm, keys(5))
    path = file_of(sm, keys(1)[0])
    sm.close()
    odd = path.with_name("0" * 32 + "-" + "0" * 16 + ".pt" + suffix)
    if kind == "directory":
        odd.mkdir()
    elif kind == "pipe":
        os.mkfifo(odd)
    else:
        odd.symlink_to(tmp_path / "elsewhere")

    sm = make_disk(8)
    sm.drain()

    assert order_below(sm) == [1, 2, 3, 4, 5]
    assert os.path.lexists(odd)


def test_a_pipe_in_the_place_of_a_file_is_a_miss_and_hangs_nobody(make_disk):
    sm = make_disk(8)
    store_below(sm, keys(1))
    path = file_of(sm, keys(1)[0])
    path.unlink()
    os.mkfifo(path)

    in_thread(lambda: not read(sm, keys(1)[0]) or pytest.fail("a pipe was read"))

    sm.drain()
    assert order_below(sm) == []
    assert not path.exists()


@pytest.mark.parametrize("policy", ["LRU", "FIFO"])
def test_a_removal_before_its_file_was_found_holds_over_the_next_restart(
    make_disk, monkeypatch, policy
):
    sm = make_disk(8, policy=policy)
    store_below(sm, keys(3))
    sm.close()
    gate_files(monkeypatch, head_fault=errno.EMFILE)
    sm = make_disk(8, policy=policy)
    sm.drain()  # none is adopted: each waits for a later look
    sm.remove(keys(1)[0])
    put(sm, keys(1, first=2)[0], nbytes=CHUNK_BYTES // 2, location=DISK)
    sm.drain()
    sm.close()
    monkeypatch.undo()

    sm = make_disk(8, policy=policy)
    sm.drain()

    assert sorted(order_below(sm)) == [2, 3]
    assert disk_of(sm).dict[keys(1, first=2)[0]].size == CHUNK_BYTES // 2
    check_disk(sm)


def test_of_two_files_of_a_key_the_later_one_counts_in_every_order(make_disk):
    for policy in ("LRU", "LFU", "FIFO", "MRU"):
        sm = make_disk(8, policy=policy)
        store_below(sm, keys(1))
        path = file_of(sm, keys(1)[0])
        older = path.read_bytes()
        put(sm, keys(1)[0], nbytes=CHUNK_BYTES // 2, location=DISK)
        sm.drain()
        later = file_of(sm, keys(1)[0])
        sm.close()
        path.write_bytes(older)

        sm = make_disk(8, policy=policy)
        sm.drain()

        assert list(files_of(sm)) == [later.name]
        assert disk_of(sm).dict[keys(1)[0]].size == CHUNK_BYTES // 2
        sm.clear([DISK])
        sm.close()


def test_a_clock_that_was_set_back_does_not_make_new_files_the_older_ones(make_disk, monkeypatch):
    sm = make_disk(8)
    store_below(sm, keys(2))
    sm.close()
    monkeypatch.setattr(serials.time, "time_ns", lambda: 1)
    sm = make_disk(8)
    sm.drain()
    store_below(sm, keys(2, first=5))
    sm.close()

    sm = make_disk(3)
    sm.drain()

    assert order_below(sm) == [2, 5, 6]


def test_an_owner_s_directory_stays_its_own_whatever_is_removed_from_it(make_disk, tmp_path):
    sm = make_disk(8)
    store_below(sm, keys(1))
    for entry in os.scandir(disk_of(sm).path):
        if not entry.name.endswith(".pt"):
            os.unlink(entry.path)

    other = StorageManager(make_config(8, **disk_settings(tmp_path, 8)), make_metadata())

    assert disk_of(other).path != disk_of(sm).path
    other.close()


@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt, ZeroDivisionError])
def test_a_callback_that_raises_whatever_it_likes_ends_no_writer(make_disk, raised):
    def callback(key):
        raise raised

    sm = make_disk(8)
    obj = allocate(sm)
    disk_of(sm).batched_submit_put_task(keys(1), [obj], on_complete_callback=callback)
    obj.ref_count_down()
    sm.drain()

    store_below(sm, keys(1, first=2))

    assert order_below(sm) == [1, 2]


def test_a_callback_may_use_the_cache_but_not_wait_for_itself(make_disk):
    sm = make_disk(8)
    done = threading.Event()
    errors = []

    def callback(key):
        put(sm, keys(1, first=7)[0], location=DISK)
        sm.touch(keys(1))
        try:
            disk_of(sm).drain()
        except RuntimeError as error:
            errors.append(str(error))
        done.set()

    obj = allocate(sm)
    disk_of(sm).batched_submit_put_task(keys(1), [obj], on_complete_callback=callback)
    obj.ref_count_down()
    assert done.wait(BOUND_SECONDS)
    sm.drain()

    assert len(errors) == 1
    assert order_below(sm) == [7, 1]


def test_an_object_that_was_released_is_refused(make_disk):
    sm = make_disk(8)
    obj = allocate(sm)
    obj.ref_count_down()

    with pytest.raises(ValueError, match="released"):
        disk_of(sm).batched_submit_put_task(keys(1), [obj])


def test_an_object_without_bytes_costs_its_neighbours_nothing(make_disk):
    sm = make_disk(8)
    objs = [allocate(sm), BytesBufferMemoryObj(b""), allocate(sm)]

    disk_of(sm).batched_submit_put_task(keys(3), objs)
    objs[0].ref_count_down()
    objs[2].ref_count_down()
    sm.drain()

    assert sorted(order_below(sm)) == [1, 3]


def test_a_child_forked_in_the_middle_of_puts_hangs_nowhere(make_disk):
    sm = make_disk(8)
    stop = threading.Event()

    def put_on():
        while not stop.is_set():
            put(sm, keys(1)[0], location=DISK)
            sm.remove(keys(1)[0])

    def check():
        sm.gauges()
        sm.touch(keys(1))
        disk_of(sm).get_blocking(keys(1)[0])
        sm.drain()
        put(sm, keys(1, first=5)[0], location=DISK)
        assert keys(1, first=5)[0] not in disk_of(sm).dict

    thread = threading.Thread(target=put_on)
    thread.start()
    try:
        for _ in range(10):
            in_child(check)
    finally:
        stop.set()
        thread.join()


def test_a_tier_made_anew_gets_its_directory_back_while_a_child_of_a_fork_lives(make_disk):
    sm = make_disk(8)
    store_below(sm, keys(2))
    path = disk_of(sm).path
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    os.close(read_end)
    try:
        sm.recreate_backend(DISK)
        sm.drain()
        assert disk_of(sm).path == path
        assert order_below(sm) == [1, 2]
    finally:
        os.close(write_end)
        os.waitpid(child, 0)


def test_a_writer_that_fails_lets_nobody_wait_for_it(make_disk, monkeypatch):
    monkeypatch.setattr(ChunkDirectory, "found_files", lambda self: 1 / 0)

    sm = make_disk(8)

    in_thread(sm.drain)
    put(sm, keys(1)[0])
    until(lambda: disk_of(sm).gauges().num_queued == 0)
    assert sm.contains(keys(1)[0]) == "LocalCPUBackend"
