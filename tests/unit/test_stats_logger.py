"""The thread that exports at an interval, and metrics of several processes."""

import logging
import os
import subprocess
import sys
import threading

import pytest
from builders import CPU, make_metadata
from event_fakes import BOUND_SECONDS
from metric_fakes import LOOKUP, gauges_of, value
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
        def get_stats_and_clear(self):
            raise RuntimeError("no statistics today")

    exporter = LMCacheStatsLogger(make_metadata(), Broken())
    exporter.log_now()
    exporter.log_now()

    assert exporter.num_errors == 2
    assert caplog.text.count("exporting metrics failed") == 1


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


def test_importing_starts_nothing_and_registers_nothing():
    assert "nothing started" in run_python(IMPORT_ONLY)
