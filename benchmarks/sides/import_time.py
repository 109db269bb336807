"""Seconds that importing the cache takes beyond importing torch."""

import importlib
import importlib.metadata
import json
import sys
import time

import torch  # noqa: F401

name = "lmcache.v1.cache_engine"
if "+touch" in importlib.metadata.version("lmcache"):
    # This fork has no engine yet: its largest module stands in, and the table says so.
    name = "lmcache.v1.storage_backend.storage_manager"
start = time.perf_counter()
importlib.import_module(name)
print(json.dumps({"import_s": time.perf_counter() - start, "module": name}))
sys.stdout.flush()
