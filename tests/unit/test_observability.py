"""How an engine's numbers reach Prometheus."""

from dataclasses import replace

import pytest
from builders import CHUNK_TOKENS, CPU, keys, make_metadata, put_all
from event_fakes import run_together
from metric_fakes import LOOKUP, RETRIEVE, STORE, gauges_of, value

from lmcache.observability import LMCStatsMonitor, PrometheusLogger
from lmcache.v1.engine.stats_logger import LMCacheStatsLogger
from lmcache.v1.gauges import CpuTierGauges, GaugeSource, PinTotals
from lmcache.v1.stats import LookupDone
from lmcache.v1.stats_monitor import StatsMonitor

NUM_THREADS = 8

pytestmark = pytest.mark.usefixtures("fresh_metrics")


def test_a_lookup_of_four_chunks_with_two_resident_hits_the_tokens_of_two(manager, monitor):
    """H42: a hit rate measured from what the tiers answered, and gauges that return to 0."""
    metadata = make_metadata()
    exporter = LMCacheStatsLogger(metadata, monitor, manager.gauges)
    put_all(manager, keys(2))

    num_hits, _ = manager.batched_contains(keys(4), pin=True, owner="request")
    monitor.lookup_done(LookupDone(4 * CHUNK_TOKENS, num_hits * CHUNK_TOKENS, 0.001))
    exporter.log_now()

    assert value("num_lookup_tokens_total") == 4 * CHUNK_TOKENS
    assert value("num_lookup_hits_total") == 2 * CHUNK_TOKENS
    assert value("lookup_hit_rate") == 0.5
    assert value("pinned_memory_objs_count") == value("pin_monitor_pinned_objects_count") == 2
    assert value("active_memory_objs_count") == value("local_cpu_hot_cache_count") == 2

    manager.batched_unpin(keys(2), owner="request")
    manager.clear()
    exporter.log_now()

    for name in (
        "pinned_memory_objs_count",
        "pin_monitor_pinned_objects_count",
        "active_memory_objs_count",
        "local_cpu_hot_cache_count",
        "local_cpu_keys_in_request_count",
        "local_cache_usage",
        "lookup_hit_rate",
    ):
        assert value(name) == 0, name
    assert value("num_lookup_hits_total") == 2 * CHUNK_TOKENS


def test_totals_are_exported_by_what_they_grew(manager, monitor):
    exporter = LMCacheStatsLogger(make_metadata(), monitor, manager.gauges)
    put_all(manager, keys(10))
    manager.touch(keys(10))
    for _ in range(3):
        exporter.log_now()

    assert value("stores_total", tier=CPU) == 10
    assert value("removals_total", tier=CPU, reason="capacity") == 2
    assert value("removals_total", tier=CPU, reason="explicit") == 0
    assert value("touches_total", verdict="refreshed") == 8
    assert value("touches_total", verdict="gone") == 2
    assert value("local_cpu_evict_keys_count_total") == value("local_cpu_evict_count_total") == 2
    assert value("pool_used_bytes") == value("pool_capacity_bytes") == value("local_cache_usage")


def test_the_totals_of_a_new_manager_go_on_top_of_the_old_one_s():
    exporter = PrometheusLogger(make_metadata())
    none = StatsMonitor().get_stats_and_clear()
    old, new = GaugeSource(), GaugeSource()

    exporter.log_prometheus(none, gauges_of(old, touch_errors=5))
    exporter.log_prometheus(none, gauges_of(new, touch_errors=6))
    exporter.log_prometheus(none, gauges_of(old, touch_errors=7))
    exporter.log_prometheus(none, gauges_of(old, touch_errors=6))  # read earlier, logged later

    assert value("touch_errors_total") == 7 + 6


def test_two_engines_of_a_process_do_not_mix_their_numbers(make_manager):
    metadatas = [make_metadata(worker_id=i, role="worker") for i in range(2)]
    managers = [make_manager(), make_manager()]
    monitors = [LMCStatsMonitor.GetOrCreate(metadata) for metadata in metadatas]
    loggers = [
        LMCacheStatsLogger(*parts, sm.gauges)
        for *parts, sm in zip(metadatas, monitors, managers, strict=True)
    ]
    for monitor, number in zip(monitors, (1, 2), strict=True):
        for _ in range(number):
            monitor.lookup_done(LOOKUP)
    put_all(managers[1], keys(3))
    for exporter in loggers:
        exporter.log_now()

    assert [value("num_lookup_requests_total", m) for m in metadatas] == [1, 2]
    assert [value("stores_total", m, tier=CPU) for m in metadatas] == [0, 3]
    assert [value("local_cpu_hot_cache_count", m) for m in metadatas] == [0, 3]


