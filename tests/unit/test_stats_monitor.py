"""What one engine's operations add up to, and which monitor is whose."""

from dataclasses import replace

import pytest
from builders import make_metadata
from event_fakes import run_together
from fakes import FakeClock
from metric_fakes import LOOKUP, RETRIEVE, STORE

from lmcache.observability import LMCStatsMonitor
from lmcache.v1.stats import EngineStats, RetrieveDone, StoreDone
from lmcache.v1.stats_monitor import MAX_SAMPLES, StatsMonitor

NUM_THREADS = 8

pytestmark = pytest.mark.usefixtures("fresh_metrics")


def test_a_monitor_hears_what_an_engine_reports(monitor):
    stats: EngineStats = monitor
    stats.lookup_done(LOOKUP)
    stats.lookup_done(replace(LOOKUP, hit_tokens=0))
    stats.store_done(STORE)
    stats.retrieve_done(RETRIEVE)

    read = monitor.get_stats_and_clear()

    assert (read.interval_lookup_requests, read.interval_store_requests) == (2, 1)
    assert (read.interval_lookup_tokens, read.interval_lookup_hits) == (128, 32)
    assert read.interval_lookup_0_hit_requests == 1
    assert (read.interval_stored_tokens, read.interval_resident_tokens) == (48, 16)
    assert read.interval_retrieve_requests == 1
    assert (read.interval_requested_tokens, read.interval_hit_tokens) == (64, 32)
    assert (read.retrieve_hit_rate, read.lookup_hit_rate) == (0.5, 0.25)
    assert (read.time_to_lookup, read.interval_lookup_hit_rates) == ([0.001, 0.001], [0.5])
    assert (read.time_to_store, read.store_speed) == ([0.5], [96.0])
    assert (read.store_process_tokens_time, read.store_from_gpu_time) == ([0.125], [0.25])
    assert read.store_put_time == [0.0625]
    assert (read.time_to_retrieve, read.retrieve_speed) == ([0.25], [128.0])
    assert (read.retrieve_process_tokens_time, read.retrieve_to_gpu_time) == ([0.125], [0.0625])


def test_reading_begins_a_new_interval(monitor):
    monitor.lookup_done(LOOKUP)
    monitor.get_stats_and_clear()

    assert monitor.get_stats_and_clear() == StatsMonitor().get_stats_and_clear()


def test_an_interval_that_is_put_back_is_read_again_with_what_came_after(monitor):
    for number in range(MAX_SAMPLES):
        monitor.lookup_done(replace(LOOKUP, seconds=float(number)))
    monitor.retrieve_done(RETRIEVE)
    taken = monitor.take_interval()
    monitor.lookup_done(replace(LOOKUP, seconds=0.5, hit_tokens=0))
    monitor.store_done(STORE)

    monitor.put_back(taken)

    read = monitor.get_stats_and_clear()
    assert read.interval_lookup_requests == MAX_SAMPLES + 1
    assert (read.interval_store_requests, read.interval_retrieve_requests) == (1, 1)
    assert read.lookup_hit_rate == 0.5 * MAX_SAMPLES / (MAX_SAMPLES + 1)
    assert (read.time_to_lookup[0], read.time_to_lookup[-1]) == (1.0, 0.5)
    assert (len(read.time_to_lookup), read.interval_dropped_samples) == (MAX_SAMPLES, 1)
    assert monitor.get_stats_and_clear() == StatsMonitor().get_stats_and_clear()


def test_rates_are_zero_when_nothing_was_asked(monitor):
    read = monitor.get_stats_and_clear()

    assert (read.retrieve_hit_rate, read.lookup_hit_rate) == (0.0, 0.0)


def test_a_part_that_did_not_take_place_is_in_no_histogram(monitor):
    monitor.store_done(StoreDone(64, 0, 64, 0.5, 0.125, 0.0, 0.0))
    monitor.retrieve_done(RetrieveDone(64, 0, 0.5, 0.125, 0.0))

    read = monitor.get_stats_and_clear()

    assert (read.store_from_gpu_time, read.store_put_time, read.store_speed) == ([], [], [])
    assert (read.retrieve_to_gpu_time, read.retrieve_speed) == ([], [])
    assert (read.time_to_store, read.time_to_retrieve) == ([0.5], [0.5])


def test_what_the_serving_engine_reports_is_added_up(monitor):
    for _ in range(2):
        monitor.update_interval_prompt_tokens(100)
        monitor.update_interval_vllm_hit_tokens(30)

    read = monitor.get_stats_and_clear()

    assert (read.interval_prompt_tokens, read.interval_vllm_hit_tokens) == (200, 60)


