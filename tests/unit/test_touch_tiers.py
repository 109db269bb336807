"""Touch over several tiers: plug-ins that report residency, plug-ins of 0.5.6, and broken ones."""

import logging
import subprocess
import sys

import pytest
from builders import CPU, evict, keys, order, put, put_all
from fakes import OldPlugin, RaisingPlugin, ReportingPlugin

from lmcache.v1.storage_backend.touch import TouchVerdict

REFRESHED, PRESENT, GONE = TouchVerdict.REFRESHED, TouchVerdict.PRESENT, TouchVerdict.GONE

RAISE_TWICE_IN_TWO_MANAGERS = """
import logging, sys
sys.path.insert(0, "tests")
from builders import keys, make_config, make_metadata, put_all
from fakes import RaisingPlugin
from lmcache.v1.storage_backend.storage_manager import StorageManager
for _ in range(2):
    sm = StorageManager(make_config(), make_metadata())
    sm.storage_backends["broken"] = RaisingPlugin(local_cpu_backend=sm.local_cpu_backend)
    put_all(sm, keys(2))
    sm.touch(keys(2)), sm.touch(keys(2))
    assert sm.touch_errors == 4, sm.touch_errors
    sm.close()
"""


@pytest.fixture
def two_tiers(make_manager):
    """An LRU pool of two chunks over a tier that reports residency; returns both."""
    sm = make_manager(num_chunks=2, tiers={"lower": ReportingPlugin})
    return sm, sm.storage_backends["lower"]


def test_a_key_only_in_a_lower_tier_is_present_there(two_tiers):
    sm, _ = two_tiers
    put_all(sm, keys(3))

    result = sm.touch(keys(3))

    assert list(result) == [PRESENT, REFRESHED, REFRESHED]
    assert result.locations == ["lower", CPU, CPU]


def test_a_touch_refreshes_the_lower_tiers_own_order_head_youngest(two_tiers):
    sm, lower = two_tiers
    put_all(sm, keys(4))

    result = sm.touch(keys(2))

    assert list(result) == [PRESENT, PRESENT]
    assert [key.chunk_hash for key in lower.data] == [3, 4, 2, 1]


def test_a_key_in_both_tiers_moves_in_both_orders(two_tiers):
    sm, lower = two_tiers
    put_all(sm, keys(2))

    assert list(sm.touch(keys(1))) == [REFRESHED]

    assert order(sm) == [2, 1]
    assert [key.chunk_hash for key in lower.data] == [2, 1]


def test_touch_moves_keys_of_a_tier_in_one_call_and_reads_pins_and_promotes_nothing(two_tiers):
    sm, lower = two_tiers
    put_all(sm, keys(4))
    lower.calls.clear()
    before = sm.snapshot()

    sm.touch(keys(5))

    assert lower.calls == ["move use"]
    assert sm.snapshot() == before
    assert order(sm) == [4, 3]


def test_a_get_promotes_what_touch_left_below(two_tiers):
    sm, _ = two_tiers
    put_all(sm, keys(3))
    sm.touch(keys(1))

    sm.get(keys(1)[0]).ref_count_down()

    assert sm.touch(keys(1)).locations == [CPU]


@pytest.mark.parametrize("policy", ["FIFO", "MRU"])
def test_without_recency_the_location_is_the_first_tier_that_would_serve(make_manager, policy):
    sm = make_manager(policy, num_chunks=2, tiers={"lower": ReportingPlugin})
    put_all(sm, keys(3))
    in_cpu = set(order(sm))

    result = sm.touch(keys(3))

    assert list(result) == [PRESENT] * 3
    assert result.locations == [CPU if n in in_cpu else "lower" for n in (1, 2, 3)]


def test_a_key_removed_below_is_gone(two_tiers):
    sm, lower = two_tiers
    put_all(sm, keys(3))

    lower.remove(keys(1)[0])

    assert list(sm.touch(keys(1))) == [GONE]


