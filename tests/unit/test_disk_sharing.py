"""One directory, several owners: models, ranks, engines, and a tier made anew."""

from pathlib import Path

import pytest
from builders import keys, make_config, make_metadata, put_all
from disk_builders import (
    DISK,
    check_disk,
    disk_of,
    disk_settings,
    order_below,
    read,
    store_below,
)

from lmcache.v1.storage_backend.cache_events import EventKind
from lmcache.v1.storage_backend.storage_manager import StorageManager


def make_other(tmp_path, num_files=16, **metadata):
    """A manager of another rank or model on the same directory."""
    return StorageManager(
        make_config(16, **disk_settings(tmp_path, num_files)), make_metadata(**metadata)
    )


def test_two_engines_of_one_model_share_a_directory_and_find_their_own(make_disk, tmp_path):
    first, second = make_disk(), make_other(tmp_path)
    store_below(first, keys(2))
    store_below(second, keys(2, first=5))
    assert Path(disk_of(first).path).parent == Path(disk_of(second).path).parent
    assert disk_of(first).path != disk_of(second).path
    first.close()
    second.close()

    first, second = make_disk(), make_other(tmp_path)
    first.drain()
    second.drain()

    assert (order_below(first), order_below(second)) == ([1, 2], [5, 6])
    first.clear([DISK])
    first.drain()
    assert all(read(second, key) for key in keys(2, first=5))
    second.close()


@pytest.mark.parametrize(
    "other",
    [{"model_name": "m/n"}, {"model_name": "m-n"}, {"world_size": 2}, {"worker_id": 1}],
    ids=str,
)
def test_models_and_ranks_on_one_directory_never_meet(make_disk, tmp_path, other):
    sm = make_disk(2)
    store_below(sm, keys(2))
    another = make_other(tmp_path, 2, **other)
    another.drain()

    assert order_below(another) == []
    store_below(another, keys(2, first=5))

    assert order_below(sm) == [1, 2]
    assert all(read(sm, key) for key in keys(2))
    assert Path(disk_of(sm).path).parent != Path(disk_of(another).path).parent
    another.close()


def test_ranks_of_one_host_take_the_directories_in_turn(tmp_path):
    roots = [tmp_path / name for name in "abc"]
    config = make_config(
        8, local_disk=f"file://{roots[0]}, {roots[1]},{roots[2]}", max_local_disk_size=0.001
    )
    used = []
    for rank in range(4):
        metadata = make_metadata(world_size=4, worker_id=rank, local_worker_id=rank)
        sm = StorageManager(config, metadata)
        used.append(Path(disk_of(sm).path).relative_to(tmp_path).parts[0])
        sm.close()

    assert used == ["a", "b", "c", "a"]


def test_a_tier_made_anew_finds_the_files_while_the_others_serve(make_disk):
    sm = make_disk()
    put_all(sm, keys(3))
    sm.drain()
    sm.batched_remove(keys(1), [sm.get_all_backend_names()[0]])
    events = sm.subscribe(tiers=[DISK])
    path = disk_of(sm).path

    assert sm.close_backend(DISK)
    assert sm.contains(keys(1)[0]) is None
    assert sm.contains(keys(1, first=2)[0]) is not None
    sm.recreate_backend(DISK)
    sm.drain()

    assert disk_of(sm).path == path
    assert sm.local_disk_backend is disk_of(sm)
    assert read(sm, keys(1)[0])
    kinds = [event.kind for event in events.take()]
    assert kinds == [EventKind.REMOVED] * 3 + [EventKind.STORED] * 3
    check_disk(sm)
