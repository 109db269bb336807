"""A process that keeps a disk tier busy until it is killed.

Arguments: directory, files that the budget holds, seed, model. It tells on standard output which
keys are on disk, a number a line. Keys from FIRST_REMOVED on are also removed, so of them that says
nothing.
"""

import os
import random
import sys
import threading

from builders import allocate, keys, make_config, make_metadata
from disk_builders import DISK, disk_of, disk_settings

from lmcache.v1.storage_backend.storage_manager import StorageManager

NUM_KEYS, FIRST_REMOVED = 60, 50
SIZES = [8 * 1024, 16 * 1024, 64 * 1024, 300_000]


def size_of(key):
    """Bytes of a key's chunk: always the same, so that every copy of it is alike."""
    return SIZES[key.chunk_hash % len(SIZES)]


def fill(obj, key):
    """Give a chunk the bytes of its key."""
    obj.raw_tensor.fill_(key.chunk_hash % 251)


def tell(key):
    try:
        os.write(1, f"{key.chunk_hash}\n".encode())  # one line is one write
    except OSError:  # nobody listens any more
        os._exit(1)


def put(sm, some_keys):
    objs = [allocate(sm, size_of(key)) for key in some_keys]
    pairs = [(key, obj) for key, obj in zip(some_keys, objs, strict=True) if obj is not None]
    for key, obj in pairs:
        fill(obj, key)
    disk_of(sm).batched_submit_put_task(
        [key for key, _ in pairs],
        [obj for _, obj in pairs],
        on_complete_callback=tell,
    )
    for _, obj in pairs:
        obj.ref_count_down()


def work(sm, numbers):
    all_keys = keys(NUM_KEYS)
    while True:
        some = numbers.sample(all_keys, numbers.randint(1, 5))
        choice = numbers.random()
        if choice < 0.6:
            put(sm, some)
        elif choice < 0.8:
            for key, obj in zip(some, sm.batched_get(some, DISK), strict=True):
                if obj is not None:
                    assert bool((obj.raw_tensor == key.chunk_hash % 251).all())
                    obj.ref_count_down()
        elif choice < 0.95:
            sm.touch(some)
        else:
            sm.remove(numbers.choice(all_keys[FIRST_REMOVED - 1 :]))


def main(directory, num_files, seed, model_name):
    settings = disk_settings(directory, int(num_files))
    sm = StorageManager(make_config(256, **settings), make_metadata(model_name=model_name))
    print("ready", flush=True)
    for number in range(2):
        numbers = random.Random(f"{seed} {number}")
        threading.Thread(target=work, args=(sm, numbers), daemon=True).start()
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
