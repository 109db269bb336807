"""Every exported metric as data: name, meaning, and where its number comes from.

Names, types, buckets and multiprocess modes are those of 0.5.6 where it has the metric. A metric
whose feature is missing here is left out: a constant would look like a measurement.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from lmcache.v1.gauges import ManagerGauges
from lmcache.v1.stats_monitor import LMCacheStats

PREFIX = "lmcache:"

_Source = TypeVar("_Source")
_Value = TypeVar("_Value")
MultiprocessMode = Literal["livemostrecent", "sum"]

_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
_FINE_SECONDS = tuple(0.00001 * 2**i for i in range(20))  # 10 microseconds to 5.2 seconds
_TOKENS_PER_SECOND = (1.0, *(2.0**i for i in range(3, 17)))
_TENTHS = tuple(i / 10 for i in range(1, 11))


@dataclass(frozen=True, slots=True)
class Metric(Generic[_Source, _Value]):
    """One metric.

    Attributes:
        name: Without PREFIX.
        text: What it means.
        read: Gives its number, or a histogram's numbers, or a total per tuple of label values.
        labels: Beyond those of the engine.
        multiprocess_mode: How a gauge of several processes is joined.
        buckets: Upper bounds of a histogram.
        is_optional: A counter that appears with its first count: not every engine feeds it.
    """

    name: str
    text: str
    read: Callable[[_Source], _Value]
    labels: tuple[str, ...] = ()
    multiprocess_mode: MultiprocessMode = "livemostrecent"
    buckets: tuple[float, ...] = ()
    is_optional: bool = False

    @property
    def full_name(self) -> str:
        """The name as it is exported; Prometheus appends `_total` to a counter's."""
        return PREFIX + self.name


INTERVAL_COUNTERS: tuple[Metric[LMCacheStats, int], ...] = (
    Metric("num_retrieve_requests", "Retrieves", lambda s: s.interval_retrieve_requests),
    Metric(
        "num_store_requests",
        "Stores, but for those made while frozen or with no tier to store to",
        lambda s: s.interval_store_requests,
    ),
    Metric("num_lookup_requests", "Lookups", lambda s: s.interval_lookup_requests),
    Metric(
        "num_requested_tokens", "Tokens asked of retrieves", lambda s: s.interval_requested_tokens
    ),
    Metric("num_hit_tokens", "Tokens that retrieves loaded", lambda s: s.interval_hit_tokens),
    Metric(
        "num_stored_tokens",
        "Tokens copied and handed to the tiers, whether or not one kept them",
        lambda s: s.interval_stored_tokens,
    ),
    Metric(
        "num_resident_tokens",
        "Tokens of stores that were resident and were refreshed instead of copied",
        lambda s: s.interval_resident_tokens,
    ),
    Metric("num_lookup_tokens", "Tokens looked up", lambda s: s.interval_lookup_tokens),
    Metric("num_lookup_hits", "Tokens that lookups found", lambda s: s.interval_lookup_hits),
    Metric(
        "lookup_0_hit_requests",
        "Lookups that found nothing",
        lambda s: s.interval_lookup_0_hit_requests,
    ),
    Metric(
        "num_vllm_hit_tokens",
        "Tokens that the serving engine found in its own cache, as it reported them",
        lambda s: s.interval_vllm_hit_tokens,
        is_optional=True,
    ),
    Metric(
        "num_prompt_tokens",
        "Tokens of prompts, as the serving engine reported them",
        lambda s: s.interval_prompt_tokens,
        is_optional=True,
    ),
    Metric(
        "num_slow_retrieval_by_time",
        "Retrieves that took longer than the monitor's threshold",
        lambda s: s.interval_num_slow_retrieval_by_time,
    ),
    Metric(
        "num_slow_retrieval_by_speed",
        "Retrieves that loaded at less than the monitor's threshold of tokens per second",
        lambda s: s.interval_num_slow_retrieval_by_speed,
    ),
    Metric(
        "stats_dropped_samples",
        "Operations that the histograms miss because an interval had too many",
        lambda s: s.interval_dropped_samples,
    ),
)

