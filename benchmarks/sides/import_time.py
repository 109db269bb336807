"""Seconds that importing the cache takes beyond importing torch."""

import importlib
import json
import sys
import time

import torch  # noqa: F401

start = time.perf_counter()
importlib.import_module("lmcache.v1.cache_engine")
print(json.dumps({"import_s": time.perf_counter() - start}))
sys.stdout.flush()
