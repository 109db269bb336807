"""CPU and disk under threads that do everything at once: right bytes, whole books, no leaks."""

import random
from pathlib import Path

import pytest
from builders import CPU, allocate, is_filled, keys, put
from disk_builders import DISK, check_disk, disk_of
from event_fakes import follow, run_together

ALL_KEYS = keys(60)


def put_some(sm, numbers):
    some = numbers.sample(ALL_KEYS, numbers.randint(1, 4))
    nbytes = numbers.choice([16 * 1024, 8 * 1024])
    objs = [allocate(sm, nbytes) for _ in some]
    pairs = [(key, obj) for key, obj in zip(some, objs, strict=True) if obj is not None]
    for key, obj in pairs:
        obj.raw_tensor.fill_(key.chunk_hash % 251)
    location = numbers.choice([None, None, DISK])
    sm.batched_put([k for k, _ in pairs], [obj for _, obj in pairs], location=location)


def get_some(sm, numbers):
    some = numbers.sample(ALL_KEYS, numbers.randint(1, 6))
    for key, obj in zip(some, sm.batched_get(some), strict=True):
        if obj is not None:
            assert is_filled(obj, key.chunk_hash), key
            obj.ref_count_down()


def look_up_some(sm, numbers):
    some = numbers.sample(ALL_KEYS, 4)
    owner = f"lookup {numbers.random()}"
    sm.batched_contains(some, pin=True, owner=owner)
    sm.touch_cache(owner)
    get_some(sm, numbers)
    sm.release_lookup(owner)


def touch_some(sm, numbers):
    move = numbers.choice([sm.touch, sm.touch, sm.demote])
    assert len(move(numbers.sample(ALL_KEYS, 5))) == 5


def remove_some(sm, numbers):
    choice = numbers.random()
    if choice < 0.1:
        sm.clear(numbers.choice([[CPU], [DISK], None]))
    else:
        sm.batched_remove(numbers.sample(ALL_KEYS, 2), numbers.choice([None, [CPU], [DISK]]))


def damage_some(sm, numbers):
    with disk_of(sm).disk_lock:
        paths = [entry.path for entry in disk_of(sm).dict.values()]
    if paths and numbers.random() < 0.3:
        Path(numbers.choice(paths)).unlink(missing_ok=True)


STEPS = [put_some, put_some, get_some, get_some, look_up_some, touch_some, remove_some, damage_some]


def busy(sm, step, seed, num_steps):
    numbers = random.Random(f"{step.__name__} {seed}")

    def work():
        for _ in range(num_steps):
            step(sm, numbers)

    return work


@pytest.mark.parametrize("policy", ["LRU", "LFU", "FIFO", "MRU"])
def test_everything_at_once(make_disk, policy):
    sm = make_disk(20, 24, policy=policy)
    subscription, mirror = follow(sm)

    run_together([busy(sm, step, number, 500) for number, step in enumerate(STEPS)])

    sm.drain()
    mirror.apply(subscription.take())
    assert mirror.residents == sm.snapshot().residents
    assert mirror.keys_in(DISK) == set(disk_of(sm).dict)
    assert mirror.keys_in(CPU) == set(sm.local_cpu_backend.hot_cache)
    for key in list(disk_of(sm).dict):  # whatever was damaged leaves when it is read
        sm.remove(key, [CPU])
        obj = sm.get(key)
        if obj is not None:
            obj.ref_count_down()
    check_disk(sm)
    sm.set_hot_cache(False)
    gauges = sm.gauges()
    assert (gauges.cpu.num_memory_objs, gauges.cpu.num_pins, gauges.disk.num_pins) == (0, 0, 0)


def test_the_disk_tier_is_made_anew_while_others_serve(make_disk):
    sm = make_disk(20, 24)

    (kept,) = keys(1, first=1000)
    put(sm, kept, location=CPU)
    sm.contains(kept, pin=True, owner="all the while")

    def make_anew():
        for _ in range(10):
            sm.recreate_backend(DISK)

    def ask():
        for _ in range(2000):
            assert sm.contains(kept) == CPU

    steps = [put_some, get_some, look_up_some, touch_some]
    run_together([make_anew, ask, *(busy(sm, step, n, 500) for n, step in enumerate(steps))])

    sm.release_lookup("all the while")
    check_disk(sm)
    assert set(sm.snapshot().residents) >= set(disk_of(sm).dict)
    sm.set_hot_cache(False)
    assert sm.gauges().cpu.num_memory_objs == 0
