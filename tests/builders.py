"""Builders with defaults: settings, keys, and the few steps that most tests begin with.

The common set-up: 16 tokens a chunk, 16 KiB a chunk, chunk hashes counted from 1, and a chunk's
bytes all equal to its hash.
"""

import threading

import torch

from lmcache.v1.cache_key import KeyFactory
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_format import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.placement import Placement

CPU = "LocalCPUBackend"
CHUNK_TOKENS = 16
CHUNK_BYTES = 16 * 1024
KV_SHAPE = (2, 2, CHUNK_TOKENS, 2, 64)
CHUNK_SHAPE = torch.Size([2, 2, CHUNK_TOKENS, 128])


def make_metadata(**changes):
    """Metadata of one worker whose chunks take CHUNK_BYTES."""
    fields = {
        "model_name": "m",
        "world_size": 1,
        "local_world_size": 1,
        "worker_id": 0,
        "local_worker_id": 0,
        "kv_dtype": torch.bfloat16,
        "kv_shape": KV_SHAPE,
        "chunk_size": CHUNK_TOKENS,
    }
    return LMCacheMetadata(**{**fields, **changes})


def make_config(num_chunks=8, **settings):
    """A config whose pool holds `num_chunks` chunks, and whose allocations never wait."""
    fields = {
        "chunk_size": CHUNK_TOKENS,
        "max_local_cpu_size": num_chunks * CHUNK_BYTES / 2**30,
        "blocking_timeout_secs": 0,
    }
    return LMCacheEngineConfig.from_defaults(**{**fields, **settings})


def keys(count, first=1, **request_configs):
    """Keys with the chunk hashes `first`, `first` + 1, ..."""
    factory = KeyFactory("m", 1, 0, torch.bfloat16, request_configs)
    return factory.make_many(range(first, first + count))


def allocate(sm, nbytes=CHUNK_BYTES, eviction=True):
    """An object of the pool, or None; never waits."""
    if nbytes == CHUNK_BYTES:
        shape, dtype, fmt = CHUNK_SHAPE, torch.bfloat16, MemoryFormat.KV_2LTD
    else:
        shape, dtype, fmt = torch.Size([nbytes]), torch.uint8, MemoryFormat.BINARY
    return sm.allocate(shape, dtype, fmt, eviction=eviction, busy_loop=False)


def put(sm, key, nbytes=CHUNK_BYTES, placement=Placement.YOUNG, location=None):
    """Store one object filled with the key's hash; False when there was no room."""
    obj = allocate(sm, nbytes, eviction=placement is not Placement.SPARE)
    if obj is None:
        return False
    obj.raw_tensor.fill_(key.chunk_hash % 251)
    sm.batched_put([key], [obj], location=location, placement=placement)
    return True


def put_all(sm, some_keys, **options):
    """Store one chunk per key, each on its own, in the order given."""
    for key in some_keys:
        assert put(sm, key, **options)


def put_batch(sm, some_keys, placement=Placement.YOUNG):
    """Store one chunk per key in one call."""
    objs = [allocate(sm, eviction=placement is not Placement.SPARE) for _ in some_keys]
    sm.batched_put(some_keys, objs, placement=placement)


def hashes(some_keys):
    """The chunk hashes of keys."""
    return [key.chunk_hash for key in some_keys]


def order(sm):
    """The resident chunk hashes of the CPU tier, coldest first."""
    return hashes(sm.local_cpu_backend.get_keys())


def evict(sm, count=1, nbytes=CHUNK_BYTES):
    """Make room until `count` entries left the CPU tier; their hashes in the order they left."""
    taken, gone, before = [], [], order(sm)
    while len(gone) < count:
        obj = allocate(sm, nbytes)
        assert obj is not None, "nothing can be evicted"
        taken.append(obj)
        left = set(order(sm))
        gone += [chunk_hash for chunk_hash in before if chunk_hash not in left]
        before = [chunk_hash for chunk_hash in before if chunk_hash in left]
    for obj in taken:
        obj.ref_count_down()
    return gone


def hold(sm, key):
    """Read a key as a reader that keeps its reference; CPU tier only, and no use of the key."""
    return sm.local_cpu_backend.peek(key)


def is_filled(obj, chunk_hash):
    """Whether every byte of the object is the one that `put` wrote."""
    return bool((obj.raw_tensor == chunk_hash % 251).all())


def gauges(sm):
    """The pool's gauges."""
    return sm.local_cpu_backend.hot.index.gauges()


def until(predicate, poll_seconds=0.05):
    """Poll another thread's or process's progress, with a bound."""
    waiter = threading.Event()
    for _ in range(int(30 / poll_seconds)):
        if predicate():
            return
        waiter.wait(poll_seconds)
    raise AssertionError("it did not happen in half a minute")