TOTAL_COUNTERS: tuple[Metric[ManagerGauges, Mapping[tuple[str, ...], int]], ...] = (
    Metric(
        "local_cpu_evict_count",
        "Times that room was made in the CPU pool",
        lambda g: {(): g.cpu.evictions},
    ),
    Metric(
        "local_cpu_evict_keys_count",
        "Entries evicted to make room in the CPU pool",
        lambda g: {(): g.cpu.evicted_entries},
    ),
    Metric(
        "local_cpu_evict_failed_count",
        "Allocations that could evict and found no room all the same",
        lambda g: {(): g.cpu.failed_evictions},
    ),
    Metric(
        "forced_unpin_count",
        "Pins released because they exceeded pin_timeout_sec",
        lambda g: {
            (): g.cpu.forced_releases + g.disk.forced_releases + g.plugin_pins.forced_releases
        },
    ),
    Metric(
        "touches",
        "Keys that were touched, by what the answer was",
        lambda g: {(verdict,): number for verdict, number in g.touches.items()},
        labels=("verdict",),
    ),
    Metric(
        "touch_errors",
        "Touched keys that a tier answered with an exception",
        lambda g: {(): g.touch_errors},
    ),
    Metric(
        "stores",
        "Copies that entered a tier",
        lambda g: {(tier,): number for tier, number in g.stored.items()},
        labels=("tier",),
    ),
    Metric(
        "removals",
        "Copies that left a tier, by reason",
        lambda g: {(tier, reason): number for (tier, reason), number in g.removed.items()},
        labels=("tier", "reason"),
    ),
    Metric(
        "events_lost",
        "Cache events dropped because a subscriber was too slow",
        lambda g: {(): g.events_lost},
    ),
    Metric(
        "allocation_waits",
        "Allocations that began to wait for a release",
        lambda g: {(): g.cpu.allocation_waits},
    ),
    Metric(
        "allocation_failed_waits",
        "Allocations that waited in vain",
        lambda g: {(): g.cpu.failed_waits},
    ),
    Metric(
        "allocation_failures",
        "Allocations that got nothing",
        lambda g: {(): g.cpu.failed_allocations},
    ),
    Metric(
        "unmatched_unpins",
        "Releases of pins that were not there",
        lambda g: {
            (): g.cpu.unmatched_releases
            + g.disk.unmatched_releases
            + g.plugin_pins.unmatched_releases
        },
    ),
    Metric(
        "tier_errors",
        "Calls of a tier that raised and counted as a miss",
        lambda g: {(): g.tier_errors},
    ),
    Metric(
        "disk_dropped_puts",
        "Chunks that the disk tier did not take, by reason",
        lambda g: {
            ("queue_full",): g.disk.dropped_queue_full,
            ("no_room",): g.disk.dropped_no_room,
        },
        labels=("reason",),
    ),
    Metric(
        "disk_failed_writes",
        "Chunks that left the disk tier because their file could not be written",
        lambda g: {(): g.disk.failed_writes},
    ),
    Metric(
        "disk_failed_reads",
        "Reads of the disk tier that failed and counted as misses",
        lambda g: {(): g.disk.failed_reads},
    ),
    Metric(
        "disk_bad_files",
        "Files of the disk tier that were short, altered or foreign",
        lambda g: {(): g.disk.bad_files},
    ),
    Metric(
        "disk_adopted",
        "Keys that the disk tier found again from an earlier run",
        lambda g: {(): g.disk.adopted_entries},
    ),
)

INTERVAL_GAUGES: tuple[Metric[LMCacheStats, float], ...] = (
    Metric(
        "retrieve_hit_rate",
        "Share of the tokens asked of retrieves that was loaded, in the last interval",
        lambda s: s.retrieve_hit_rate,
    ),
    Metric(
        "lookup_hit_rate",
        "Share of the tokens looked up that was found, in the last interval",
        lambda s: s.lookup_hit_rate,
    ),
)

