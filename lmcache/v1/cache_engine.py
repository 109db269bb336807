"""The engine and its builder, under the module path that serving engines import."""

from lmcache.v1.engine.builder import LMCacheEngineBuilder
from lmcache.v1.engine.engine import LMCacheEngine

__all__ = ["LMCacheEngine", "LMCacheEngineBuilder"]
