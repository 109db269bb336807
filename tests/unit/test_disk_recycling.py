"""A full disk tier writes over the files of what left it, and keeps none that it does not need."""

import errno
import os
from contextlib import contextmanager

from builders import CHUNK_BYTES, allocate, keys, put, until
from disk_builders import (
    DISK,
    FILE_BYTES,
    HEAD_BYTES,
    bytes_on_disk,
    check_disk,
    disk_of,
    file_of,
    files_of,
    gate_files,
    read,
    store_below,
)

from lmcache.v1.memory_object import release_all
from lmcache.v1.native import Pool
from lmcache.v1.storage_backend.disk.disk_chunk import chunk_of
from lmcache.v1.storage_backend.disk.write_queue import WriteQueue


@contextmanager
def held_open(paths):
    """The inodes of files, which no new file can get meanwhile."""
    fds = [os.open(path, os.O_RDONLY) for path in paths]
    try:
        yield {os.fstat(fd).st_ino for fd in fds}
    finally:
        for fd in fds:
            os.close(fd)


def inodes(sm):
    return {os.stat(path).st_ino for path in files_of(sm).values()}


def test_a_put_into_a_full_tier_takes_the_file_of_the_chunk_that_left(make_disk):
    sm = make_disk(num_files=4)
    store_below(sm, keys(4))
    with held_open(files_of(sm).values()) as old:
        store_below(sm, keys(4, first=5))

        assert inodes(sm) == old
    assert all(read(sm, key) for key in keys(4, first=5))
    assert not any(read(sm, key) for key in keys(4))
    check_disk(sm)


def test_files_wait_for_the_puts_of_later_rounds(make_disk):
    sm = make_disk(num_files=200, num_chunks=500)
    store_below(sm, keys(200))
    with held_open(files_of(sm).values()) as old:
        objs = [allocate(sm) for _ in range(200)]
        for obj, key in zip(objs, keys(200, first=201), strict=True):
            obj.raw_tensor.fill_(key.chunk_hash % 251)
        sm.batched_put(keys(200, first=201), objs, location=DISK)  # more than one round writes
        sm.drain()

        assert inodes(sm) == old
    assert all(read(sm, key) for key in keys(200, first=201))
    check_disk(sm)


def test_files_of_another_size_are_removed_before_anything_is_written(make_disk, monkeypatch):
    gates = gate_files(monkeypatch)
    sm = make_disk(num_files=4)
    store_below(sm, keys(4))
    with held_open(files_of(sm).values()) as old:
        gates[0].is_gated = True
        put(sm, keys(1, first=5)[0], nbytes=2 * CHUNK_BYTES, location=DISK)
        until(lambda: gates[0].is_waiting, poll_seconds=0.001)
        assert bytes_on_disk(sm) == 2 * FILE_BYTES
        gates[0].open_gate()
        sm.drain()

        assert file_of(sm, keys(1, first=5)[0]).stat().st_ino not in old
    check_disk(sm)


def test_files_beyond_the_puts_that_wait_are_removed_at_once(make_disk, monkeypatch):
    gates = gate_files(monkeypatch)
    sm = make_disk(num_files=8)
    store_below(sm, keys(8))
    gates[0].is_gated = True
    sm.remove(keys(1)[0], [DISK])
    until(lambda: len(files_of(sm)) == 7, poll_seconds=0.001)
    put(sm, keys(1, first=9)[0], location=DISK)  # the writer waits at the gate
    until(lambda: gates[0].is_waiting, poll_seconds=0.001)
    put(sm, keys(1, first=10)[0], location=DISK)
    sm.batched_remove(keys(4, first=3), [DISK])  # one of their files is enough for it
    gates[0].open_gate()
    until(lambda: gates[0].is_waiting and len(gates[0].written) == 9, poll_seconds=0.001)

    assert bytes_on_disk(sm) == 4 * FILE_BYTES  # keys 7 to 9, and the file for key 10
    gates[0].open_gate()
    check_disk(sm)


