"""What the operations of an engine work with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lmcache.v1.clock import Clock
from lmcache.v1.engine.kv_event_log import KVEventLog
from lmcache.v1.memory_object import MemoryObj
from lmcache.v1.stats import EngineStats
from lmcache.v1.storage_backend.storage_manager import StorageManager
from lmcache.v1.token_database import ChunkedTokenDatabase


class EngineMetadata(Protocol):
    """The accessors of the metadata that the engine uses; serving engines pass proxies."""

    def get_shapes(self, num_tokens: int | None = None) -> list[torch.Size]:
        """Return the shape of each layer group of a chunk of `num_tokens`."""
        ...

    def get_dtypes(self) -> list[torch.dtype]:
        """Return the element type of each layer group."""
        ...


class ChunkCopier(Protocol):
    """The calls of a GPU connector that the engine makes; serving engines pass their own.

    When a call returns, the bytes are where they belong and the objects may be given up. When it
    raises, nothing is assumed to be written.
    """

    def batched_from_gpu(
        self, memory_objs: list[MemoryObj], starts: list[int], ends: list[int], **kwargs: Any
    ) -> object:
        """Fill each object with the KV of the tokens [start, end)."""
        ...

    def batched_to_gpu(
        self, memory_objs: list[MemoryObj], starts: list[int], ends: list[int], **kwargs: Any
    ) -> object:
        """Write each object's KV into the serving engine's cache."""
        ...


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The collaborators of one engine, set once by `post_init`.

    Attributes:
        store_location: The one tier to store to; None: every tier.
        retrieve_locations: The tiers to look up and load from; None: every tier.
        waits_for_room: A store waits a bounded time for its first new chunk's memory instead of
            storing nothing at once (`extra_config.force_store_wait`).
        kv_events: Where stores are announced, or None.
    """

    metadata: EngineMetadata
    token_database: ChunkedTokenDatabase
    storage_manager: StorageManager
    stats: EngineStats
    clock: Clock
    store_location: str | None
    retrieve_locations: Sequence[str] | None
    waits_for_room: bool
    kv_events: KVEventLog | None
