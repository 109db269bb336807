"""What a storage manager tells of itself: totals since it was made, and readings of now."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


class GaugeSource:
    """Identity of the manager whose totals a `ManagerGauges` gives."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True)
class CpuTierGauges:
    """The CPU tier's part of `ManagerGauges`; all zeros where there is no CPU tier.

    Attributes:
        capacity_bytes, used_bytes: Of the pool; used by memory objects, cached or not.
        largest_free_bytes: The largest extent that is free without evicting.
        num_entries: Keys in the hot cache.
        num_memory_objs: Memory objects that are not freed.
        num_pinned_objs: Those of them with a pin.
        num_pins: Pins that lookups hold; several may be on one object.
        num_keys_in_request: Pinned keys whose use is not in the order yet.
        forced_releases: Pins that were released because they exceeded their time.
        unmatched_releases: Releases of pins that were not there.
        allocation_waits: Allocations that began to wait for a release.
        failed_waits: Those of them that gave up.
        failed_allocations: Allocations that got nothing.
        failed_evictions: Those of them that were allowed to evict.
        evictions: Times that room was made.
        evicted_entries: Entries that left for it.
    """

    capacity_bytes: int = 0
    used_bytes: int = 0
    largest_free_bytes: int = 0
    num_entries: int = 0
    num_memory_objs: int = 0
    num_pinned_objs: int = 0
    num_pins: int = 0
    num_keys_in_request: int = 0
    forced_releases: int = 0
    unmatched_releases: int = 0
    allocation_waits: int = 0
    failed_waits: int = 0
    failed_allocations: int = 0
    failed_evictions: int = 0
    evictions: int = 0
    evicted_entries: int = 0


@dataclass(frozen=True, slots=True)
class DiskTierGauges:
    """The disk tier's part of `ManagerGauges`; all zeros where there is no disk tier.

    Attributes:
        capacity_bytes, used_bytes: Of files, heads included; what waits to be written and what an
            earlier run left counts as used.
        num_entries: Keys held, those in flight included.
        num_queued, in_flight_bytes: Chunks that are not on disk yet, and their bytes in memory.
        num_pins: Pins that lookups hold.
        forced_releases: Pins that were released because they exceeded their time.
        unmatched_releases: Releases of pins that were not there.
        dropped_queue_full, dropped_no_room: Chunks not taken: too much in flight, or nothing to
            evict for them.
        failed_writes: Chunks that left because their file could not be written.
        failed_reads: Reads that failed and counted as misses.
        bad_files: Files, of this or an earlier run, that were short, altered or foreign.
        adopted_entries: Keys found again from an earlier run.
        evicted_entries: Keys that left to make room.
    """

    capacity_bytes: int = 0
    used_bytes: int = 0
    num_entries: int = 0
    num_queued: int = 0
    in_flight_bytes: int = 0
    num_pins: int = 0
    forced_releases: int = 0
    unmatched_releases: int = 0
    dropped_queue_full: int = 0
    dropped_no_room: int = 0
    failed_writes: int = 0
    failed_reads: int = 0
    bad_files: int = 0
    adopted_entries: int = 0
    evicted_entries: int = 0

    def with_totals_of(self, closed: "DiskTierGauges") -> "DiskTierGauges":
        """Return these readings, with the totals of a tier that was closed added to the totals."""
        return replace(
            self,
            forced_releases=self.forced_releases + closed.forced_releases,
            unmatched_releases=self.unmatched_releases + closed.unmatched_releases,
            dropped_queue_full=self.dropped_queue_full + closed.dropped_queue_full,
            dropped_no_room=self.dropped_no_room + closed.dropped_no_room,
            failed_writes=self.failed_writes + closed.failed_writes,
            failed_reads=self.failed_reads + closed.failed_reads,
            bad_files=self.bad_files + closed.bad_files,
            adopted_entries=self.adopted_entries + closed.adopted_entries,
            evicted_entries=self.evicted_entries + closed.evicted_entries,
        )


@dataclass(frozen=True, slots=True)
class PinTotals:
    """What the pin tables of tiers that know no pin owners add up to.

    Attributes:
        num_pins: Pins that lookups hold now.
        forced_releases: Pins that were released because they exceeded their time.
        unmatched_releases: Releases of pins that were not there.
    """

    num_pins: int = 0
    forced_releases: int = 0
    unmatched_releases: int = 0


@dataclass(frozen=True, slots=True)
class ManagerGauges:
    """One manager's totals and readings. Each number is exact; they are not all of one moment.

    Attributes:
        source: Tells the totals of one manager from those of the next one.
        touches: Verdict ("refreshed", "present", "gone") to keys that `touch` answered so.
        touch_errors: Keys whose move a tier answered with an exception.
        stored: Name of a local tier to its transitions from absent to present.
        removed: (name of a local tier, reason) to its transitions from present to absent; every
            reason is listed.
        events_lost: Events dropped because a subscriber was too slow.
        events_pending: Events that no subscriber took yet, over all subscriptions.
        event_lag_seconds: Age of the oldest of them; 0 when there is none.
        tier_errors: Calls of a tier that raised and counted as a miss.
        cpu, disk: The CPU tier's and the disk tier's.
        plugin_pins: Of the tiers that know no pin owners; the local tiers' are not among them.
    """

    source: GaugeSource = field(repr=False, compare=False)
    touches: Mapping[str, int]
    touch_errors: int
    stored: Mapping[str, int]
    removed: Mapping[tuple[str, str], int]
    events_lost: int
    events_pending: int
    event_lag_seconds: float
    tier_errors: int
    cpu: CpuTierGauges
    disk: DiskTierGauges = DiskTierGauges()
    plugin_pins: PinTotals = PinTotals()
