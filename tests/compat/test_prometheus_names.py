"""Metric names, types, labels, buckets and multiprocess modes recorded from LMCache 0.5.6."""

import json
from pathlib import Path

import pytest
from builders import make_metadata
from prometheus_client import REGISTRY

from lmcache.observability import LMCStatsMonitor, PrometheusLogger

RECORDED = json.loads((Path(__file__).parent / "goldens" / "metrics.json").read_text())
METRICS = RECORDED["metrics"]

OURS = {
    "allocation_failed_waits",
    "allocation_failures",
    "allocation_waits",
    "disk_adopted",
    "disk_bad_files",
    "disk_capacity_bytes",
    "disk_dropped_puts",
    "disk_failed_reads",
    "disk_failed_writes",
    "disk_in_flight_bytes",
    "event_lag_seconds",
    "events_lost",
    "events_pending",
    "num_resident_tokens",
    "pool_capacity_bytes",
    "pool_largest_free_bytes",
    "pool_used_bytes",
    "removals",
    "stats_dropped_samples",
    "stores",
    "tier_errors",
    "touch_errors",
    "touches",
    "unmatched_unpins",
}
# Their features do not exist here, or not yet; docs/metrics.md says which and why.
LEFT_OUT = {
    "get_blocking_failed_count",
    "instrumented_connector_batched_get_time",
    "kv_msg_queue_size",
    "p2p_time_to_transfer",
    "p2p_transfer_speed",
    "put_failed_count",
    "request_cache_lifespan",
    "retrieve_broadcast_time",
    "scheduler_unfinished_requests_count",
}
LEFT_OUT_FAMILIES = (
    "chunk_statistics_",
    "connector_",
    "num_remote_",
    "periodic_threads_",
    "remote_",
    "storage_events_",
)


@pytest.fixture(scope="module")
def registered():
    """Full name to collector."""
    LMCStatsMonitor.unregister_all_metrics()
    PrometheusLogger(make_metadata())
    # The client offers no public way from a name to its collector's type and settings.
    collectors = set(REGISTRY._collector_to_names)
    found = {c._name: c for c in collectors if getattr(c, "_name", "").startswith("lmcache:")}
    yield found
    LMCStatsMonitor.unregister_all_metrics()


def shared(registered):
    return {name: collector for name, collector in registered.items() if name in METRICS}


def test_a_metric_of_0_5_6_has_its_type(registered):
    types = {name: collector._type for name, collector in shared(registered).items()}

    assert types == {name: METRICS[name]["type"] for name in types}
    assert len(types) == 38


def test_a_metric_of_0_5_6_has_its_labels(registered):
    for name, collector in shared(registered).items():
        assert list(collector._labelnames) == RECORDED["labels"], name


def test_a_histogram_of_0_5_6_has_its_buckets(registered):
    histograms = [name for name in shared(registered) if METRICS[name]["type"] == "histogram"]

    assert len(histograms) == 11
    for name in histograms:
        assert registered[name]._kwargs["buckets"] == pytest.approx(METRICS[name]["buckets"]), name


def test_a_gauge_of_0_5_6_is_joined_over_processes_as_there(registered):
    gauges = [name for name in shared(registered) if METRICS[name]["type"] == "gauge"]

    assert {name: registered[name]._multiprocess_mode for name in gauges} == {
        name: METRICS[name]["multiprocess_mode"] for name in gauges
    }


def test_what_is_not_of_0_5_6_is_listed_here(registered):
    assert {name.removeprefix("lmcache:") for name in registered if name not in METRICS} == OURS


def test_what_is_left_out_of_0_5_6_is_listed_here(registered):
    missing = {name.removeprefix("lmcache:") for name in METRICS if name not in registered}

    assert {name for name in missing if not name.startswith(LEFT_OUT_FAMILIES)} == LEFT_OUT


def test_our_own_metrics_have_the_engine_s_labels_first(registered):
    for name in OURS:
        collector = registered[f"lmcache:{name}"]
        assert list(collector._labelnames)[:4] == RECORDED["labels"], name
    assert list(registered["lmcache:removals"]._labelnames)[4:] == ["tier", "reason"]
    assert list(registered["lmcache:disk_dropped_puts"]._labelnames)[4:] == ["reason"]
    assert list(registered["lmcache:stores"]._labelnames)[4:] == ["tier"]
    assert list(registered["lmcache:touches"]._labelnames)[4:] == ["verdict"]