def test_every_histogram_and_interval_counter_gets_its_numbers(monitor):
    monitor.retrieve_time_threshold = 0.1
    monitor.retrieve_token_speed_threshold = 1000.0
    monitor.lookup_done(LOOKUP)
    monitor.lookup_done(replace(LOOKUP, hit_tokens=0))
    monitor.store_done(STORE)
    monitor.retrieve_done(RETRIEVE)
    monitor.update_interval_prompt_tokens(7)
    monitor.update_interval_vllm_hit_tokens(3)

    PrometheusLogger(make_metadata()).log_prometheus(monitor.get_stats_and_clear())

    counters = {
        "num_retrieve_requests": 1,
        "num_store_requests": 1,
        "num_lookup_requests": 2,
        "num_requested_tokens": 64,
        "num_hit_tokens": 32,
        "num_stored_tokens": 48,
        "num_resident_tokens": 16,
        "num_lookup_tokens": 128,
        "num_lookup_hits": 32,
        "lookup_0_hit_requests": 1,
        "num_vllm_hit_tokens": 3,
        "num_prompt_tokens": 7,
        "num_slow_retrieval_by_time": 1,
        "num_slow_retrieval_by_speed": 1,
        "stats_dropped_samples": 0,
    }
    assert {name: value(f"{name}_total") for name in counters} == counters
    sums = {
        "time_to_retrieve": 0.25,
        "time_to_store": 0.5,
        "time_to_lookup": 0.002,
        "retrieve_process_tokens_time": 0.125,
        "retrieve_to_gpu_time": 0.0625,
        "store_process_tokens_time": 0.125,
        "store_from_gpu_time": 0.25,
        "store_put_time": 0.0625,
        "retrieve_speed": 128.0,
        "store_speed": 96.0,
        "request_cache_hit_rate": 0.5,
    }
    assert {name: value(f"{name}_sum") for name in sums} == sums


def test_every_manager_gauge_gets_its_number():
    cpu = CpuTierGauges(*range(1, 17))
    gauges = gauges_of(
        GaugeSource(),
        touches={"refreshed": 21, "present": 22, "gone": 23},
        touch_errors=24,
        stored={"a": 25},
        removed={("a", "expired"): 26},
        events_lost=27,
        events_pending=28,
        event_lag_seconds=2.5,
        tier_errors=29,
        cpu=cpu,
        plugin_pins=PinTotals(num_pins=100, forced_releases=200, unmatched_releases=300),
    )

    PrometheusLogger(make_metadata()).log_prometheus(StatsMonitor().get_stats_and_clear(), gauges)

    expected = {
        "pool_capacity_bytes": 1,
        "pool_used_bytes": 2,
        "local_cache_usage": 2,
        "pool_largest_free_bytes": 3,
        "local_cpu_hot_cache_count": 4,
        "active_memory_objs_count": 5,
        "pinned_memory_objs_count": 6,
        "pin_monitor_pinned_objects_count": 107,
        "local_cpu_keys_in_request_count": 8,
        "forced_unpin_count_total": 209,
        "unmatched_unpins_total": 310,
        "allocation_waits_total": 11,
        "allocation_failed_waits_total": 12,
        "allocation_failures_total": 13,
        "local_cpu_evict_failed_count_total": 14,
        "local_cpu_evict_count_total": 15,
        "local_cpu_evict_keys_count_total": 16,
        "touch_errors_total": 24,
        "events_lost_total": 27,
        "events_pending": 28,
        "event_lag_seconds": 2.5,
        "tier_errors_total": 29,
    }
    assert {name: value(name) for name in expected} == expected
    assert [value("touches_total", verdict=v) for v in gauges.touches] == [21, 22, 23]
    assert value("stores_total", tier="a") == 25
    assert value("removals_total", tier="a", reason="expired") == 26


def test_what_nobody_feeds_is_not_exported(monitor):
    LMCacheStatsLogger(make_metadata(), monitor).log_now()

    assert value("num_store_requests_total") == 0
    for name in ("num_prompt_tokens_total", "num_vllm_hit_tokens_total", "lmcache_is_healthy"):
        assert value(name) is None, name
    assert value("pool_capacity_bytes") is None


def test_health_is_exported_as_the_engine_tells_it(monitor):
    health = [True, False]
    exporter = LMCacheStatsLogger(make_metadata(), monitor, read_is_healthy=health.pop)
    exporter.log_now()
    assert value("lmcache_is_healthy") == 0
    exporter.log_now()
    assert value("lmcache_is_healthy") == 1


def test_a_second_logger_shares_what_is_registered():
    first, second = (PrometheusLogger(make_metadata()) for _ in range(2))
    none = StatsMonitor().get_stats_and_clear()

    for exporter in (first, second):
        exporter.log_prometheus(replace(none, interval_store_requests=1))

    assert value("num_store_requests_total") == 2


def test_loggers_are_found_again_by_their_labels():
    assert PrometheusLogger.GetInstance() is None
    first = PrometheusLogger.GetOrCreate(make_metadata())
    second = PrometheusLogger.GetOrCreate(make_metadata(served_model_name="s"))

    assert PrometheusLogger.GetOrCreate(make_metadata()) is first is not second
    assert PrometheusLogger.GetInstance() is first
    assert second.labels == {
        "model_name": "m",
        "worker_id": "0",
        "role": "None",
        "served_model_name": "s",
    }


def test_exports_from_many_threads_are_exact():
    exporter = PrometheusLogger(make_metadata())
    none = StatsMonitor().get_stats_and_clear()
    source = GaugeSource()

    def export():
        for number in range(1, 101):
            exporter.log_prometheus(
                replace(none, interval_lookup_requests=1), gauges_of(source, events_lost=number)
            )

    run_together([export] * NUM_THREADS)

    assert value("num_lookup_requests_total") == 100 * NUM_THREADS
    assert value("events_lost_total") == 100
