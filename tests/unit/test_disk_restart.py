"""Warm restart: what a disk tier finds again, and whose files it leaves alone."""

import os
import threading
from pathlib import Path

import pytest
import torch
from builders import CHUNK_BYTES, hashes, keys, put, put_all
from disk_builders import (
    DISK,
    FILE_BYTES,
    bytes_on_disk,
    check_disk,
    disk_of,
    file_of,
    files_of,
    flip_a_bit,
    gate_files,
    order_below,
    read,
    store_below,
)

from lmcache.v1.cache_key import CacheEngineKey
from lmcache.v1.storage_backend.cache_events import EventKind
from lmcache.v1.storage_backend.disk.chunk_directory import ChunkDirectory, file_name
from lmcache.v1.storage_backend.touch import TouchVerdict


@pytest.fixture
def restart(make_disk):
    """`restart(sm, **settings)`: close it, and make another on the same directory."""

    def again(sm, **settings):
        sm.close()
        return make_disk(**settings)

    return again


def test_what_was_stored_is_found_again_in_its_order(make_disk, restart):
    sm = make_disk()
    store_below(sm, keys(5))

    sm = restart(sm)
    sm.drain()

    assert order_below(sm) == [1, 2, 3, 4, 5]
    assert all(read(sm, key) for key in keys(5))
    assert disk_of(sm).gauges().adopted_entries == 5
    check_disk(sm)


def test_the_head_of_a_batch_is_the_youngest_after_a_restart_too(make_disk, restart):
    sm = make_disk()
    put_all(sm, keys(1, first=9), location=DISK)
    objs = [sm.allocate(torch.Size([CHUNK_BYTES]), torch.uint8) for _ in range(3)]
    sm.batched_put(keys(3), objs, location=DISK)

    sm = restart(sm)
    sm.drain()

    assert order_below(sm) == [9, 3, 2, 1]


def test_what_is_found_is_told_to_a_subscriber_and_to_touch(make_disk, restart):
    sm = make_disk()
    store_below(sm, keys(3))

    sm = restart(sm)
    sm.drain()
    snapshot = sm.snapshot()

    assert {key: set(tiers) for key, tiers in snapshot.residents.items()} == {
        key: {DISK} for key in keys(3)
    }
    assert sm.touch(keys(3)).verdicts == [TouchVerdict.PRESENT] * 3


def test_a_file_that_is_adopted_later_gives_a_stored_event(make_disk, restart, monkeypatch):
    sm = make_disk()
    store_below(sm, keys(3))
    gates = gate_files(monkeypatch, is_gated=True)
    sm = restart(sm)
    put(sm, keys(1, first=9)[0], location=DISK)
    events = sm.subscribe(kinds={EventKind.STORED})
    before = set(sm.snapshot().residents)
    gates[0].open_gate()
    sm.drain()

    told = {event.key for event in events.take()}

    assert before | told >= {*keys(3), *keys(1, first=9)}


def test_files_beyond_a_smaller_budget_are_removed_the_oldest_first(make_disk, restart):
    sm = make_disk(8)
    store_below(sm, keys(8))

    sm = restart(sm, num_files=3)
    check_disk(sm)

    assert order_below(sm) == [6, 7, 8]
    assert len(files_of(sm)) == 3


def test_files_of_an_earlier_run_make_room_for_new_ones_oldest_first(make_disk, restart):
    sm = make_disk(4)
    store_below(sm, keys(4))

    sm = restart(sm, num_files=4)
    store_below(sm, keys(2, first=7))

    assert order_below(sm) == [3, 4, 7, 8]
    check_disk(sm)


@pytest.mark.parametrize("policy", ["LFU", "FIFO", "MRU"])
def test_every_policy_finds_its_files_again(make_disk, restart, policy):
    sm = make_disk(4, policy=policy)
    store_below(sm, keys(4))

    sm = restart(sm, num_files=3, policy=policy)
    check_disk(sm)

    assert sorted(order_below(sm)) == [2, 3, 4]


@pytest.fixture
def listing(monkeypatch):
    """While this event is not set, tiers made anew do not know yet which files there are."""
    gate, found_files = threading.Event(), ChunkDirectory.found_files

    def wait_and_list(self):
        assert gate.wait(60)
        yield from found_files(self)

    monkeypatch.setattr(ChunkDirectory, "found_files", wait_and_list)
    gate.set()
    yield gate
    gate.set()


def test_a_key_put_before_its_old_file_is_found_keeps_the_new_copy(make_disk, restart, listing):
    sm = make_disk()
    store_below(sm, keys(2))
    listing.clear()
    sm = restart(sm)

    put(sm, keys(1)[0], nbytes=2 * CHUNK_BYTES, location=DISK)
    listing.set()
    check_disk(sm)

    assert disk_of(sm).dict[keys(1)[0]].size == 2 * CHUNK_BYTES
    assert len(files_of(sm)) == 2


@pytest.mark.parametrize(("how", "left"), [("remove", [2]), ("clear", [])])
def test_what_is_removed_before_its_file_is_found_does_not_come_back(
    make_disk, restart, listing, how, left
):
    sm = make_disk()
    store_below(sm, keys(2))
    listing.clear()
    sm = restart(sm)

    if how == "remove":
        sm.remove(keys(1)[0])
    else:
        sm.clear([DISK])
    listing.set()
    check_disk(sm)

    assert order_below(sm) == left
    assert len(files_of(sm)) == len(left)


def test_nothing_is_written_before_the_files_of_an_earlier_run_are_known(
    make_disk, restart, listing
):
    sm = make_disk(4)
    store_below(sm, keys(4))
    listing.clear()
    sm = restart(sm, num_files=4)

    put_all(sm, keys(4, first=11), location=DISK)
    assert len(files_of(sm)) == 4
    assert read(sm, keys(1, first=11)[0])
    listing.set()
    check_disk(sm)

    assert order_below(sm) == [12, 13, 14, 11]