@pytest.mark.parametrize("out", ["bypassed", "frozen", "breaker"])
def test_a_tier_that_is_not_searched_does_not_count(two_tiers, out):
    sm, lower = two_tiers
    put_all(sm, keys(3))
    lower.calls.clear()

    if out == "bypassed":
        sm.set_backend_bypass("lower", True)
    elif out == "frozen":
        sm.set_freeze(True)
    else:
        lower.searchable = False

    result = sm.touch(keys(3))
    assert list(result) == [GONE, REFRESHED, REFRESHED]
    assert result.locations == [None, CPU, CPU]
    assert lower.calls == []


@pytest.mark.parametrize("out", ["bypassed", "frozen", "breaker"])
def test_a_tier_that_is_searched_again_counts_again(two_tiers, out):
    sm, lower = two_tiers
    put_all(sm, keys(3))
    sm.set_backend_bypass("lower", True)
    sm.set_freeze(True)
    lower.searchable = False
    sm.touch(keys(3))

    sm.set_backend_bypass("lower", False)
    sm.set_freeze(False)
    lower.searchable = True

    assert sm.touch(keys(1)).locations == ["lower"]


def test_a_bypassed_cpu_tier_leaves_its_keys_gone_and_unmoved(make_manager):
    sm = make_manager(num_chunks=3)
    put_all(sm, keys(3))

    sm.set_backend_bypass(CPU, True)

    assert list(sm.touch(keys(3))) == [GONE] * 3
    assert order(sm) == [1, 2, 3]


def test_a_0_5_6_plugin_answers_from_what_was_stored_there_without_being_called(make_manager):
    sm = make_manager(num_chunks=1, tiers={"old": OldPlugin})
    old = sm.storage_backends["old"]
    put_all(sm, keys(2))
    old.calls.clear()

    result = sm.touch(keys(3))

    assert list(result) == [PRESENT, REFRESHED, GONE]
    assert result.locations == ["old", CPU, None]
    assert old.calls == []


def test_what_a_0_5_6_plugin_was_found_to_lack_is_gone(make_manager):
    sm = make_manager(num_chunks=1, tiers={"old": OldPlugin})
    put_all(sm, keys(2))
    sm.storage_backends["old"].data.clear()
    assert sm.touch(keys(1)).present == 1

    assert sm.contains(keys(1)[0]) is None

    assert sm.touch(keys(1)).gone == 1


def test_what_a_0_5_6_plugin_was_found_to_hold_is_present(make_manager):
    sm = make_manager(num_chunks=1, tiers={"old": OldPlugin})
    put_all(sm, keys(1))
    key = keys(1, first=9)[0]
    sm.storage_backends["old"].data[key] = sm.storage_backends["old"].data[keys(1)[0]]
    assert sm.touch([key]).gone == 1

    assert sm.contains(key) == "old"

    assert sm.touch([key]).locations == ["old"]


def test_what_was_removed_from_a_0_5_6_plugin_is_gone(make_manager):
    sm = make_manager(num_chunks=2, tiers={"old": OldPlugin})
    put_all(sm, keys(2))

    assert sm.remove(keys(1)[0]) == 2

    assert list(sm.touch(keys(2))) == [GONE, REFRESHED]


def test_a_plugin_of_0_5_6_has_no_residents_in_a_snapshot(make_manager):
    sm = make_manager(num_chunks=1, tiers={"old": OldPlugin})
    put_all(sm, keys(2))

    assert sm.snapshot().residents == {keys(2)[1]: frozenset({CPU})}


def test_a_tier_that_raises_makes_absent_keys_present_and_never_gone(make_manager):
    sm = make_manager(num_chunks=2, tiers={"broken": RaisingPlugin})

    result = sm.touch(keys(3))

    assert list(result) == [PRESENT] * 3
    assert result.locations == ["broken"] * 3
    assert sm.touch_errors == 3


