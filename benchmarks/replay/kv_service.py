"""The KV side of one run: a real engine, its lookup server, and the client that asks it."""

import contextlib
import enum
import os
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from prometheus_client import REGISTRY

from benchmarks.replay.connector import ReplayConnector
from benchmarks.replay.metadata import make_metadata
from benchmarks.replay.naming import prompt_tokens
from benchmarks.replay.settings import ENGINE_TOKENS_PER_BLOCK, Settings
from lmcache.utils import mock_up_broadcast_fn, mock_up_broadcast_object_fn
from lmcache.v1.cache_engine import LMCacheEngine, LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.lookup_client import LookupClientFactory
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.storage_manager import StorageManager

_SOCKET_DIRECTORY = "VLLM_RPC_BASE_PATH"
_LOOKUP_TIMEOUT_MS = 60_000
"""So long that a busy machine turns no hit into a miss, which would change the counts."""


class LoadOutcome(enum.Enum):
    """How reading objects back went."""

    LOADED = "loaded"
    MISSING = "missing"
    NO_ROOM = "no_room"  # on disk, but the pool has no memory to read it into
    WRONG_BYTES = "wrong_bytes"


@dataclass(frozen=True, slots=True)
class KVTotals:
    """What the engine reports; blocks but for the last.

    Attributes:
        stored: Copied and put.
        resident: There already, and refreshed.
        no_room: Neither: memory ended before them.
        lookups: Lookups that it answered.
    """

    stored: int
    resident: int
    no_room: int
    lookups: int