def test_an_interval_that_nobody_reads_keeps_exact_counts_and_bounded_lists(monitor):
    for number in range(MAX_SAMPLES + 5):
        monitor.lookup_done(replace(LOOKUP, seconds=float(number)))

    read = monitor.get_stats_and_clear()

    assert read.interval_lookup_requests == MAX_SAMPLES + 5
    assert read.interval_lookup_hits == 32 * (MAX_SAMPLES + 5)
    assert read.interval_dropped_samples == 5
    assert (len(read.time_to_lookup), read.time_to_lookup[0]) == (MAX_SAMPLES, 5.0)


def test_counts_from_many_threads_are_exact_over_all_intervals(monitor):
    read = []

    def report():
        for _ in range(500):
            monitor.lookup_done(LOOKUP)
            monitor.store_done(STORE)
            monitor.retrieve_done(RETRIEVE)

    def reader():
        for _ in range(100):
            read.append(monitor.get_stats_and_clear())

    run_together([report] * NUM_THREADS + [reader])
    read.append(monitor.get_stats_and_clear())

    number = 500 * NUM_THREADS
    assert sum(r.interval_lookup_requests for r in read) == number
    assert sum(r.interval_lookup_hits for r in read) == 32 * number
    assert sum(r.interval_stored_tokens for r in read) == 48 * number
    assert sum(r.interval_hit_tokens for r in read) == 32 * number
    assert sum(len(r.time_to_retrieve) for r in read) == number


def test_no_retrieve_is_slow_by_default(monitor, caplog):
    monitor.retrieve_done(replace(RETRIEVE, seconds=1e6))

    read = monitor.get_stats_and_clear()

    assert read.interval_num_slow_retrieval_by_time == 0
    assert read.interval_num_slow_retrieval_by_speed == 0
    assert "slow retrieve" not in caplog.text


def test_a_retrieve_past_a_threshold_counts_as_slow(monitor):
    monitor.retrieve_time_threshold = 1.0
    monitor.retrieve_token_speed_threshold = 100.0
    monitor.retrieve_done(RetrieveDone(1024, 1024, 2.0, 0.0, 0.0))  # late, but fast
    monitor.retrieve_done(RetrieveDone(64, 32, 0.5, 0.0, 0.0))  # in time, but sluggish
    monitor.retrieve_done(RetrieveDone(64, 0, 0.5, 0.0, 0.0))  # a miss has no speed

    read = monitor.get_stats_and_clear()

    assert read.interval_num_slow_retrieval_by_time == 1
    assert read.interval_num_slow_retrieval_by_speed == 1


def test_slow_retrieves_are_logged_at_most_every_ten_seconds(caplog):
    clock = FakeClock()
    monitor = StatsMonitor(clock)
    monitor.retrieve_time_threshold = 0.1
    for _ in range(3):
        monitor.retrieve_done(RETRIEVE)
    assert caplog.text.count("slow retrieve") == 1

    clock.advance(10)
    monitor.retrieve_done(RETRIEVE)

    assert caplog.text.count("slow retrieve") == 2
    assert "2 more since" in caplog.text


# --- monitors of a process ------------------------------------------------------------------------
def test_engines_have_a_monitor_each_and_one_engine_has_one():
    first, second = make_metadata(), make_metadata(worker_id=1)

    assert LMCStatsMonitor.GetOrCreate(first) is LMCStatsMonitor.GetOrCreate(make_metadata())
    assert LMCStatsMonitor.GetOrCreate(first) is not LMCStatsMonitor.GetOrCreate(second)


def test_without_an_argument_it_is_the_oldest_monitor():
    first = LMCStatsMonitor.GetOrCreate(make_metadata(worker_id=1))
    LMCStatsMonitor.GetOrCreate(make_metadata(worker_id=2))

    assert LMCStatsMonitor.GetOrCreate() is first


def test_a_monitor_asked_for_before_there_was_an_engine_becomes_the_first_engine_s():
    early = LMCStatsMonitor.GetOrCreate()

    assert LMCStatsMonitor.GetOrCreate(make_metadata()) is early
    assert LMCStatsMonitor.GetOrCreate(make_metadata(worker_id=1)) is not early
    assert LMCStatsMonitor.GetOrCreate() is early


def test_a_destroyed_monitor_is_forgotten():
    first, second = (LMCStatsMonitor.GetOrCreate(make_metadata(worker_id=i)) for i in range(2))

    LMCStatsMonitor.DestroyInstance(make_metadata(worker_id=0))
    assert LMCStatsMonitor.GetOrCreate(make_metadata(worker_id=0)) is not first
    assert LMCStatsMonitor.GetOrCreate(make_metadata(worker_id=1)) is second

    LMCStatsMonitor.DestroyInstance()
    assert LMCStatsMonitor.GetOrCreate(make_metadata(worker_id=1)) is not second