def test_a_key_that_makes_a_tier_raise_is_counted_alone(make_manager):
    sm = make_manager(num_chunks=2, tiers={"broken": RaisingPlugin})
    k1, k2, k3 = keys(3)
    sm.storage_backends["broken"].poison = {k2}
    put_all(sm, (k1, k2, k3), location=CPU)

    result = sm.touch([k1, k2, k3])

    assert sm.touch_errors == 1
    assert list(result) == [GONE, PRESENT, REFRESHED]
    assert result.locations == [None, CPU, CPU]
    assert list(sm.touch(keys(1, first=9))) == [GONE]


@pytest.mark.parametrize(("call", "expected"), [("touch", [2, 4, 3, 1]), ("demote", [3, 1, 2, 4])])
def test_one_poisoned_key_leaves_the_order_of_the_others_as_asked(make_manager, call, expected):
    sm = make_manager(num_chunks=4, tiers={"broken": RaisingPlugin})
    broken = sm.storage_backends["broken"]
    put_all(sm, keys(4))
    broken.poison = {keys(2)[1]}

    getattr(sm, call)(keys(3))

    assert [key.chunk_hash for key in broken.data] == expected


def test_an_order_that_raises_leaves_its_keys_present_not_refreshed(make_manager):
    class BrokenFirst(RaisingPlugin):
        """Stands before the CPU tier in search order."""

    sm = make_manager(num_chunks=2)
    put_all(sm, keys(1))
    sm.storage_backends["first"] = BrokenFirst(local_cpu_backend=sm.local_cpu_backend)
    sm.storage_backends.move_to_end("first", last=False)

    assert list(sm.touch(keys(1))) == [PRESENT]
    assert sm.touch_errors == 1


def test_a_tier_that_answers_for_too_few_keys_counts_as_one_that_raises(make_manager):
    class Terse(ReportingPlugin):
        def move_in_order(self, keys, motion):
            return b""

    sm = make_manager(num_chunks=2, tiers={"terse": Terse})
    put(sm, keys(1)[0], location=CPU)

    result = sm.touch(keys(2))

    assert list(result) == [PRESENT, PRESENT]
    assert result.locations == [CPU, "terse"]
    assert sm.touch_errors == 2


def test_a_tier_that_cannot_say_whether_it_is_searchable_is_asked(make_manager):
    class Unaskable(ReportingPlugin):
        @property
        def is_searchable(self):
            raise RuntimeError("this tier is broken")

    sm = make_manager(num_chunks=2, tiers={"unaskable": Unaskable})
    put(sm, keys(1)[0], location=CPU)

    assert list(sm.touch(keys(2))) == [REFRESHED, GONE]
    assert sm.contains(keys(2)[1]) is None


def test_locks_are_free_again_after_a_tier_raised(make_manager):
    sm = make_manager(num_chunks=2, tiers={"broken": RaisingPlugin})

    sm.touch(keys(2))

    assert not sm.storage_backends["broken"].lock.locked()
    assert not sm.local_cpu_backend.cpu_lock.locked()
    assert put(sm, keys(1)[0])


def test_a_raising_tier_is_logged_with_one_traceback_per_process():
    done = subprocess.run(
        [sys.executable, "-c", RAISE_TWICE_IN_TWO_MANAGERS],
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Traceback") == 1
    assert "this tier is broken" in done.stderr


def test_touch_is_quiet_when_nothing_fails(two_tiers, caplog):
    sm, _ = two_tiers
    put_all(sm, keys(3))

    with caplog.at_level(logging.DEBUG):
        sm.touch(keys(4))

    assert caplog.records == []
    assert sm.touch_errors == 0


def test_the_order_decides_the_victim_even_when_a_lower_tier_keeps_a_copy(two_tiers):
    sm, _ = two_tiers
    put_all(sm, keys(2))
    sm.touch(keys(1))

    assert evict(sm) == [2]
