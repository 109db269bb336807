"""Put, get, lookups and removal over tiers in search order."""

from collections.abc import Collection, Sequence
from typing import Any

from lmcache.logging import init_logger
from lmcache.v1.cache_key import CacheEngineKey
from lmcache.v1.memory_object import MemoryObj, release_all
from lmcache.v1.native import check_pairs
from lmcache.v1.pin_monitor import PinMonitor
from lmcache.v1.pin_table import PinOwner, PinTable
from lmcache.v1.storage_backend.object_transfer import allocate_and_copy_objects
from lmcache.v1.storage_backend.placement import Placement
from lmcache.v1.storage_backend.plugin_pin import PluginPin
from lmcache.v1.storage_backend.tier_answers import checked_answers, checked_length
from lmcache.v1.storage_backend.tier_set import Tier, TierSet

logger = init_logger(__name__)

_MISFIT = "misfit"


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
            (memory_obj,) = checked_answers([tier.backend.get_blocking(key)], 1)
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
        try:
            for tier in self._searched(location):
                if not missing:
                    break
                wanted = [keys[position] for position in missing]
                answers = self._get_many_from(tier, wanted, None)
                for position, answer in zip(missing, answers, strict=True):
                    found[position] = answer
                missing = [position for position in missing if found[position] is None]
        except BaseException:  # the objects have no other owner yet
            release_all(found)
            raise
        return found

    def get_prefix(
        self,
        keys: Sequence[CacheEngineKey],
        search_range: Collection[str] | None,
        sizes: Sequence[int] | None,
        prefix: list[MemoryObj],
    ) -> None:
        """Append to `prefix` the objects of the prefix that the tiers hold together, each a use.

        What left its tier between the two steps ends the prefix, and so does an object that is not
        of the size given; nothing behind a gap is read.
        """
        _, mapping = self.batched_contains(keys, search_range, False)
        for name, tier_keys in mapping.items():
            start = len(prefix)
            wanted_sizes = None if sizes is None else sizes[start : start + len(tier_keys)]
            for tier in self._searched(name):
                found = self._get_many_from(tier, tier_keys, wanted_sizes)
                whole = found.index(None) if None in found else len(found)
                prefix += [obj for obj in found[:whole] if obj is not None]
                release_all(found[whole:])
            if len(prefix) < start + len(tier_keys):
                break

    def _get_many_from(
        self, tier: Tier, keys: Sequence[CacheEngineKey], sizes: Sequence[int] | None
    ) -> list[MemoryObj | None]:
        """Return one object or None per key from one tier, written back into the CPU tier."""
        answers: list[MemoryObj | None] = []
        try:
            try:
                tier.backend.batched_get_into(keys, answers)
            except Exception:  # a fault costs a miss
                self._note_error(tier, "batched_get")
                release_all(answers)
                return [None] * len(keys)
            if sizes is not None:
                self._drop_misfits(tier, answers, sizes)
            hits = [(key, obj) for key, obj in zip(keys, answers, strict=True) if obj is not None]
            missed = [key for key, obj in zip(keys, answers, strict=True) if obj is None]
            hit_keys = [key for key, _ in hits]
            self._learn(tier, hit_keys, True)
            self._learn(tier, missed, False)
            self._write_back(tier, hit_keys, [obj for _, obj in hits])
        except BaseException:  # the objects have no other owner yet
            release_all(answers)
            raise
        return answers

    def _drop_misfits(
        self, tier: Tier, answers: list[MemoryObj | None], sizes: Sequence[int]
    ) -> None:
        for index, (answer, size_bytes) in enumerate(zip(answers, sizes, strict=True)):
            if answer is not None and answer.get_size() != size_bytes:
                self._note_misfit(tier, answer.get_size(), size_bytes)
                answer.ref_count_down()
                answers[index] = None

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
        length = 0
        try:
            if tier.pins is None:
                length = tier.backend.batched_contains_for(keys, pin, owner)
            else:
                length = checked_length(tier.backend.batched_contains(list(keys), False), len(keys))
                if pin:
                    length = self._pin_at(tier, tier.pins, keys[:length], owner)
        except Exception:  # a fault costs a miss
            self._note_error(tier, "contains")
        self._learn(tier, keys[:length], True)
        self._learn(tier, keys[length : length + 1], False)
        return length

    def _pin_at(
        self, tier: Tier, pins: PinTable, keys: Sequence[CacheEngineKey], owner: PinOwner | None
    ) -> int:
        """Pin keys in a tier that knows no owners, one by one; returns how many it pinned."""

        def note_error() -> None:
            self._note_error(tier, "unpin")

        num_pinned = 0
        for key in keys:
            try:
                if not tier.backend.pin(key):
                    break
            except Exception:  # what was pinned so far is in the table, and counts
                self._note_error(tier, "pin")
                break
            if owner is not None:
                pins.add(owner, (key,), (PluginPin(tier.backend, key, note_error),))
            num_pinned += 1
        if num_pinned and owner is not None:
            PinMonitor.GetOrCreate().wake()
        return num_pinned

    def touch_cache(self, owner: PinOwner | None) -> None:
        """Count pinned lookups as uses in every tier that keeps such an order."""
        for tier in self._tiers.all():
            if not tier.backend.takes_pin_owner:
                continue
            try:
                tier.backend.count_pinned_uses(owner)
            except Exception:  # an order that lags behind is no reason to fail a lookup
                self._note_error(tier, "count_pinned_uses")

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
            try:
                of_tier = (tier.backend if tier.pins is None else tier.pins).pins_by_owner()
            except Exception:  # the other tiers' pins are still told
                self._note_error(tier, "pins_by_owner")
                continue
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

    def _note_misfit(self, tier: Tier, size_bytes: int, wanted_bytes: int) -> None:
        self.num_tier_errors += 1
        if (tier.name, _MISFIT) not in self._reported:
            self._reported.add((tier.name, _MISFIT))
            logger.error(
                "%s gave an object of %d bytes for a chunk of %d, which counts as a miss; logged "
                "once per tier",
                tier.name,
                size_bytes,
                wanted_bytes,
            )

    def _note_error(self, tier: Tier, call: str) -> None:
        self.num_tier_errors += 1
        if (tier.name, call) not in self._reported:
            self._reported.add((tier.name, call))
            logger.exception(
                "%s failed in %s and counts as a miss; logged once per tier and call",
                tier.name,
                call,
            )
