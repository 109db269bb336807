"""The thread that exports at an interval, and metrics of several processes."""

import logging
import os
import subprocess
import sys
import threading

import pytest
from builders import CPU, make_metadata
from event_fakes import BOUND_SECONDS
from metric_fakes import LOOKUP, STORE, gauges_of, value
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from lmcache.v1.engine.stats_logger import LMCacheStatsLogger
from lmcache.v1.gauges import GaugeSource
from lmcache.v1.stats_monitor import StatsMonitor

pytestmark = pytest.mark.usefixtures("fresh_metrics")


class Rounds:
    """A reader that lets a test wait for the n-th round."""

    def __init__(self, fails=False):
        self.number = 0
        self._fails = fails
        self._changed = threading.Condition()

    def __call__(self):
        with self._changed:
            self.number += 1
            self._changed.notify_all()
        if self._fails:
            raise RuntimeError("no gauges today")
        return gauges_of(GaugeSource())

    def wait_for(self, number):
        with self._changed:
            assert self._changed.wait_for(lambda: self.number >= number, BOUND_SECONDS)


def threads_of_loggers():
    return [t for t in threading.enumerate() if t.name == "lmcache-stats-logger"]


def test_a_started_logger_exports_again_and_again_until_it_is_closed(monitor):
    rounds = Rounds()
    exporter = LMCacheStatsLogger(make_metadata(), monitor, rounds, log_interval_seconds=0.001)
    assert threads_of_loggers() == []

    exporter.start()
    exporter.start()
    assert len(threads_of_loggers()) == 1
    assert threads_of_loggers()[0].daemon
    rounds.wait_for(3)
    exporter.close()

    assert threads_of_loggers() == []


def test_closing_wakes_the_thread_and_exports_what_is_left(monitor):
    exporter = LMCacheStatsLogger(make_metadata(), monitor, log_interval_seconds=3600)
    exporter.start()
    monitor.lookup_done(LOOKUP)

    exporter.close()
    exporter.close()

    assert threads_of_loggers() == []
    assert value("num_lookup_requests_total") == 1
    with pytest.raises(RuntimeError, match="closed"):
        exporter.start()


def test_a_raising_reader_is_logged_once_and_counted_and_the_thread_goes_on(monitor, caplog):
    rounds = Rounds(fails=True)
    exporter = LMCacheStatsLogger(make_metadata(), monitor, rounds, log_interval_seconds=0.001)
    monitor.lookup_done(LOOKUP)
    with caplog.at_level(logging.ERROR):
        exporter.start()
        rounds.wait_for(3)
        exporter.close()

    assert exporter.num_errors == rounds.number
    assert caplog.text.count("exporting metrics failed") == 1
    assert value("num_lookup_requests_total") == 1


def test_an_export_that_fails_reaches_no_caller(caplog):
    class Broken(StatsMonitor):
        def take_interval(self):
            raise RuntimeError("no statistics today")

    exporter = LMCacheStatsLogger(make_metadata(), Broken())
    exporter.log_now()
    exporter.log_now()

    assert exporter.num_errors == 2
    assert caplog.text.count("exporting metrics failed") == 1


def test_a_round_that_fails_midway_has_counted_nothing_and_comes_with_the_next(monitor):
    source = GaugeSource()
    readings = [gauges_of(source, touch_errors=3), gauges_of(source, touch_errors=2, removed=None)]
    exporter = LMCacheStatsLogger(make_metadata(), monitor, readings.pop)
    monitor.lookup_done(LOOKUP)

    exporter.log_now()
    assert exporter.num_errors == 1
    assert not value("num_lookup_requests_total") and not value("time_to_lookup_count")
    monitor.lookup_done(LOOKUP)
    exporter.log_now()

    assert exporter.num_errors == 1
    assert value("num_lookup_requests_total") == value("time_to_lookup_count") == 2
    assert value("touch_errors_total") == 3
    assert value("lookup_hit_rate") == 0.5


@pytest.mark.parametrize("seconds", [0, -1])
def test_an_interval_that_is_not_positive_is_refused(monitor, seconds):
    with pytest.raises(ValueError, match="log_interval_seconds"):
        LMCacheStatsLogger(make_metadata(), monitor, log_interval_seconds=seconds)


