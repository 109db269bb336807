"""What the disk tier tells of itself, and what Prometheus is told."""

import errno

from builders import keys, put, put_all
from disk_builders import (
    DISK,
    FILE_BYTES,
    disk_of,
    file_of,
    flip_a_bit,
    gate_files,
    read,
    store_below,
)

from lmcache.v1.gauges import DiskTierGauges
from lmcache.v1.stats_metrics import MANAGER_GAUGES, TOTAL_COUNTERS

CHUNK_BYTES = FILE_BYTES - 4096


def exported(sm):
    """The disk tier's metrics as they are exported, by name."""
    gauges = sm.gauges()
    return {
        metric.name: metric.read(gauges)
        for metric in (*TOTAL_COUNTERS, *MANAGER_GAUGES)
        if "disk" in metric.name or metric.name == "local_storage_usage"
    }


def test_a_new_tier_has_counted_nothing(make_disk):
    sm = make_disk(8)

    assert sm.gauges().disk == DiskTierGauges(capacity_bytes=8 * FILE_BYTES)


def test_without_a_disk_tier_everything_is_zero(manager):
    assert manager.gauges().disk == DiskTierGauges()


def test_use_and_what_is_in_flight_are_told(make_disk, monkeypatch):
    gates = gate_files(monkeypatch, is_gated=True)
    sm = make_disk(8)
    put_all(sm, keys(2), location=DISK)

    told = exported(sm)
    assert told["disk_capacity_bytes"] == 8 * FILE_BYTES
    assert told["local_storage_usage"] == 2 * FILE_BYTES
    assert told["disk_in_flight_bytes"] == 2 * CHUNK_BYTES
    assert (sm.gauges().disk.num_entries, sm.gauges().disk.num_queued) == (2, 2)
    gates[0].open_gate(2)
    sm.drain()
    assert exported(sm)["disk_in_flight_bytes"] == 0


def test_every_loss_is_counted_by_its_cause(make_disk, monkeypatch):
    gates = gate_files(monkeypatch)
    sm = make_disk(3)
    store_below(sm, keys(3))
    sm.batched_contains(keys(3), pin=True, owner="request")
    put(sm, keys(1, first=7)[0], location=DISK)
    assert sm.gauges().disk.num_pins == 3
    sm.release_lookup("request")
    flip_a_bit(file_of(sm, keys(1)[0]))
    assert not read(sm, keys(1)[0])
    gates[0].write_fault = errno.ENOSPC
    store_below(sm, keys(1, first=8))

    told = exported(sm)

    assert told["disk_dropped_puts"] == {("queue_full",): 0, ("no_room",): 1}
    assert told["disk_failed_writes"] == {(): 1}
    assert told["disk_failed_reads"] == {(): 1}
    assert told["disk_bad_files"] == {(): 1}


def test_evictions_and_adoptions_are_counted(make_disk):
    sm = make_disk(2)
    store_below(sm, keys(5))
    assert sm.gauges().disk.evicted_entries == 3
    sm.close()

    sm = make_disk(2)
    sm.drain()

    assert exported(sm)["disk_adopted"] == {(): 2}


def test_totals_never_fall_when_the_tier_is_made_anew(make_disk):
    sm = make_disk(2)
    store_below(sm, keys(5))
    flip_a_bit(file_of(sm, keys(1, first=5)[0]))
    read(sm, keys(1, first=5)[0])

    sm.recreate_backend(DISK)
    sm.drain()
    store_below(sm, keys(3, first=10))

    gauges = sm.gauges().disk
    assert gauges.evicted_entries == 3 + 2
    assert gauges.bad_files == 1
    assert gauges.used_bytes == 2 * FILE_BYTES
    sm.close_backend(DISK)
    assert sm.gauges().disk.evicted_entries == 5
    assert sm.gauges().disk.used_bytes == 0
    assert sm.local_disk_backend is None


def test_pins_of_the_disk_tier_expire(make_disk):
    sm = make_disk(4)
    store_below(sm, keys(2))
    sm.batched_contains(keys(2), pin=True, owner="request")
    disk = disk_of(sm)
    disk.pins.timeout_seconds = 1e-9
    disk.pins.release("request", keys(2))
    sm.batched_contains(keys(2), pin=True, owner="another")

    assert disk.pins.expire() == 2

    assert sm.gauges().disk.forced_releases == 2
    assert sm.gauges().disk.num_pins == 0
