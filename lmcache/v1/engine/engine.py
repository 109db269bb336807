"""`LMCacheEngine`: the public methods, each a few lines into its operation."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch

from lmcache.logging import init_logger
from lmcache.v1.clock import Clock, SystemClock
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.engine.kv_event_log import KVEvent, KVEventLog
from lmcache.v1.engine.lookup import lookup
from lmcache.v1.engine.parts import ChunkCopier, EngineParts
from lmcache.v1.engine.retrieve import retrieve
from lmcache.v1.engine.store import Store
from lmcache.v1.engine.unsupported import UnsupportedCalls
from lmcache.v1.errors import ConfigError, UnsupportedFeatureError
from lmcache.v1.event_manager import EventManager
from lmcache.v1.gauges import ManagerGauges
from lmcache.v1.memory_format import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.pin_table import PinOwner
from lmcache.v1.stats import EngineStats, NullStats
from lmcache.v1.storage_backend.storage_manager import StorageManager
from lmcache.v1.token_database import ChunkedTokenDatabase, ChunkHash
from lmcache.v1.token_ids import TokenIds, check_tokens

logger = init_logger(__name__)

RequestConfigs = Mapping[str, object]


class HealthMonitor(Protocol):
    """Whom the engine asks before each operation, if one was set."""

    def is_healthy(self) -> bool:
        """Whether operations may run."""
        ...


class LMCacheEngine(UnsupportedCalls):
    """Stores and loads the KV cache of prompts, a chunk of tokens at a time.

        state     meaning                                         who may leave it
        built     `fmt` may be set; there is no storage manager   post_init
        ready     operations run                                  close; unhealthy, frozen
        unhealthy operations answer like a miss; nothing moves    its health monitor
        frozen    stores do nothing; only the CPU tier is read    freeze(False)
        closed    operations answer like a miss                   nobody

    Args:
        config: Settings; must not change after `post_init`.
        metadata: Model and rank; used through its attributes and accessors only, so a proxy will
            do. `get_shapes` and `get_dtypes` decide what a chunk takes.
        token_database: Tokens to chunks and keys.
        gpu_connector: Copies bytes; needs `batched_from_gpu` and `batched_to_gpu` and nothing else.
            None for an engine that only looks up.
        broadcast_fn, broadcast_object_fn: Kept for callers of 0.5.6; every rank stores its own.
        stats: Hears of each operation.
        clock: For the durations it hears.

    Attributes:
        fmt: Layout of the chunks; set it before `post_init` if the connector's is another.
        storage_manager: None before `post_init`.

    Threads: operations run concurrently, each on its caller's thread; no lock is held while bytes
    are copied. `post_init` and `close` are the owner's.
    """

    storage_manager: StorageManager | None = None
    _parts: EngineParts | None = None
    _kv_events: KVEventLog | None = None

    def __init__(
        self,
        config: LMCacheEngineConfig,
        metadata: LMCacheMetadata,
        token_database: ChunkedTokenDatabase,
        gpu_connector: ChunkCopier | None,
        broadcast_fn: Callable[[torch.Tensor, int], object],
        broadcast_object_fn: Callable[[Any, int], object],
        stats: EngineStats | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.config = config
        self.metadata = metadata
        self.token_database = token_database
        self.gpu_connector = gpu_connector
        self.broadcast_fn = broadcast_fn
        self.broadcast_object_fn = broadcast_object_fn
        self.store_location: str | None = config.store_location
        self.retrieve_locations: list[str] | None = config.retrieve_locations
        self.kv_events_enabled: bool = config.enable_kv_events
        self.model_name = metadata.model_name
        self.fmt = MemoryFormat.KV_MLA_FMT if metadata.use_mla else MemoryFormat.KV_2LTD
        self.event_manager = EventManager()
        self._stats = stats or NullStats()
        self._clock: Clock = clock or SystemClock()
        self._health_monitor: HealthMonitor | None = None
        self._init_failed = False
        self._is_closed = False
        self._said_unhealthy = False

    def post_init(self, **kwargs: Any) -> None:
        """Make the storage manager; until then only attributes may be set. Twice is a no-op.

        Raises:
            ConfigError: A setting that cannot be used; names it.
            UnsupportedFeatureError: `async_lookup_server` was given.
            RuntimeError: The engine is closed.
        """
        if self._is_closed:
            raise RuntimeError("post_init was called on a closed engine; build a new one")
        if self._parts is not None:
            return
        if kwargs.get("async_lookup_server") is not None:
            raise UnsupportedFeatureError(
                "async_lookup_server: this fork has no async loading; use upstream LMCache for it"
            )
        manager = StorageManager(self.config, self.metadata, self.event_manager)
        try:
            self._check_locations(manager)
            if self.kv_events_enabled:
                database = self.token_database
                self._kv_events = KVEventLog(
                    manager, database.chunk_size, database.hasher.fits_64_bits
                )
        except BaseException:
            manager.close()
            raise
        self.storage_manager = manager
        self._parts = EngineParts(
            metadata=self.metadata,
            token_database=self.token_database,
            storage_manager=manager,
            stats=self._stats,
            clock=self._clock,
            store_location=self.store_location,
            retrieve_locations=self.retrieve_locations,
            waits_for_room=bool(self.config.get_extra_config_value("force_store_wait", False)),
            kv_events=self._kv_events,
        )

    def _check_locations(self, manager: StorageManager) -> None:
        known = manager.list_backends()
        if self.store_location is not None and self.store_location not in known:
            raise ConfigError(
                f"store_location={self.store_location!r} names no tier; there are "
                f"{', '.join(known) or 'none'}"
            )
        for name in self.retrieve_locations or ():
            if name not in known:
                logger.warning(
                    "retrieve_locations names %r, which is no tier of this engine (%s): it never "
                    "hits",
                    name,
                    ", ".join(known) or "there are none",
                )

    # --- operations ------------------------------------------------------------------------------
    def store(
        self,
        tokens: TokenIds | None = None,
        hashes: Sequence[ChunkHash] | None = None,
        offsets: Sequence[int] | None = None,
        mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        """Store the KV of a prompt: what is resident is refreshed, what is missing is copied.

        Where memory ends the store keeps a shorter prefix. Nothing happens while frozen or
        unhealthy.

        Args:
            tokens: [num_tokens] ids, the whole prompt so far; list or tensor on any device.
            hashes, offsets: Instead of tokens: chunk hashes and the tokens of each.
            mask: Bool, [num_tokens]; False only as a prefix made of whole chunks, which is
                refreshed but not copied.
            **kwargs: All of them reach `batched_from_gpu`; `request_configs` (tags are part of the
                keys) and `transfer_spec` (for the tiers) are read here as well.

        Raises:
            ValueError: Wrong tokens or mask.
            Exception: What the connector raised; then nothing was stored.
        """
        parts = self._ready("store")
        if parts is None or parts.storage_manager.is_frozen():
            return
        if self.gpu_connector is None:
            raise RuntimeError("store needs a GPU connector, and this engine was built without one")
        operation = Store(parts, self.gpu_connector, self.fmt)
        chunks = self.token_database.split(tokens, hashes, offsets, mask)
        operation.run(
            chunks, tokens, kwargs.get("request_configs"), kwargs.get("transfer_spec"), kwargs
        )

    def retrieve(
        self, tokens: TokenIds, mask: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Copy the longest cached prefix of a prompt into the serving engine's cache.

        Args:
            tokens: [num_tokens] ids; list or tensor on any device.
            mask: As in `store`; what it leaves out is not loaded.
            **kwargs: All of them reach `batched_to_gpu`; `request_configs` is read here as well.

        Returns:
            Bool tensor [num_tokens] on the CPU, True where KV was loaded; a miss is all False.

        Raises:
            ValueError: Wrong tokens or mask.
            Exception: What the connector raised; then nothing counts as loaded.
        """
        parts = self._ready("retrieve")
        if parts is None:
            check_tokens(tokens)
            return torch.zeros(len(tokens), dtype=torch.bool)
        if self.gpu_connector is None:
            raise RuntimeError(
                "retrieve needs a GPU connector, and this engine was built without one"
            )
        started_s = self._clock.monotonic()
        chunks = self.token_database.split(tokens, mask=mask)
        configs = kwargs.get("request_configs")
        return retrieve(parts, self.gpu_connector, chunks, configs, kwargs, started_s)

    def lookup(
        self,
        tokens: TokenIds | None = None,
        hashes: Sequence[ChunkHash] | None = None,
        offsets: Sequence[int] | None = None,
        search_range: Collection[str] | None = None,
        lookup_id: str | None = None,
        pin: bool = False,
        request_configs: RequestConfigs | None = None,
    ) -> int:
        """Return how many tokens of a prompt are cached, as a prefix.

        Args:
            tokens, hashes, offsets: As in `store`.
            search_range: Names of the tiers to search; None: `retrieve_locations`, or all.
            lookup_id: Whose the pins are.
            pin: Keep the prefix from eviction until `lookup_unpin(lookup_id)` or the pin time-out,
                and count it as used, once however often the request asks. Without it nothing moves.

        Raises:
            ValueError: Wrong tokens, or `pin` without a `lookup_id`.
            TypeError: `search_range` or `lookup_id` of a wrong type.
        """
        parts = self._ready("lookup")
        if pin and lookup_id is None:
            raise ValueError("a lookup that pins needs a lookup_id, to which the pins belong")
        if lookup_id is not None and not isinstance(lookup_id, str):
            raise TypeError(f"lookup_id must be a str, not {lookup_id!r}")
        if isinstance(search_range, str):
            raise TypeError(f"search_range must be a list of tier names, not {search_range!r}")
        if parts is None:
            return 0
        started_s = self._clock.monotonic()
        chunks = self.token_database.split(tokens, hashes, offsets)
        owner = PinOwner(lookup_id) if pin and lookup_id is not None else None
        return lookup(parts, chunks, search_range, owner, request_configs, started_s)

    def lookup_unpin(self, lookup_id: str) -> None:
        """Release the pins of a lookup id; an unknown one is a no-op."""
        if self.storage_manager is not None:
            self.storage_manager.release_lookup(PinOwner(lookup_id))

    @property
    def lookup_pins(self) -> dict[PinOwner, dict[str, list[Any]]]:
        """Lookup id -> tier -> keys pinned there now; a copy."""
        return {} if self.storage_manager is None else self.storage_manager.lookup_pins()

    def clear(
        self,
        tokens: TokenIds | None = None,
        locations: Collection[str] | None = None,
        request_configs: RequestConfigs | None = None,
    ) -> int:
        """Forget the chunks of a prompt, or everything that nobody holds.

        Args:
            tokens: [num_tokens] ids; None or empty: everything.
            locations: Names of the tiers; None: all.

        Returns:
            For a prompt: copies removed. For everything: tokens removed.
        """
        if self.storage_manager is None:
            return 0
        if tokens is None or len(tokens) == 0:
            return self.storage_manager.clear(locations)
        hashes = self.token_database.split(tokens).hashes
        keys = self.token_database.make_keys(hashes, request_configs)
        return self.storage_manager.batched_remove(keys, locations)

    def get_kv_events(self) -> list[KVEvent]:
        """Return the chunks stored and removed since the last call, oldest first.

        Empty unless `enable_kv_events` is set.
        """
        return [] if self._kv_events is None else self._kv_events.drain()

    # --- state -----------------------------------------------------------------------------------
    @property
    def pin_timeout_seconds(self) -> float:
        """Seconds after its last lookup at which a request's pins are released all the same."""
        return float(self.config.pin_timeout_sec)

    def freeze(self, enabled: bool) -> None:
        """While frozen, stores do nothing and only the CPU tier is read."""
        self._manager("freeze").set_freeze(enabled)

    def is_frozen(self) -> bool:
        """Whether `freeze` is in force."""
        return self.storage_manager is not None and self.storage_manager.is_frozen()

    def set_hot_cache(self, enabled: bool) -> None:
        """Switch the hot cache; switched off, it forgets everything and takes nothing."""
        self._manager("set_hot_cache").set_hot_cache(enabled)

    def is_hot_cache_enabled(self) -> bool:
        """Whether the hot cache takes what is stored."""
        return self.storage_manager is not None and self.storage_manager.is_hot_cache_enabled()

    def set_health_monitor(self, health_monitor: HealthMonitor) -> None:
        """Ask this monitor before each operation."""
        self._health_monitor = health_monitor

    def mark_init_failed(self, reason: str = "") -> None:
        """Answer every operation like a miss from now on."""
        self._init_failed = True
        logger.error("LMCacheEngine failed to start%s", f": {reason}" if reason else "")

    def is_healthy(self) -> bool:
        """Whether operations run: started without fault, not closed, the monitor agrees."""
        if self._init_failed or self._is_closed:
            return False
        return self._health_monitor is None or self._health_monitor.is_healthy()

    def health(self) -> int:
        """Return 0 when the pool's books are in order, else -1."""
        return 0 if self._manager("health").memcheck() else -1

    def gauges(self) -> ManagerGauges | None:
        """Return the storage manager's totals and readings; None before `post_init`."""
        return None if self.storage_manager is None else self.storage_manager.gauges()

    def check_integrity(self) -> None:
        """Raise AssertionError naming every broken invariant."""
        if self.storage_manager is not None:
            self.storage_manager.check_integrity()

    def close(self) -> None:
        """Give up the memory and stop the threads; operations then answer like a miss."""
        self._is_closed = True
        if self._kv_events is not None:
            self._kv_events.close()
        if self.storage_manager is not None:
            self.storage_manager.close()

    def _manager(self, call: str) -> StorageManager:
        if self.storage_manager is None:
            raise RuntimeError(f"{call} needs post_init() to be called first")
        return self.storage_manager

    def _ready(self, call: str) -> EngineParts | None:
        """Return the parts, or None when the operation must answer like a miss."""
        if self._parts is None and not self._init_failed:
            raise RuntimeError(f"{call} needs post_init() to be called first")
        if self._is_closed:
            return None
        if not self.is_healthy():
            if not self._said_unhealthy:
                self._said_unhealthy = True
                logger.warning("the engine is unhealthy: %s and the like do nothing", call)
            return None
        self._said_unhealthy = False
        return self._parts
