"""What becomes of the registry: our names in it, names that are taken, buckets, series that go."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from builders import make_config, make_metadata
from metric_fakes import LOOKUP, gauges_of, value
from prometheus_client import REGISTRY, Gauge

from lmcache.observability import LMCStatsMonitor, PrometheusLogger
from lmcache.v1.engine.stats_logger import LMCacheStatsLogger
from lmcache.v1.errors import ConfigError
from lmcache.v1.gauges import GaugeSource
from lmcache.v1.stats_monitor import StatsMonitor

pytestmark = pytest.mark.usefixtures("fresh_metrics")


def test_unregistering_removes_our_metrics_only():
    PrometheusLogger(make_metadata()).log_prometheus(StatsMonitor().get_stats_and_clear())
    others = {m.name for m in REGISTRY.collect() if not m.name.startswith("lmcache:")}

    LMCStatsMonitor.unregister_all_metrics()

    assert {m.name for m in REGISTRY.collect()} == others
    assert PrometheusLogger.GetInstance() is None


def test_buckets_can_be_set_by_extra_config(monitor):
    config = make_config(extra_config={"histogram_bucket_time_to_lookup": [0.5, 2]})
    monitor.lookup_done(replace(LOOKUP, seconds=1.0))

    LMCacheStatsLogger(make_metadata(), monitor, config=config).log_now()

    assert value("time_to_lookup_bucket", le="0.5") == 0
    assert value("time_to_lookup_bucket", le="2.0") == 1
    assert value("time_to_lookup_bucket", le="0.00064") is None
    assert value("time_to_store_bucket", le="10.0") == 0


NAN, INFINITE = float("nan"), float("inf")
BUCKETS = [
    [],
    [2, 1],
    [1, 1],
    ["a"],
    ["1", "2"],
    "123",
    b"123",
    {1: 2, 3: 4},
    {1, 2},
    range(3),
    5,
    [NAN],
    [1, NAN],
    [INFINITE],
    [1, INFINITE, INFINITE],
    [-INFINITE, 1],
    [INFINITE, 1],
    [True, 2],
    [10**400],
    None,
]


@pytest.mark.parametrize("buckets", BUCKETS, ids=str)
def test_buckets_that_cannot_be_used_are_refused_before_anything_is_registered(buckets):
    config = make_config(extra_config={"histogram_bucket_store_speed": buckets})

    if buckets is None:  # not set
        PrometheusLogger(make_metadata(), config)
        return
    with pytest.raises(ConfigError, match="histogram_bucket_store_speed"):
        PrometheusLogger(make_metadata(), config)
    PrometheusLogger(make_metadata())


def test_the_last_bucket_may_be_without_end(monitor):
    config = make_config(extra_config={"histogram_bucket_time_to_lookup": (0.5, INFINITE)})
    monitor.lookup_done(replace(LOOKUP, seconds=1.0))

    LMCacheStatsLogger(make_metadata(), monitor, config=config).log_now()

    assert value("time_to_lookup_bucket", le="0.5") == 0
    assert value("time_to_lookup_bucket", le="+Inf") == 1


@pytest.fixture
def taken_name():
    """One of our names, registered by somebody else in the middle of the list."""
    gauge = Gauge("lmcache:num_hit_tokens", "of somebody else", registry=None)
    REGISTRY.register(gauge)
    yield gauge
    if gauge in REGISTRY._collector_to_names:
        REGISTRY.unregister(gauge)


def test_a_name_that_is_taken_costs_the_metrics_and_one_line(taken_name, monitor, caplog):
    exporter = LMCacheStatsLogger(make_metadata(), monitor)
    monitor.lookup_done(LOOKUP)
    exporter.log_now()
    exporter.remove_gauges()

    assert caplog.text.count("exports no metrics") == len(caplog.records) == 1
    assert "num_hit_tokens" in caplog.text
    assert exporter.num_errors == 0
    ours = [m.name for m in REGISTRY.collect() if m.name.startswith("lmcache:")]
    assert ours == ["lmcache:num_hit_tokens"]
    assert value("num_lookup_requests_total") is None


def test_when_the_name_is_free_again_the_next_logger_exports(taken_name, monitor):
    assert not PrometheusLogger.GetOrCreate(make_metadata()).is_exporting
    REGISTRY.unregister(taken_name)

    LMCacheStatsLogger(make_metadata(), monitor).log_now()

    assert value("num_lookup_requests_total") == 0


def test_bad_buckets_are_an_error_also_where_a_name_is_taken(taken_name):
    config = make_config(extra_config={"histogram_bucket_store_speed": "123"})
    with pytest.raises(ConfigError, match="histogram_bucket_store_speed"):
        PrometheusLogger.GetOrCreate(make_metadata(), config)


def test_removing_gauges_leaves_counters_and_other_engines(monitor):
    others = make_metadata(worker_id=1)
    loggers = [PrometheusLogger(m) for m in (make_metadata(), others)]
    for exporter in loggers:
        exporter.log_prometheus(monitor.get_stats_and_clear(), gauges_of(GaugeSource()), True)

    loggers[0].remove_gauges()

    for name in ("lmcache_is_healthy", "pool_used_bytes", "retrieve_hit_rate"):
        assert value(name) is None, name
        assert value(name, others) is not None, name
    assert value("num_lookup_requests_total") == value("touch_errors_total") == 0


RELOADED = """
import importlib, sys
sys.path.insert(0, "tests")
import lmcache.observability as observability
from builders import make_metadata
from metric_fakes import LOOKUP, value
from lmcache.v1.stats_monitor import StatsMonitor
monitor = StatsMonitor()
for _ in range(3):
    exporter = observability.PrometheusLogger(make_metadata())
    monitor.lookup_done(LOOKUP)
    exporter.log_prometheus(monitor.get_stats_and_clear())
    importlib.reload(observability)
print(int(value("num_lookup_requests_total")))
observability.PrometheusLogger.unregister_all()
print(value("num_lookup_requests_total"))
"""


def test_the_module_can_be_loaded_again():
    done = subprocess.run(
        [sys.executable, "-c", RELOADED],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "3\nNone\n"), done.stderr
