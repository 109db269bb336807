"""Tiers and what walks them."""

from lmcache.v1.storage_backend.factory import CreateStorageBackends
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

__all__ = ["CreateStorageBackends", "LocalCPUBackend"]
