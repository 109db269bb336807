"""`LMCacheEngineBuilder`: makes engines, one for each instance id of a process."""

import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from lmcache.logging import init_logger
from lmcache.observability import LMCStatsMonitor
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.engine.engine import LMCacheEngine
from lmcache.v1.engine.parts import ChunkCopier
from lmcache.v1.engine.stats_logger import LMCacheStatsLogger
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.token_database import ChunkedTokenDatabase

logger = init_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Instance:
    engine: LMCacheEngine
    config: LMCacheEngineConfig
    metadata: LMCacheMetadata
    stats_logger: LMCacheStatsLogger


class LMCacheEngineBuilder:
    """The engines of this process, by instance id.

    `_lock` guards the table, and is held over the making and closing of engines.
    """

    _lock: ClassVar[threading.RLock] = threading.RLock()
    _instances: ClassVar[dict[str, _Instance]] = {}

    @classmethod
    def get_or_create(
        cls,
        instance_id: str,
        config: LMCacheEngineConfig,
        metadata: LMCacheMetadata,
        gpu_connector: ChunkCopier | None,
        broadcast_fn: Callable[[torch.Tensor, int], object],
        broadcast_object_fn: Callable[[Any, int], object],
    ) -> LMCacheEngine:
        """Return the engine of an id, made if there is none; call its `post_init` before use.

        Args: See `LMCacheEngine`.

        Raises:
            ValueError: There is one of another config or metadata.
            ConfigError: A setting that cannot be used.
        """
        with cls._lock:
            known = cls._instances.get(instance_id)
            if known is not None:
                if known.config != config or known.metadata != metadata:
                    raise ValueError(
                        f"the engine {instance_id!r} exists already with another configuration or "
                        "metadata; destroy it first, or use another id"
                    )
                return known.engine
            config.validate()
            if not config.py_enable_gc:
                logger.warning("py_enable_gc=False: Python's garbage collection is off from now on")
                gc.disable()
            made = _make_instance(
                config, metadata, gpu_connector, broadcast_fn, broadcast_object_fn
            )
            cls._instances[instance_id] = made
            return made.engine

    @classmethod
    def get(cls, instance_id: str) -> LMCacheEngine | None:
        """Return the engine of an id, or None."""
        known = cls._instances.get(instance_id)
        return None if known is None else known.engine

    @classmethod
    def destroy(cls, instance_id: str) -> None:
        """Close the engine of an id and forget it; an unknown one is a no-op."""
        with cls._lock:
            known = cls._instances.pop(instance_id, None)
        if known is not None:
            known.stats_logger.close()
            LMCStatsMonitor.DestroyInstance(known.metadata)
            known.engine.close()


def _make_instance(
    config: LMCacheEngineConfig,
    metadata: LMCacheMetadata,
    gpu_connector: ChunkCopier | None,
    broadcast_fn: Callable[[torch.Tensor, int], object],
    broadcast_object_fn: Callable[[Any, int], object],
) -> _Instance:
    monitor = LMCStatsMonitor.GetOrCreate(metadata)
    engine = LMCacheEngine(
        config,
        metadata,
        ChunkedTokenDatabase(config, metadata),
        gpu_connector,
        broadcast_fn,
        broadcast_object_fn,
        monitor,
    )
    try:
        stats_logger = LMCacheStatsLogger(
            metadata, monitor, engine.gauges, config=config, read_is_healthy=engine.is_healthy
        )
    except BaseException:
        LMCStatsMonitor.DestroyInstance(metadata)
        raise
    stats_logger.start()
    return _Instance(engine, config, metadata, stats_logger)
