"""Refresh batches of resident keys: `touch` here, `cpu_lock` and the policy upstream."""

import random
import time

import torch
from common import ENTRY_BYTES, fill, is_fork, make_keys, make_manager, parse, report

from lmcache.utils import CacheEngineKey

options = parse(__doc__, resident=100_000, batch=256, batches=400)
manager = make_manager(options.resident * ENTRY_BYTES)
keys = make_keys(options.resident)
fill(manager, keys)
numbers = random.Random(1)
batches = [numbers.sample(keys, options.batch) for _ in range(options.batches)]
backend = manager.local_cpu_backend


def refresh(batch: list[CacheEngineKey]) -> None:
    """Refresh a batch, tail first, as an engine without `touch` has to."""
    with backend.cpu_lock:
        for key in reversed(batch):
            if key in backend.hot_cache:
                backend.cache_policy.update_on_hit(key, backend.hot_cache)


call = manager.touch if is_fork() else refresh
for batch in batches[:20]:
    call(batch)
start = time.perf_counter()
for batch in batches:
    call(batch)
touch_us = (time.perf_counter() - start) / (options.batches * options.batch) * 1e6

hashes = [[key.chunk_hash for key in batch] for batch in batches]
start = time.perf_counter()
if is_fork():
    from lmcache.v1.cache_key import KeyFactory

    factory = KeyFactory("model", 1, 0, torch.bfloat16)
    for batch_hashes in hashes:
        factory.make_many(batch_hashes)
else:
    for batch_hashes in hashes:
        for chunk_hash in batch_hashes:
            CacheEngineKey("model", 1, 0, chunk_hash, torch.bfloat16)
keys_us = (time.perf_counter() - start) / (options.batches * options.batch) * 1e6
report({"touch_us_per_key": touch_us, "build_us_per_key": keys_us})
