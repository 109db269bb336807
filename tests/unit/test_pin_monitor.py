"""The monitor that releases pins past their deadline: one thread a process, started by a pin."""

import threading

import pytest
import torch
from builders import keys, until
from fakes import FakeClock

from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import AdHocMemoryAllocator
from lmcache.v1.pin_monitor import PinMonitor
from lmcache.v1.pin_table import PinTable

TIMEOUT_SECONDS = 300


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def pool():
    return AdHocMemoryAllocator()


def pinned(pool):
    """A live object that carries one pin, as `add` takes it over."""
    obj = pool.allocate(torch.Size([8]), torch.uint8)
    obj.pin()
    return obj


def test_a_shorter_interval_counts_while_the_monitor_waits_for_a_longer_one(pool):
    monitor = PinMonitor()
    patient, hasty = PinTable(1e-9), PinTable(1e-9)
    monitor.watch(patient, 1e6)
    monitor.wake()
    hasty.add("A", keys(1), [pinned(pool)])

    monitor.watch(hasty, 0.01)

    until(lambda: hasty.num_pins == 0)
    monitor.stop_monitoring()


def test_the_monitor_expires_the_pins_of_every_watched_table(clock, pool):
    monitor = PinMonitor()
    tables = [PinTable(TIMEOUT_SECONDS, clock) for _ in range(2)]
    for table in tables:
        monitor.watch(table, 30)
        table.add("A", keys(1), [pinned(pool)])
    assert monitor.get_monitored_count() == 2

    clock.advance(TIMEOUT_SECONDS)

    assert monitor.check_now() == 2
    assert monitor.get_monitored_count() == 0


def test_the_monitors_thread_is_a_daemon_that_starts_with_the_first_pin_and_can_be_stopped(
    clock, pool
):
    monitor, table = PinMonitor(), PinTable(TIMEOUT_SECONDS, clock)
    before = set(threading.enumerate())
    monitor.watch(table, 30)
    assert set(threading.enumerate()) == before

    monitor.wake()
    monitor.wake()
    started = set(threading.enumerate()) - before

    assert [(t.name, t.daemon) for t in started] == [("lmcache-pin-monitor", True)]
    monitor.stop_monitoring()
    for thread in started:
        thread.join(timeout=30)
        assert not thread.is_alive()


def test_the_monitor_forgets_a_table_that_is_gone(pool):
    monitor = PinMonitor()
    monitor.watch(PinTable(TIMEOUT_SECONDS), 30)

    assert monitor.get_monitored_count() == 0
    assert monitor.check_now() == 0


@pytest.mark.parametrize("seconds", [0, -1])
def test_an_interval_that_is_not_positive_is_refused(seconds):
    with pytest.raises(ValueError, match="check_interval_seconds must be positive"):
        PinMonitor().watch(PinTable(TIMEOUT_SECONDS), seconds)


def test_there_is_one_monitor_a_process_whatever_it_is_asked_with():
    assert PinMonitor.GetOrCreate() is PinMonitor.GetOrCreate("a config", "metadata")
