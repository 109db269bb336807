"""What a tier is: the interface of 0.5.6, and what touch and cache events ask of it on top."""

import abc
import contextlib
import enum
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar

from lmcache.v1.cache_key import CacheEngineKey
from lmcache.v1.memory_allocator import Dtypes, MemoryAllocatorInterface, Shapes
from lmcache.v1.memory_format import MemoryFormat
from lmcache.v1.memory_object import MemoryObj
from lmcache.v1.pin_table import PinOwner
from lmcache.v1.storage_backend.placement import Placement
from lmcache.v1.storage_backend.residency_ledger import TierLedger
from lmcache.v1.storage_backend.tier_answers import checked_answers, whole_prefix

if TYPE_CHECKING:
    import asyncio

    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

PutCallback = Callable[[CacheEngineKey], None]


class Motion(enum.Enum):
    """How a batch of keys moves in a tier's order."""

    USE = "use"  # a touch or a get
    HIT = "hit"  # a lookup's hit: as USE, and MRU moves too
    DEMOTE = "demote"  # to the end where victims are taken


class StorageBackendInterface(abc.ABC):
    """One tier.

    The first part is the interface of 0.5.6. The second has defaults, so that a plug-in written for
    0.5.6 works as it is: touch then answers from what this process stored there, and calls nothing.

    Args:
        dst_device: Device that `get` results are for.
    """

    # --- what touch and cache events ask for -----------------------------------------------------
    # True: the tier reports every transition to the ledger given to `attach_ledger`, holding
    # `order_lock`, and answers `move_in_order`.
    reports_residency: ClassVar[bool] = False
    # True: the put and pin calls below take a placement and an owner.
    takes_placement: ClassVar[bool] = False
    takes_pin_owner: ClassVar[bool] = False
    # Guards the tier's order. Taken after the locks of the tiers before it in search order and
    # before the ledger's, never held over I/O.
    order_lock: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()

    def __init__(self, dst_device: str = "cpu") -> None:
        self.dst_device = dst_device

    def attach_ledger(self, page: TierLedger) -> None:
        """Report residency to `page` from now on, what is resident already included."""
        return

    def move_in_order(self, keys: Sequence[CacheEngineKey], motion: Motion) -> bytes:
        """Move resident keys in the tier's order; the caller holds `order_lock`.

        Keys are given head first; the head ends youngest (under DEMOTE: the tail leaves first).
        No I/O, no waiting, no promotion.

        Returns:
            One byte per key: 0 absent, 1 moved, 2 resident but the order has no such motion.
        """
        return bytes(len(keys))

    @property
    def is_searchable(self) -> bool:
        """Whether `get` would ask this tier now (False behind an open circuit breaker)."""
        return True

    def batched_submit_placed_put(
        self,
        keys: Sequence[CacheEngineKey],
        objs: Sequence[MemoryObj],
        placement: Placement,
        transfer_spec: Any = None,
        on_complete_callback: PutCallback | None = None,
    ) -> list[Future[Any]] | None:
        """As `batched_submit_put_task`, into the place that `placement` says."""
        raise NotImplementedError

    def batched_contains_for(
        self, keys: Sequence[CacheEngineKey], pin: bool, owner: PinOwner | None
    ) -> int:
        """As `batched_contains`, pinning for `owner`."""
        raise NotImplementedError

    def count_pinned_uses(self, owner: PinOwner | None) -> None:
        """Count the pinned lookups of `owner`, or of this thread or task, as uses."""
        raise NotImplementedError

    def release_pins(self, keys: Sequence[CacheEngineKey], owner: PinOwner | None) -> int:
        """Release one pin of each key that belongs to `owner`; returns how many were."""
        return sum(bool(self.unpin(key)) for key in keys)

    def release_lookup(self, owner: PinOwner) -> int:
        """Release every pin of a lookup id; returns how many there were."""
        raise NotImplementedError

    def pins_by_owner(self) -> dict[PinOwner, list[CacheEngineKey]]:
        """Return what each lookup id has pinned in this tier."""
        raise NotImplementedError

    # --- the interface of 0.5.6 ------------------------------------------------------------------
    @abc.abstractmethod
    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        """Whether the tier holds `key`; with `pin`, pin it if so."""

    def batched_contains(self, keys: list[CacheEngineKey], pin: bool = False) -> int:
        """Return the length of the prefix of `keys` that the tier holds; pin it with `pin`."""
        for index, key in enumerate(keys):
            if not self.contains(key, pin):
                return index
        return len(keys)

    @abc.abstractmethod
    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        """Whether a put of `key` is under way."""

    @abc.abstractmethod
    def batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: list[MemoryObj],
        transfer_spec: Any = None,
        on_complete_callback: PutCallback | None = None,
    ) -> list[Future[Any]] | None:
        """Store objects; the tier takes references of its own.

        `on_complete_callback` runs once per key that is persistent; what it raises is logged.
        """

    async def async_batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: list[MemoryObj],
        transfer_spec: Any = None,
        on_complete_callback: PutCallback | None = None,
    ) -> None:
        """Store objects from the event loop."""
        raise NotImplementedError

    @abc.abstractmethod
    def get_blocking(self, key: CacheEngineKey) -> MemoryObj | None:
        """Return the object with a reference for the caller, or None."""

    def batched_get_blocking(self, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
        """Return one object or None per key."""
        return [self.get_blocking(key) for key in keys]

    def batched_get_into(
        self, keys: Sequence[CacheEngineKey], into: list[MemoryObj | None]
    ) -> None:
        """Append what `batched_get_blocking` returns to the caller's empty list.

        Raises:
            TypeError, ValueError: The tier's answer is none; see `checked_answers`.
        """
        into += checked_answers(self.batched_get_blocking(list(keys)), len(keys))

    def get_non_blocking(
        self, key: CacheEngineKey, location: str | None = None
    ) -> Future[Any] | None:
        """Start a get; None where a tier has no such thing."""
        return None

    async def batched_async_contains(
        self, lookup_id: str, keys: list[CacheEngineKey], pin: bool = False
    ) -> int:
        """As `batched_contains`, from the event loop."""
        return self.batched_contains(keys, pin)

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: list[CacheEngineKey], transfer_spec: Any = None
    ) -> list[MemoryObj]:
        """Return the objects of the prefix that could be read, from the event loop."""
        return whole_prefix(self.batched_get_blocking(keys))

    @abc.abstractmethod
    def pin(self, key: CacheEngineKey) -> bool:
        """Pin `key`; False when absent."""

    @abc.abstractmethod
    def unpin(self, key: CacheEngineKey) -> bool:
        """Release an owner-less pin of `key`; False when there is none."""

    @abc.abstractmethod
    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        """Remove `key`; False when absent. With force=False the caller holds the tier's lock."""

    def batched_remove(self, keys: list[CacheEngineKey], force: bool = True) -> int:
        """Remove keys; returns how many were there."""
        return sum(self.remove(key, force) for key in keys)

    @abc.abstractmethod
    def get_allocator_backend(self) -> "AllocatorBackendInterface":
        """Return the tier whose memory this one reads into and writes from."""

    def touch_cache(self) -> None:
        """Count the pinned lookups of this thread or task as uses, prefix head youngest."""
        raise NotImplementedError

    def cancel_request(self, req_id: str) -> None:
        """Forget what was started for a request."""
        return

    def drain(self) -> None:
        """Wait until every put admitted so far is on the tier's medium."""
        return

    def clear(self) -> int:
        """Drop what can be dropped; returns tokens. Tiers without it drop nothing."""
        raise NotImplementedError

    @abc.abstractmethod
    def close(self) -> None:
        """Give everything up. Twice is a no-op."""


