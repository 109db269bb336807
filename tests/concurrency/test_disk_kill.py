"""A process killed in the middle of its writes: what was whole is found again, and nothing else."""

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from builders import keys, make_config, make_metadata
from disk_builders import (
    FILE_BYTES,
    bytes_on_disk,
    check_disk,
    disk_of,
    disk_settings,
    files_of,
)
from disk_worker import FIRST_REMOVED, NUM_KEYS, size_of

from lmcache.v1.storage_backend.storage_manager import StorageManager

TESTS = Path(__file__).parent.parent
SEEDS = [*range(10), *(pytest.param(n, marks=pytest.mark.slow) for n in range(10, 100))]
FEW_FILES, MANY_FILES = 30, 2000  # of 16 KiB: a disk that evicts, and one that never does


def start_worker(directory, num_files, seed, model_name="m"):
    """A busy worker, which owns its directory by now."""
    arguments = [str(argument) for argument in (directory, num_files, seed, model_name)]
    worker = subprocess.Popen(
        [sys.executable, "-m", "disk_worker", *arguments],
        env={
            **os.environ,
            "PYTHONPATH": f"{TESTS.parent}:{TESTS}:{TESTS / 'concurrency'}",
            "LMCACHE_LOG_LEVEL": "ERROR",
        },
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout.readline() == "ready\n"
    return worker


def kill_after(worker, num_lines):
    """Kill a worker when it has told so many keys; returns all the keys that it told."""
    try:
        lines = [worker.stdout.readline() for _ in range(num_lines)]
        threading.Event().wait(random.random() * 0.02)  # a line comes when a round is done
    finally:
        worker.kill()
    lines += worker.stdout.readlines()
    worker.wait(60)
    worker.stdout.close()
    assert worker.returncode == -signal.SIGKILL
    return {int(line) for line in lines}


def reopen(directory, num_files, model_name="m"):
    config = make_config(256, **disk_settings(directory, num_files))
    sm = StorageManager(config, make_metadata(model_name=model_name))
    sm.drain()
    return sm


def check_contents(sm):
    """Every resident key has its own bytes, every one of them."""
    for key in list(disk_of(sm).dict):
        obj = disk_of(sm).get_blocking(key)
        assert obj is not None, f"{key} is resident and cannot be read"
        assert obj.get_size() == size_of(key)
        assert bool((obj.raw_tensor == key.chunk_hash % 251).all())
        obj.ref_count_down()


def kill_and_reopen(directory, num_files, seed, num_lines):
    worker = start_worker(directory, num_files, seed)
    told = kill_after(worker, num_lines)
    files = {path.name for path in Path(directory).rglob("*.pt")}
    left = [path.stat().st_size for path in Path(directory).rglob("*.pt*")]
    assert sum(left) <= num_files * FILE_BYTES
    sm = reopen(directory, num_files)
    assert bytes_on_disk(sm) <= disk_of(sm).max_cache_size
    check_disk(sm)
    # Every file of a name was renamed to it whole; two of one key leave the later one.
    assert {name.partition("-")[0] for name in files} == {
        name.partition("-")[0] for name in files_of(sm)
    }
    assert disk_of(sm).gauges().bad_files == 0
    check_contents(sm)
    return sm, told


@pytest.mark.parametrize("seed", SEEDS)
def test_after_a_kill_a_disk_that_evicts_has_no_wrong_bytes_and_keeps_its_budget(tmp_path, seed):
    sm, _ = kill_and_reopen(tmp_path, FEW_FILES, seed, random.Random(seed).randint(1, 400))

    assert disk_of(sm).max_cache_size == FEW_FILES * FILE_BYTES
    sm.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_after_a_kill_everything_that_was_whole_is_found_again(tmp_path, seed):
    sm, told = kill_and_reopen(tmp_path, MANY_FILES, seed, random.Random(seed).randint(1, 400))

    found = {key.chunk_hash for key in disk_of(sm).dict}
    assert {number for number in told if number < FIRST_REMOVED} <= found
    assert found <= {key.chunk_hash for key in keys(NUM_KEYS)}
    sm.close()


def test_a_directory_survives_one_kill_after_another(tmp_path):
    for seed in range(3):
        sm, _ = kill_and_reopen(tmp_path, FEW_FILES, f"again {seed}", 50 + 70 * seed)
        sm.close()


def test_processes_of_two_models_share_a_directory_and_each_finds_its_own(tmp_path):
    models = ["m", "m", "other"]
    workers = [start_worker(tmp_path, FEW_FILES, seed, model) for seed, model in enumerate(models)]
    for worker in workers:
        kill_after(worker, 100)
    owned = {path: set() for path in tmp_path.glob("lmcache-v1/*/*")}
    for path in tmp_path.rglob("*.pt"):
        owned[path.parent].add(path.name.partition("-")[0])
    assert len(owned) == 3
    assert all(owned.values())

    managers = [reopen(tmp_path, FEW_FILES, model) for model in models]

    assert {Path(disk_of(sm).path) for sm in managers} == set(owned)
    for sm in managers:
        found = {name.partition("-")[0] for name in files_of(sm)}
        assert found == owned[Path(disk_of(sm).path)]
        check_disk(sm)
        check_contents(sm)
        sm.close()
