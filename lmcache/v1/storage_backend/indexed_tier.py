"""What every tier over a native index has in common: lookups, pins with owners, plain puts."""

import abc
from collections.abc import Sequence
from typing import Any

from lmcache.v1.cache_key import CacheEngineKey
from lmcache.v1.memory_object import MemoryObj
from lmcache.v1.native import HotIndex
from lmcache.v1.pin_monitor import PinMonitor
from lmcache.v1.pin_table import PinOwner, PinTable
from lmcache.v1.storage_backend.abstract_backend import PutCallback, StorageBackendInterface
from lmcache.v1.storage_backend.placement import Placement


class IndexedTier(StorageBackendInterface):
    """A tier whose residents, their pins and their order are a native index.

    Attributes:
        pins: Who pinned what.

    Threads: safe from any thread; takes no lock of the tier, each step of the index is one native
    step: a finaliser may release a pin while its thread holds the tier's lock.
    """

    reports_residency = True
    takes_placement = True
    takes_pin_owner = True

    pins: PinTable

    @property
    @abc.abstractmethod
    def residents(self) -> HotIndex:
        """The index."""

    # --- looking up ------------------------------------------------------------------------------
    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        """Whether `key` is resident; moves nothing by itself."""
        if pin:
            return self.batched_contains_for([key], True, None) == 1
        return key in self.residents

    def batched_contains(self, keys: Sequence[CacheEngineKey], pin: bool = False) -> int:
        """Return the length of the resident prefix; with `pin`, pin it without an owner."""
        return self.batched_contains_for(keys, pin, None)

    def batched_contains_for(
        self, keys: Sequence[CacheEngineKey], pin: bool, owner: PinOwner | None
    ) -> int:
        """Return the length of the resident prefix; with `pin`, pin it for `owner`.

        What is pinned is not evicted. A pinned lookup is one use of each key. The order moves when
        `touch_cache` is called, or at the latest when the pin is released.
        """
        if not pin:
            length: int = self.residents.prefix_length(keys)
            return length
        num_pinned = self.pins.take(owner, keys, self.residents.pin_prefix)
        if num_pinned:
            PinMonitor.GetOrCreate().wake()
        return num_pinned

    def touch_cache(self) -> None:
        """Count the owner-less pinned lookups of this thread or task as uses, head youngest."""
        self.count_pinned_uses(None)

    @property
    def keys_in_request(self) -> list[CacheEngineKey]:
        """What `touch_cache` would count now; a copy, kept for callers of 0.5.6."""
        return self.pins.uncounted(None)

    def count_pinned_uses(self, owner: PinOwner | None) -> None:
        """Count the pinned lookups of `owner` as uses, head youngest; each pin counts once."""
        self._count_uses(self.pins.take_uncounted(owner))

    def _count_uses(self, keys: Sequence[CacheEngineKey]) -> None:
        if keys:
            self.residents.hit(keys)

    def pin(self, key: CacheEngineKey) -> bool:
        """Pin `key` without an owner; False when absent."""
        return self.contains(key, True)

    def unpin(self, key: CacheEngineKey) -> bool:
        """Release an owner-less pin of `key`; False when there is none."""
        return self.release_pins((key,), None) == 1

    def release_pins(self, keys: Sequence[CacheEngineKey], owner: PinOwner | None) -> int:
        """Release one pin of each key that belongs to `owner`; returns how many were."""
        num_released, uncounted = self.pins.release(owner, keys)
        self._count_uses(uncounted)
        return num_released

    def release_lookup(self, owner: PinOwner) -> int:
        """Release every pin of a lookup id; returns how many there were."""
        num_released, uncounted = self.pins.release_all(owner)
        self._count_uses(uncounted)
        return num_released

    def pins_by_owner(self) -> dict[PinOwner, list[CacheEngineKey]]:
        """Return what each lookup id has pinned here."""
        return self.pins.pins_by_owner()

    # --- storing and reading ---------------------------------------------------------------------
    def submit_put_task(
        self,
        key: CacheEngineKey,
        memory_obj: MemoryObj,
        on_complete_callback: PutCallback | None = None,
    ) -> None:
        """Store one object; see `batched_submit_placed_put`."""
        self.batched_submit_placed_put(
            [key], [memory_obj], Placement.YOUNG, None, on_complete_callback
        )

    def batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: Sequence[MemoryObj],
        transfer_spec: Any = None,
        on_complete_callback: PutCallback | None = None,
    ) -> None:
        """Store objects, given head first; see `batched_submit_placed_put`."""
        self.batched_submit_placed_put(
            keys, objs, Placement.YOUNG, transfer_spec, on_complete_callback
        )

    def batched_get_blocking(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        """Return one object or None per key; one use each, head youngest."""
        found: list[MemoryObj | None] = []
        self.batched_get_into(keys, found)
        return found