def test_a_tier_that_is_closed_while_it_looks_for_files_leaves_them(make_disk, restart, listing):
    sm = make_disk()
    store_below(sm, keys(3))
    listing.clear()
    sm = restart(sm)
    closing = threading.Thread(target=sm.close)
    closing.start()
    listing.set()
    closing.join(60)

    sm = make_disk()
    sm.drain()

    assert order_below(sm) == [1, 2, 3]


def damage(path, how):
    """Make a file what it should not be."""
    content = path.read_bytes()
    if how == "truncated":
        path.write_bytes(content[:-1])
    elif how == "grown":
        path.write_bytes(content + b"x")
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "of another program":
        path.write_bytes(os.urandom(len(content)))
    elif how == "of another version":
        path.write_bytes(content[:8] + b"\x09" + content[9:])
    elif how == "of another key":
        path.write_bytes(content.replace(b"@1@bfloat16", b"@7@bfloat16"))
    else:
        flip_a_bit(path, {"altered": 9_000, "altered in the head": 100}[how])


HEADS = ["truncated", "grown", "empty", "of another program", "of another version",
         "of another key", "altered in the head"]  # fmt: skip


@pytest.mark.parametrize("how", HEADS)
def test_a_bad_file_is_removed_when_it_is_found(make_disk, restart, caplog, how):
    sm = make_disk()
    store_below(sm, keys(3))
    damage(file_of(sm, keys(1)[0]), how)

    sm = restart(sm)
    check_disk(sm)

    assert order_below(sm) == [2, 3]
    assert len(files_of(sm)) == 2
    assert disk_of(sm).gauges().bad_files == 1
    assert len([r for r in caplog.records if "adopting" in r.message]) == 1


def test_a_chunk_altered_on_disk_is_found_out_when_it_is_read(make_disk, restart):
    sm = make_disk()
    store_below(sm, keys(2))
    damage(file_of(sm, keys(1)[0]), "altered")

    sm = restart(sm)
    sm.drain()
    assert order_below(sm) == [1, 2]

    assert not read(sm, keys(1)[0])
    assert read(sm, keys(1, first=2)[0])
    check_disk(sm)
    assert order_below(sm) == [2]


def test_a_file_under_another_key_s_name_is_not_adopted(make_disk, restart):
    sm = make_disk()
    store_below(sm, keys(1))
    path = file_of(sm, keys(1)[0])
    path.rename(path.with_name(file_name(keys(1, first=2)[0].to_string(), 5)))

    sm = restart(sm)
    check_disk(sm)

    assert order_below(sm) == []


def test_two_files_of_one_key_leave_the_one_that_was_put_later(make_disk, restart):
    sm = make_disk()
    store_below(sm, keys(1))
    path = file_of(sm, keys(1)[0])
    path.with_name(file_name(keys(1)[0].to_string(), 5)).write_bytes(path.read_bytes())

    sm = restart(sm)
    check_disk(sm)

    assert list(files_of(sm)) == [path.name]


def test_half_written_files_of_a_killed_run_are_removed(make_disk, restart):
    sm = make_disk()
    store_below(sm, keys(1))
    path = file_of(sm, keys(1)[0])
    path.with_name(path.name + ".tmp").write_bytes(b"half")

    sm = restart(sm)
    check_disk(sm)

    assert [entry.name for entry in os.scandir(disk_of(sm).path) if "tmp" in entry.name] == []


def test_files_that_are_not_ours_are_left_alone(make_disk, restart, tmp_path, caplog):
    sm = make_disk()
    store_below(sm, keys(1))
    inside = Path(disk_of(sm).path) / "notes.txt"
    outside = [tmp_path / "model.pt", tmp_path / "lmcache-v1" / "other.pt"]
    for path in [inside, *outside]:
        path.write_text("mine")

    sm = restart(sm)
    sm.clear([DISK])
    sm.drain()

    assert all(path.read_text() == "mine" for path in [inside, *outside])
    assert "notes.txt" in caplog.text
    inside.unlink()


def test_keys_of_every_kind_are_found_again(make_disk, restart):
    sm = make_disk()
    odd = [
        CacheEngineKey("m", 1, 0, b"\x00\x01", torch.uint8),
        CacheEngineKey("m", 1, 0, -5, torch.float8_e5m2fnuz),
        CacheEngineKey("m", 1, 0, 2**200, torch.half, {"lmcache.tag.user": "x y/..%"}),
        CacheEngineKey("m" * 5000, 1, 0, 1, torch.half).get_first_layer(),
        CacheEngineKey("модель", 3, 2, 1, torch.half),
    ]
    for number, key in enumerate(odd):
        obj = sm.allocate(torch.Size([64]), torch.uint8)
        obj.raw_tensor.fill_(number)
        sm.batched_put([key], [obj], location=DISK)

    sm = restart(sm)
    sm.drain()

    for number, key in enumerate(odd):
        obj = sm.get(key)
        assert obj.raw_tensor.tolist() == [number] * 64
        obj.ref_count_down()


def test_usage_never_exceeds_the_budget_over_many_restarts(make_disk, restart):
    sm = make_disk(5)
    for first in range(1, 100, 10):
        put_all(sm, keys(10, first=first), location=DISK)
        sm = restart(sm, num_files=5)
        assert bytes_on_disk(sm) <= 5 * FILE_BYTES
    check_disk(sm)
    assert len(order_below(sm)) == 5
    assert hashes(disk_of(sm).dict)[-1] > 90