class KVService:
    """Looks up, loads and stores the KV of prompts as a serving engine does; one thread uses it.

        state   meaning                                                     who may leave it
        open    engine and lookup server run; calls work                    close
        closed  sockets, threads and memory are given up; `totals` is told  nobody

    Prompts are given as prefix ids, one a block. Each run has an engine, metrics, sockets and files
    of its own, sockets and files in temporary directories. Every put is drained before the call
    that made it ends: a chunk on its way to disk keeps its memory, so what the pool evicts next
    would depend on how far the disk tier's writer is.

    Args:
        settings: Sizes of the pool and the disk tier.
        disk_dir: Where to make the directory of the files; None: where temporary files go.

    Attributes:
        engine: The real one.
        connector: Makes and checks the bytes.
    """

    def __init__(self, settings: Settings, disk_dir: Path | None = None) -> None:
        self._name = f"replay-{uuid.uuid4().hex}"
        self._put_blocks = settings.put_blocks
        self.connector = ReplayConnector(settings.block_bytes)
        self._num_wanted = 0
        self._num_lookups = 0
        config = _config(settings)
        metadata = make_metadata(self._name, settings.block_bytes)
        with contextlib.ExitStack() as parts:
            directory = parts.enter_context(tempfile.TemporaryDirectory(prefix="replay-"))
            if settings.disk_blocks is not None:
                config.local_disk = parts.enter_context(
                    tempfile.TemporaryDirectory(prefix="replay-disk-", dir=disk_dir)
                )
            self.engine = self._make_engine(config, metadata, parts)
            with _sockets_in(directory):
                server = LookupClientFactory.create_lookup_server(self.engine, metadata)
                assert server is not None, "the only rank answers lookups"
                parts.enter_context(server)
                self._client = parts.enter_context(
                    LookupClientFactory.create_lookup_client(config, metadata)
                )
            self._parts = parts.pop_all()

    def _make_engine(
        self, config: LMCacheEngineConfig, metadata: LMCacheMetadata, parts: contextlib.ExitStack
    ) -> LMCacheEngine:
        engine = LMCacheEngineBuilder.get_or_create(
            self._name,
            config,
            metadata,
            self.connector,
            mock_up_broadcast_fn,
            mock_up_broadcast_object_fn,
        )
        parts.callback(LMCacheEngineBuilder.destroy, self._name)
        engine.fmt = MemoryFormat.KV_2LTD
        engine.post_init()
        return engine

    def close(self) -> None:
        """Give everything up. Twice is a no-op."""
        self._parts.close()

    @property
    def manager(self) -> StorageManager:
        """The engine's storage manager, in whose pool the state images are as well."""
        manager = self.engine.storage_manager
        assert manager is not None, "post_init made it"
        return manager

    # ---- operations -----------------------------------------------------------------------------

    def match(self, prefix_ids: Sequence[int], lookup_id: str) -> int:
        """Return how many leading blocks are cached; pinned and used, once for a lookup id."""
        if not prefix_ids:
            return 0
        self._num_lookups += 1
        hit_tokens = self._client.lookup(prompt_tokens(prefix_ids).tolist(), lookup_id)
        assert hit_tokens is not None, "this client answers at once"
        return hit_tokens // ENGINE_TOKENS_PER_BLOCK

    def release(self, lookup_id: str) -> None:
        """End a request: its pins are released and its lookup is forgotten."""
        self.engine.lookup_unpin(lookup_id)
        self._client.clear_lookup_status(lookup_id)

    def load(self, prefix_ids: Sequence[int]) -> LoadOutcome:
        """Retrieve the blocks of a prefix and compare their bytes; a use of each."""
        num_intact, num_failed = self.connector.num_intact, self.num_failed_allocations
        loaded = self.engine.retrieve(prompt_tokens(prefix_ids), prefix_ids=prefix_ids)
        if not bool(loaded.all()):
            has_room = self.num_failed_allocations == num_failed
            return LoadOutcome.MISSING if has_room else LoadOutcome.NO_ROOM
        is_good = self.connector.num_intact - num_intact == len(prefix_ids)
        return LoadOutcome.LOADED if is_good else LoadOutcome.WRONG_BYTES

    def store(self, prefix_ids: Sequence[int], first: int) -> None:
        """Store a prompt of which the blocks before `first` are known to be cached or tried.

        With a disk tier, in parts that it takes whole.
        """
        step = self._put_blocks or len(prefix_ids)
        for start in range(first, len(prefix_ids), step):
            self._store_part(prefix_ids[: start + step], start)

    def _store_part(self, prefix_ids: Sequence[int], first: int) -> None:
        tokens = prompt_tokens(prefix_ids)
        mask = torch.ones(len(tokens), dtype=torch.bool)
        mask[: first * ENGINE_TOKENS_PER_BLOCK] = False
        self._num_wanted += len(prefix_ids) - first
        self.engine.store(tokens, mask=mask, prefix_ids=prefix_ids)
        self.manager.drain()

    # ---- what the engine says of it -------------------------------------------------------------

    @property
    def num_failed_allocations(self) -> int:
        """Allocations that found no memory."""
        backend = self.manager.local_cpu_backend
        assert backend is not None, "the replay's manager always has a CPU pool"
        return backend.gauges().failed_allocations

    def totals(self) -> KVTotals:
        """Return what the engine reported of its stores, once it is closed.

        Raises:
            RuntimeError: Its report contradicts what was asked of it or what was copied.
        """
        stored = self._reported("num_stored_tokens") // ENGINE_TOKENS_PER_BLOCK
        resident = self._reported("num_resident_tokens") // ENGINE_TOKENS_PER_BLOCK
        if stored != self.connector.num_filled:
            raise RuntimeError(
                f"the engine reports {stored} blocks as stored, but the connector was asked for "
                f"{self.connector.num_filled}"
            )
        num_lookups = self._reported("num_lookup_requests")
        if num_lookups != self._num_lookups:
            raise RuntimeError(
                f"the engine reports {num_lookups} lookups of {self._num_lookups} that were made: "
                "the lookup service failed meanwhile"
            )
        no_room = self._num_wanted - stored - resident
        return KVTotals(stored, resident, no_room, num_lookups)

    def _reported(self, metric: str) -> int:
        """Return a counter of this run's engine; the last of it is exported as it closes."""
        labels = {
            "model_name": self.engine.model_name,
            "worker_id": "0",
            "role": "worker",
            "served_model_name": self._name,
        }
        total = REGISTRY.get_sample_value(f"lmcache:{metric}_total", labels)
        if total is None:
            raise RuntimeError(f"the engine exported no {metric}")
        return int(total)


def _config(settings: Settings) -> LMCacheEngineConfig:
    return LMCacheEngineConfig.from_defaults(
        chunk_size=ENGINE_TOKENS_PER_BLOCK,
        local_cpu=True,
        max_local_cpu_size=settings.pool_bytes / 2**30,
        max_local_disk_size=settings.disk_bytes / 2**30,
        cache_policy=settings.policy,
        lookup_timeout_ms=_LOOKUP_TIMEOUT_MS,
    )


@contextlib.contextmanager
def _sockets_in(directory: str) -> Iterator[None]:
    """Let the lookup sockets made meanwhile lie in `directory`."""
    before = os.environ.get(_SOCKET_DIRECTORY)
    os.environ[_SOCKET_DIRECTORY] = directory
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SOCKET_DIRECTORY]
        else:
            os.environ[_SOCKET_DIRECTORY] = before
