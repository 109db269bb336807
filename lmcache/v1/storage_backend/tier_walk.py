"""Put, get, lookups and removal over tiers in search order."""

from collections.abc import Collection, Sequence
from typing import Any

from lmcache.logging import init_logger
from lmcache.v1.cache_key import CacheEngineKey
from lmcache.v1.memory_object import MemoryObj
from lmcache.v1.native import check_pairs
from lmcache.v1.pin_monitor import PinMonitor
from lmcache.v1.pin_table import PinOwner, PinTable
from lmcache.v1.storage_backend.object_transfer import allocate_and_copy_objects
from lmcache.v1.storage_backend.placement import Placement
from lmcache.v1.storage_backend.plugin_pin import PluginPin
from lmcache.v1.storage_backend.tier_set import Tier, TierSet

logger = init_logger(__name__)


class TierWalk:
    """Data operations over a set of tiers. A lower tier's fault costs a miss, and one log line.

    Threads: safe from any thread; holds no lock of its own.

    Args:
        tiers: The tiers.
        cpu_name: The tier that hits below it are written back into.
    """

    def __init__(self, tiers: TierSet, cpu_name: str) -> None:
        self._tiers = tiers
        self._cpu_name = cpu_name
        self._reported: set[tuple[str, str]] = set()
        self.num_tier_errors = 0

    # --- put -------------------------------------------------------------------------------------
    def put(
        self,
        keys: Sequence[CacheEngineKey],
        memory_objs: Sequence[MemoryObj],
        transfer_spec: Any,
        location: str | None,
        placement: Placement,
    ) -> None:
        """Store objects; see `StorageManager.batched_put`. References stay the caller's."""
        check_pairs(keys, memory_objs)
        if not isinstance(placement, Placement):
            raise TypeError(f"placement must be a Placement, not {placement!r}")
        for tier in self._tiers.targets(location):
            if tier.backend.takes_placement:
                self._put_to(tier, keys, memory_objs, transfer_spec, placement)
            elif placement is not Placement.SPARE:
                self._put_to(tier, keys, memory_objs, transfer_spec, None)

    def _put_to(
        self,
        tier: Tier,
        keys: Sequence[CacheEngineKey],
        memory_objs: Sequence[MemoryObj],
        transfer_spec: Any,
        placement: Placement | None,
    ) -> None:
        if tier.is_allocator:
            self._submit(tier, keys, memory_objs, transfer_spec, placement)
            return
        try:
            home = tier.backend.get_allocator_backend()
            pool_allocator = home.get_memory_allocator().pool_allocator
            if pool_allocator is None or all(o.pool() is pool_allocator.pool for o in memory_objs):
                self._submit(tier, keys, memory_objs, transfer_spec, placement)
            else:
                own_keys, copies = allocate_and_copy_objects(home, keys, memory_objs)
                try:
                    self._submit(tier, own_keys, copies, transfer_spec, placement)
                finally:
                    for copy in copies:
                        copy.ref_count_down()
        except Exception:  # a lower tier must not make a put fail that the CPU tier took
            self._note_error(tier, "put")

    def _submit(
        self,
        tier: Tier,
        keys: Sequence[CacheEngineKey],
        memory_objs: Sequence[MemoryObj],
        transfer_spec: Any,
        placement: Placement | None,
    ) -> None:
        backend = tier.backend
        if placement is not None:
            backend.batched_submit_placed_put(keys, memory_objs, placement, transfer_spec)
        else:
            backend.batched_submit_put_task(
                list(keys), list(memory_objs), transfer_spec=transfer_spec
            )
        if tier.page is None:
            tier.hint.add(keys)

    # --- get -------------------------------------------------------------------------------------
    def get(self, key: CacheEngineKey, location: str | None) -> MemoryObj | None:
        """Return the object from the first tier that has it, written back into the CPU tier."""
        for tier in self._searched(location):
            memory_obj = self._get_from(tier, key)
            if memory_obj is not None:
                self._write_back(tier, [key], [memory_obj])
                return memory_obj
        return None

    def _get_from(self, tier: Tier, key: CacheEngineKey) -> MemoryObj | None:
        try:
            memory_obj = tier.backend.get_blocking(key)
        except Exception:  # a fault costs a miss
            self._note_error(tier, "get")
            return None
        self._learn(tier, [key], memory_obj is not None)
        return memory_obj

    def batched_get(
        self, keys: Sequence[CacheEngineKey], location: str | None
    ) -> list[MemoryObj | None]:
        """Return one object or None per key, each from the first tier that has it."""
        found: list[MemoryObj | None] = [None] * len(keys)
        missing = list(range(len(keys)))
        for tier in self._searched(location):
            if not missing:
                break
            wanted = [keys[position] for position in missing]
            try:
                answers = tier.backend.batched_get_blocking(wanted)
            except Exception:  # a fault costs a miss
                self._note_error(tier, "batched_get")
                continue
            hits = [
                (position, answer)
                for position, answer in zip(missing, answers, strict=True)
                if answer is not None
            ]
            for position, answer in hits:
                found[position] = answer
            hit_keys = [keys[position] for position, _ in hits]
            self._learn(tier, hit_keys, True)
            self._learn(tier, [keys[p] for p in missing if found[p] is None], False)
            self._write_back(tier, hit_keys, [answer for _, answer in hits])
            missing = [position for position in missing if found[position] is None]
        return found

    def get_prefix(
        self, keys: Sequence[CacheEngineKey], search_range: Collection[str] | None
    ) -> list[MemoryObj]:
        """Return the objects of the prefix that the tiers hold together, each a use.

        What left its tier between the two steps ends the prefix; nothing behind a gap is read.
        """
        _, mapping = self.batched_contains(keys, search_range, False)
        prefix: list[MemoryObj] = []
        for name, tier_keys in mapping.items():
            found = self.batched_get(tier_keys, name)
            if None in found:
                whole = found.index(None)
                prefix += [obj for obj in found[:whole] if obj is not None]
                for behind in found[whole:]:
                    if behind is not None:
                        behind.ref_count_down()
                break
            prefix += [obj for obj in found if obj is not None]
        return prefix

    def _write_back(
        self, tier: Tier, keys: Sequence[CacheEngineKey], memory_objs: Sequence[MemoryObj]
    ) -> None:
        if tier.name == self._cpu_name or not keys:
            return
        for cpu in self._searched(self._cpu_name):
            try:
                cpu.backend.batched_submit_put_task(list(keys), list(memory_objs))
            except Exception:  # the caller has its objects; only the copy is missing
                self._note_error(cpu, "write back")

    # --- lookups ---------------------------------------------------------------------------------
    def contains(
        self,
        key: CacheEngineKey,
        search_range: Collection[str] | None,
        pin: bool,
        owner: PinOwner | None,
    ) -> str | None:
        """Return the name of the first tier that holds `key`."""
        for tier in self._tiers.searched(search_range):
            if self._prefix_in(tier, [key], pin, owner):
                return tier.name
        return None

    def batched_contains(
        self,
        keys: Sequence[CacheEngineKey],
        search_range: Collection[str] | None,
        pin: bool,
        owner: PinOwner | None = None,
    ) -> tuple[int, dict[str, list[CacheEngineKey]]]:
        """Return the length of the prefix held by the tiers together, and each one's part of it."""
        mapping: dict[str, list[CacheEngineKey]] = {}
        start = 0
        for tier in self._tiers.searched(search_range):
            if start == len(keys):
                break
            length = self._prefix_in(tier, keys[start:], pin, owner)
            if length:
                mapping[tier.name] = list(keys[start : start + length])
                start += length
        return start, mapping

    def _prefix_in(
        self, tier: Tier, keys: Sequence[CacheEngineKey], pin: bool, owner: PinOwner | None
    ) -> int:
        backend = tier.backend
        try:
            if tier.pins is None:
                length = backend.batched_contains_for(keys, pin, owner)
            else:
                length = backend.batched_contains(list(keys), pin)
                if pin and owner is not None:
                    self._own_pins(tier, tier.pins, keys[:length], owner)
        except Exception:  # a fault costs a miss
            self._note_error(tier, "contains")
            return 0
        self._learn(tier, keys[:length], True)
        self._learn(tier, keys[length : length + 1], False)
        return length

    def _own_pins(
        self, tier: Tier, pins: PinTable, keys: Sequence[CacheEngineKey], owner: PinOwner
    ) -> None:
        def note_error() -> None:
            self._note_error(tier, "unpin")

        pins.add(owner, keys, [PluginPin(tier.backend, key, note_error) for key in keys])
        if keys:
            PinMonitor.GetOrCreate().wake()

    def touch_cache(self, owner: PinOwner | None) -> None:
        """Count pinned lookups as uses in every tier that keeps such an order."""
        for tier in self._tiers.all():
            if tier.backend.takes_pin_owner:
                tier.backend.count_pinned_uses(owner)

    def release_pins(
        self,
        keys: Sequence[CacheEngineKey],
        locations: Collection[str] | None,
        owner: PinOwner | None,
    ) -> None:
        """Release pins in `locations`, or in every tier."""
        for tier in self._named(locations):
            try:
                if tier.pins is not None and owner is not None:
                    tier.pins.release(owner, keys)
                else:
                    tier.backend.release_pins(keys, owner)
            except Exception:  # the other tiers' pins must still go
                self._note_error(tier, "unpin")

    def release_lookup(self, owner: PinOwner) -> None:
        """Release every pin of a lookup id, in every tier, bypassed ones too."""
        for tier in self._tiers.all():
            try:
                if tier.pins is not None:
                    tier.pins.release_all(owner)
                else:
                    tier.backend.release_lookup(owner)
            except Exception:  # the other tiers' pins must still go
                self._note_error(tier, "unpin")

    def lookup_pins(self) -> dict[PinOwner, dict[str, list[CacheEngineKey]]]:
        """Return lookup id -> tier -> the keys it has pinned there."""
        held: dict[PinOwner, dict[str, list[CacheEngineKey]]] = {}
        for tier in self._tiers.all():
            of_tier = (tier.backend if tier.pins is None else tier.pins).pins_by_owner()
            for owner, keys in of_tier.items():
                held.setdefault(owner, {})[tier.name] = keys
        return held

    # --- removal ---------------------------------------------------------------------------------
    def remove(self, keys: Sequence[CacheEngineKey], locations: Collection[str] | None) -> int:
        """Remove keys from `locations`, or from every tier; returns the number of copies."""
        num_removed = 0
        for tier in self._named(locations):
            try:
                num_removed += tier.backend.batched_remove(list(keys))
            except Exception:  # the other tiers' copies must still go
                self._note_error(tier, "remove")
                continue
            tier.hint.discard(keys)
        return num_removed

    def clear(self, locations: Collection[str] | None) -> int:
        """Clear `locations`, or every tier that can; returns tokens."""
        num_tokens = 0
        for tier in self._named(locations):
            try:
                num_tokens += tier.backend.clear()
                tier.hint.clear()
            except NotImplementedError:
                logger.warning("%s cannot be cleared; its entries stay", tier.name)
            except Exception:  # the other tiers must still be cleared
                self._note_error(tier, "clear")
        return num_tokens

    # --- helpers ---------------------------------------------------------------------------------
    def _searched(self, location: str | None) -> list[Tier]:
        return list(self._tiers.searched(None if location is None else (location,)))

    def _named(self, locations: Collection[str] | None) -> list[Tier]:
        bypassed = self._tiers.bypassed
        return [
            tier
            for tier in self._tiers.all()
            if (locations is None or tier.name in locations) and tier.name not in bypassed
        ]

    def _learn(self, tier: Tier, keys: Sequence[CacheEngineKey], is_there: bool) -> None:
        if tier.page is not None or not keys:
            return
        if is_there:
            tier.hint.add(keys)
        else:
            tier.hint.discard(keys)

    def _note_error(self, tier: Tier, call: str) -> None:
        self.num_tier_errors += 1
        if (tier.name, call) not in self._reported:
            self._reported.add((tier.name, call))
            logger.exception(
                "%s failed in %s and counts as a miss; logged once per tier and call",
                tier.name,
                call,
            )