class AllocatorBackendInterface(StorageBackendInterface):
    """A tier that owns the memory that others read into and write from."""

    @abc.abstractmethod
    def initialize_allocator(
        self, config: "LMCacheEngineConfig", metadata: "LMCacheMetadata | None" = None
    ) -> MemoryAllocatorInterface:
        """Make the allocator that the config asks for."""

    @abc.abstractmethod
    def get_memory_allocator(self) -> MemoryAllocatorInterface:
        """Return the allocator."""

    @abc.abstractmethod
    def allocate(
        self,
        shapes: Shapes,
        dtypes: Dtypes,
        fmt: MemoryFormat | None = None,
        eviction: bool = True,
        busy_loop: bool = True,
    ) -> MemoryObj | None:
        """Return an object with a reference for the caller, or None.

        Without `eviction` only free bytes are used; with `busy_loop` the call waits a bounded time
        for bytes to be released. Nothing is evicted for an allocation that cannot succeed.
        """

    @abc.abstractmethod
    def batched_allocate(
        self,
        shapes: Shapes,
        dtypes: Dtypes,
        batch_size: int,
        fmt: MemoryFormat | None = None,
        eviction: bool = True,
        busy_loop: bool = True,
    ) -> list[MemoryObj] | None:
        """Return `batch_size` objects, or None and take nothing."""

    def calculate_chunk_budget(self) -> int:
        """Return how many full chunks the memory holds."""
        raise NotImplementedError

    def get_allocator_backend(self) -> "AllocatorBackendInterface":
        """Return itself."""
        return self


class StoragePluginInterface(StorageBackendInterface):
    """A tier loaded by name from the config.

    Args:
        dst_device: See `StorageBackendInterface`.
        config, metadata: The engine's.
        local_cpu_backend: The CPU tier, for its memory.
        loop: The storage manager's event loop.
    """

    def __init__(
        self,
        dst_device: str = "cpu",
        config: "LMCacheEngineConfig | None" = None,
        metadata: "LMCacheMetadata | None" = None,
        local_cpu_backend: "LocalCPUBackend | None" = None,
        loop: "asyncio.AbstractEventLoop | None" = None,
    ) -> None:
        super().__init__(dst_device)
        self.config = config
        self.metadata = metadata
        self.local_cpu_backend = local_cpu_backend
        self.loop = loop


ConfigurableStorageBackendInterface = StoragePluginInterface
