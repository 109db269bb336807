"""What every side script shares. It runs against the `lmcache` that its interpreter has."""

import argparse
import json
import os
import random
import sys
from typing import Any

import torch

from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.event_manager import EventManager
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.pin_monitor import PinMonitor
from lmcache.v1.storage_backend.storage_manager import StorageManager

ENTRY_BYTES = 4096
SHAPE = torch.Size([ENTRY_BYTES])


def is_fork() -> bool:
    """Whether the installed `lmcache` is this project's."""
    return "touch" in vars(StorageManager)


def make_manager(pool_bytes: int, policy: str = "LRU", **settings: Any) -> StorageManager:
    """Return a storage manager over a CPU pool of `pool_bytes`; `settings` are the config's."""
    config = LMCacheEngineConfig.from_defaults(
        max_local_cpu_size=pool_bytes / 2**30, chunk_size=16, cache_policy=policy, **settings
    )
    metadata = LMCacheMetadata("model", 1, 1, 0, 0, torch.bfloat16, (1, 2, 16, 1, 64))
    PinMonitor.GetOrCreate(config)
    return StorageManager(config, metadata, EventManager())


def make_keys(count: int, seed: int = 42) -> list[CacheEngineKey]:
    """Return `count` distinct keys, equal on both sides."""
    numbers = random.Random(seed)
    return [
        CacheEngineKey("model", 1, 0, numbers.getrandbits(62), torch.bfloat16) for _ in range(count)
    ]


def put(manager: StorageManager, key: CacheEngineKey, shape: torch.Size = SHAPE) -> None:
    """Store one object, evicting when the pool is full."""
    memory_obj = manager.allocate(shape, torch.uint8, busy_loop=False)
    assert memory_obj is not None
    manager.batched_put([key], [memory_obj])


def fill(manager: StorageManager, keys: list[CacheEngineKey]) -> None:
    """Store all keys."""
    for key in keys:
        put(manager, key)


def parse(description: str, **defaults: int) -> argparse.Namespace:
    """Parse integer options with these defaults."""
    parser = argparse.ArgumentParser(description=description)
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    return parser.parse_args()


def report(figures: dict[str, Any]) -> None:
    """Print the figures as one JSON line and end the process without waiting for threads."""
    print(json.dumps(figures))
    sys.stdout.flush()
    os._exit(0)