# --- processes ------------------------------------------------------------------------------------
ENGINE = """
import os, sys
sys.path.insert(0, "tests")
from builders import keys, make_config, make_metadata, put_all
from lmcache.observability import LMCStatsMonitor
from lmcache.v1.engine.stats_logger import LMCacheStatsLogger
from lmcache.v1.stats import LookupDone
from lmcache.v1.storage_backend.storage_manager import StorageManager
metadata = make_metadata(worker_id=int(sys.argv[1]))
sm = StorageManager(make_config(), metadata)
monitor = LMCStatsMonitor.GetOrCreate(metadata)
exporter = LMCacheStatsLogger(metadata, monitor, sm.gauges)
put_all(sm, keys(3))
monitor.lookup_done(LookupDone(64, 32, 0.001))
exporter.log_now()
"""
LATE_FOLDER = """
import os, sys
sys.path.insert(0, "tests")
from metric_fakes import LOOKUP, RETRIEVE, STORE
from builders import make_metadata
from lmcache.v1.engine.stats_logger import LMCacheStatsLogger
from lmcache.v1.stats_monitor import StatsMonitor
monitor = StatsMonitor()
exporter = LMCacheStatsLogger(make_metadata(), monitor)
for done, there in ((LOOKUP, False), (LOOKUP, True), (LOOKUP, True)):
    if there:
        os.makedirs(os.environ["PROMETHEUS_MULTIPROC_DIR"], exist_ok=True)
    monitor.lookup_done(done)
    monitor.store_done(STORE)
    monitor.retrieve_done(RETRIEVE)
    exporter.log_now()
print(exporter.num_errors)
"""
GONE_ENGINE = """
import sys
sys.path.insert(0, "tests")
from builders import make_config, make_metadata
from lmcache.v1.cache_engine import LMCacheEngineBuilder
metadata = make_metadata()
LMCacheEngineBuilder.get_or_create("e", make_config(), metadata, None, None, None).post_init()
LMCacheEngineBuilder._instances["e"].stats_logger.log_now()
LMCacheEngineBuilder.destroy("e")
"""
IMPORT_ONLY = """
import os, sys, threading
before = dict(os.environ), threading.active_count()
import lmcache.observability
from prometheus_client import REGISTRY
assert (dict(os.environ), threading.active_count()) == before
assert not [m.name for m in REGISTRY.collect() if m.name.startswith("lmcache")]
print("nothing started")
"""


def run_python(program, *arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=BOUND_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_metrics_of_several_processes_are_joined_from_their_files(tmp_path):
    for worker_id in range(2):
        run_python(ENGINE, str(worker_id), PROMETHEUS_MULTIPROC_DIR=str(tmp_path))

    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))

    for worker_id in "01":
        labels = {"model_name": "m", "role": "None", "served_model_name": ""}
        labels["worker_id"] = worker_id
        read = {
            name: registry.get_sample_value(f"lmcache:{name}", {**labels, **more})
            for name, more in {
                "num_lookup_tokens_total": {},
                "stores_total": {"tier": CPU},
                "time_to_lookup_count": {},
                "lookup_hit_rate": {},
                "local_cpu_hot_cache_count": {},
                "active_memory_objs_count": {},
            }.items()
        }
        assert list(read.values()) == [64, 3, 1, 0.5, 3, 3], read


def joined_metrics(path):
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(path))
    labels = {"model_name": "m", "worker_id": "0", "role": "None", "served_model_name": ""}
    return lambda name: registry.get_sample_value(f"lmcache:{name}", labels)


def test_rounds_that_could_not_be_exported_are_with_the_next_one_and_once(tmp_path):
    folder = tmp_path / "late"
    said = run_python(LATE_FOLDER, PROMETHEUS_MULTIPROC_DIR=str(folder))

    assert said.strip() == "1"
    read = joined_metrics(folder)
    assert read("num_lookup_tokens_total") == 3 * LOOKUP.requested_tokens
    assert read("num_stored_tokens_total") == 3 * STORE.stored_tokens
    assert read("time_to_lookup_count") == read("time_to_retrieve_count") == 3
    assert read("retrieve_hit_rate") == 0.5


def test_gauges_of_a_destroyed_engine_are_zero_in_the_files_of_its_process(tmp_path):
    run_python(GONE_ENGINE, PROMETHEUS_MULTIPROC_DIR=str(tmp_path))

    read = joined_metrics(tmp_path)
    for name in ("pool_capacity_bytes", "lmcache_is_healthy", "local_cache_usage"):
        assert read(name) == 0, name
    assert read("num_lookup_requests_total") == 0


def test_importing_starts_nothing_and_registers_nothing():
    assert "nothing started" in run_python(IMPORT_ONLY)
