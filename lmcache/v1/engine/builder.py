"""`LMCacheEngineBuilder`: makes engines, one for each instance id of a process."""

import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from lmcache.logging import init_logger
from lmcache.observability import LMCStatsMonitor, engine_labels
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

        id's state   meaning                                        who may leave it
        free         `get` gives None                               get_or_create
        taken        its engine was made, and can be had            destroy
        closing      its engine is being closed; `get` gives None   destroy, when it is closed

    A thread that wants an id that another one is closing waits until it is free.

    `_lock` guards the tables. It is held while an engine is made, and not while one is closed:
    closing waits for threads that may want an engine. `_closed` tells of each id that is free.
    """

    _lock: ClassVar[threading.RLock] = threading.RLock()
    _closed: ClassVar[threading.Condition] = threading.Condition(_lock)
    _instances: ClassVar[dict[str, _Instance]] = {}
    _closing: ClassVar[dict[str, tuple[_Instance, int]]] = {}  # with the thread that closes it

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
            RuntimeError: This thread is closing the engine of that id at this moment.
        """
        with cls._closed:
            cls._wait_until_closed(instance_id)
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
            if cls._sharing(metadata):
                logger.warning(
                    "the engine %r has the labels %s of another engine of this process: their "
                    "counters add up, and their gauges show one or the other; give each its own "
                    "worker_id or served_model_name",
                    instance_id,
                    engine_labels(metadata),
                )
            try:
                made = _make_instance(
                    config, metadata, gpu_connector, broadcast_fn, broadcast_object_fn
                )
            except BaseException:
                cls._forget_monitor(metadata)
                raise
            cls._instances[instance_id] = made
            return made.engine

    @classmethod
    def get(cls, instance_id: str) -> LMCacheEngine | None:
        """Return the engine of an id, or None."""
        known = cls._instances.get(instance_id)
        return None if known is None else known.engine

    @classmethod
    def destroy(cls, instance_id: str) -> None:
        """Close the engine of an id and forget it; an unknown one is a no-op.

        When it returns, the engine is closed and the id is free, even if another thread closed
        it; for the very thread that is closing it, it is a no-op. What closing counted is exported
        then, and the series of the engine's gauges are removed.
        """
        with cls._closed:
            if cls._is_closing_here(instance_id):
                return
            cls._wait_until_closed(instance_id)
            known = cls._instances.pop(instance_id, None)
            if known is None:
                return
            cls._closing[instance_id] = known, threading.get_ident()
        try:
            known.engine.close()
        finally:
            known.stats_logger.close()
            with cls._closed:
                del cls._closing[instance_id]
                known.stats_logger.remove_gauges()
                sharing = cls._sharing(known.metadata)
                cls._forget_monitor(known.metadata)
                cls._closed.notify_all()
            for instance in sharing:
                instance.stats_logger.log_now()  # its gauges went with those of the closed one

    @classmethod
    def _is_closing_here(cls, instance_id: str) -> bool:
        closing = cls._closing.get(instance_id)
        return closing is not None and closing[1] == threading.get_ident()

    @classmethod
    def _wait_until_closed(cls, instance_id: str) -> None:
        if cls._is_closing_here(instance_id):
            raise RuntimeError(f"the engine {instance_id!r} is being closed by this very thread")
        cls._closed.wait_for(lambda: instance_id not in cls._closing)

    @classmethod
    def _sharing(cls, metadata: LMCacheMetadata) -> list[_Instance]:
        """Return the engines with the labels of this metadata."""
        labels = engine_labels(metadata)
        closing = [instance for instance, _ in cls._closing.values()]
        return [
            instance
            for instance in [*cls._instances.values(), *closing]
            if engine_labels(instance.metadata) == labels
        ]

    @classmethod
    def _forget_monitor(cls, metadata: LMCacheMetadata) -> None:
        """Give the monitor of these labels up, unless an engine uses it."""
        if not cls._sharing(metadata):
            LMCStatsMonitor.DestroyInstance(metadata)


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
    stats_logger = LMCacheStatsLogger(
        metadata, monitor, engine.gauges, config=config, read_is_healthy=engine.is_healthy
    )
    stats_logger.start()
    return _Instance(engine, config, metadata, stats_logger)