MANAGER_GAUGES: tuple[Metric[ManagerGauges, float], ...] = (
    Metric(
        "local_cache_usage",
        "Bytes of the CPU pool in use",
        lambda g: g.cpu.used_bytes,
        multiprocess_mode="sum",
    ),
    Metric(
        "local_storage_usage",
        "Bytes of the disk tier's budget in use",
        lambda g: g.disk.used_bytes,
        multiprocess_mode="sum",
    ),
    Metric(
        "disk_capacity_bytes",
        "Bytes of the disk tier's budget",
        lambda g: g.disk.capacity_bytes,
    ),
    Metric(
        "disk_in_flight_bytes",
        "Bytes in the CPU pool of chunks that are not on disk yet",
        lambda g: g.disk.in_flight_bytes,
    ),
    Metric(
        "active_memory_objs_count",
        "Memory objects that are not freed",
        lambda g: g.cpu.num_memory_objs,
        multiprocess_mode="sum",
    ),
    Metric(
        "pinned_memory_objs_count",
        "Memory objects with a pin",
        lambda g: g.cpu.num_pinned_objs,
        multiprocess_mode="sum",
    ),
    Metric("local_cpu_hot_cache_count", "Keys in the hot cache", lambda g: g.cpu.num_entries),
    Metric(
        "local_cpu_keys_in_request_count",
        "Pinned keys whose use is not in the eviction order yet",
        lambda g: g.cpu.num_keys_in_request,
    ),
    Metric(
        "pin_monitor_pinned_objects_count",
        "Pins of lookups in all tiers, which expire after pin_timeout_sec",
        lambda g: g.cpu.num_pins + g.disk.num_pins + g.plugin_pins.num_pins,
    ),
    Metric("pool_capacity_bytes", "Bytes of the CPU pool", lambda g: g.cpu.capacity_bytes),
    Metric("pool_used_bytes", "Bytes of the CPU pool in use", lambda g: g.cpu.used_bytes),
    Metric(
        "pool_largest_free_bytes",
        "Bytes of the largest free extent of the CPU pool",
        lambda g: g.cpu.largest_free_bytes,
    ),
    Metric("events_pending", "Cache events not taken yet", lambda g: g.events_pending),
    Metric(
        "event_lag_seconds",
        "Age of the oldest cache event not taken yet",
        lambda g: g.event_lag_seconds,
    ),
)

HEALTH: Metric[bool, float] = Metric(
    "lmcache_is_healthy", "1: the engine is healthy; 0: it is not", float
)

HISTOGRAMS: tuple[Metric[LMCacheStats, list[float]], ...] = (
    Metric(
        "time_to_retrieve",
        "Seconds of a retrieve",
        lambda s: s.time_to_retrieve,
        buckets=_SECONDS,
    ),
    Metric("time_to_store", "Seconds of a store", lambda s: s.time_to_store, buckets=_SECONDS),
    Metric(
        "time_to_lookup",
        "Seconds of a lookup",
        lambda s: s.time_to_lookup,
        buckets=_FINE_SECONDS,
    ),
    Metric(
        "retrieve_process_tokens_time",
        "Seconds that a retrieve spends on keys and on getting memory objects",
        lambda s: s.retrieve_process_tokens_time,
        buckets=_FINE_SECONDS,
    ),
    Metric(
        "retrieve_to_gpu_time",
        "Seconds that a retrieve spends on copying to the device",
        lambda s: s.retrieve_to_gpu_time,
        buckets=_FINE_SECONDS,
    ),
    Metric(
        "store_process_tokens_time",
        "Seconds that a store spends on keys and on allocating",
        lambda s: s.store_process_tokens_time,
        buckets=_FINE_SECONDS,
    ),
    Metric(
        "store_from_gpu_time",
        "Seconds that a store spends on copying from the device",
        lambda s: s.store_from_gpu_time,
        buckets=_FINE_SECONDS,
    ),
    Metric(
        "store_put_time",
        "Seconds that a store spends on putting",
        lambda s: s.store_put_time,
        buckets=_FINE_SECONDS,
    ),
    Metric(
        "retrieve_speed",
        "Tokens per second of a retrieve that loaded something",
        lambda s: s.retrieve_speed,
        buckets=_TOKENS_PER_SECOND,
    ),
    Metric(
        "store_speed",
        "Tokens per second of a store that copied something",
        lambda s: s.store_speed,
        buckets=_TOKENS_PER_SECOND,
    ),
    Metric(
        "request_cache_hit_rate",
        "Share of its tokens that a lookup found, of lookups that found something",
        lambda s: s.interval_lookup_hit_rates,
        buckets=_TENTHS,
    ),
)