def test_a_file_is_removed_when_the_put_that_it_was_kept_for_leaves(make_disk, monkeypatch):
    gates = gate_files(monkeypatch)
    sm = make_disk(num_files=2)
    store_below(sm, keys(2))
    gates[0].is_gated = True
    put(sm, keys(1, first=3)[0], location=DISK)
    until(lambda: gates[0].is_waiting, poll_seconds=0.001)
    put(sm, keys(1, first=4)[0], location=DISK)  # is to be written over the file of key 2
    sm.remove(keys(1, first=4)[0], [DISK])
    gates[0].open_gate(9)

    check_disk(sm)
    assert len(files_of(sm)) == 1


def test_a_write_that_fails_leaves_no_file_of_what_left(make_disk, monkeypatch):
    gates = gate_files(monkeypatch)
    sm = make_disk(num_files=4)
    store_below(sm, keys(4))
    gates[0].write_fault = errno.EIO  # before the old file is touched

    store_below(sm, keys(3, first=5))

    assert len(files_of(sm)) == 3  # one chunk left for the three puts, whose room became free again
    check_disk(sm)
    gates[0].write_fault = 0
    store_below(sm, keys(3, first=5))
    check_disk(sm)


def test_a_file_that_vanished_is_not_missed(make_disk):
    sm = make_disk(num_files=2)
    store_below(sm, keys(2))
    file_of(sm, keys(1)[0]).unlink()

    store_below(sm, keys(1, first=3))

    assert read(sm, keys(1, first=3)[0])
    assert disk_of(sm).gauges().failed_writes == 0
    check_disk(sm)


def test_a_file_that_grew_is_cut(make_disk):
    sm = make_disk(num_files=2)
    store_below(sm, keys(2))
    os.truncate(file_of(sm, keys(1)[0]), 3 * FILE_BYTES)

    store_below(sm, keys(1, first=3))

    assert file_of(sm, keys(1, first=3)[0]).stat().st_size == HEAD_BYTES + CHUNK_BYTES
    assert read(sm, keys(1, first=3)[0])
    check_disk(sm)


def test_files_of_chunks_that_left_while_written_are_waited_for(manager):
    queue = WriteQueue(64 * CHUNK_BYTES)
    chunks = [chunk_of(Pool(0), key, allocate(manager), 0) for key in keys(3)]
    for chunk in chunks:
        queue.add(chunk)
    queue.begin_round()
    for chunk in (chunks[2], chunks[0]):
        queue.let_go(chunk)
    mark = queue.mark()
    queue.throw_away("later", chunks[0].file_bytes)
    for chunk in chunks:
        release_all(queue.finish(chunk, True))
    queue.end_round()

    assert not queue.is_done(mark)
    trash, writes = queue.begin_round()
    assert [item.name for item in trash] == [chunks[0].name, chunks[2].name, "later"]
    assert not writes
    assert not queue.is_done(mark)
    queue.end_round()
    assert queue.is_done(mark)


def test_a_file_that_is_written_over_is_waited_for(manager):
    queue = WriteQueue(64 * CHUNK_BYTES)
    (chunk,) = [chunk_of(Pool(0), key, allocate(manager), 0) for key in keys(1)]
    queue.throw_away("old", chunk.file_bytes)
    mark = queue.mark()
    queue.add(chunk)

    trash, writes = queue.begin_round()
    assert not trash
    assert [write.recycled.name for write in writes] == ["old"]
    assert not queue.is_done(mark)
    release_all(queue.finish(chunk, True))
    queue.end_round()
    assert queue.is_done(mark)


def test_what_is_read_while_its_file_is_written_over_is_a_miss_and_no_fault(make_disk, monkeypatch):
    gates = gate_files(monkeypatch)
    sm = make_disk(num_files=1)
    store_below(sm, keys(1))

    def replace_first():
        sm.remove(keys(1)[0], [DISK])
        store_below(sm, keys(1, first=2))

    gates[0].before_read = replace_first
    assert sm.get(keys(1)[0]) is None
    assert disk_of(sm).gauges().failed_reads == 0
    assert disk_of(sm).gauges().bad_files == 0
    gates[0].before_read = None
    assert read(sm, keys(1, first=2)[0])
    check_disk(sm)
