"""What is known of a tier below the CPU tier without asking it, and what is passed on to it."""

import asyncio

import pytest
from builders import CPU, allocate, evict, keys, order, put, put_all
from fakes import OldPlugin, ReportingPlugin, StoredBytes

from lmcache.v1.storage_backend.placement import Placement
from lmcache.v1.storage_backend.residency_hint import ResidencyHint
from lmcache.v1.storage_backend.touch import TouchVerdict

GONE, PRESENT, REFRESHED = TouchVerdict.GONE, TouchVerdict.PRESENT, TouchVerdict.REFRESHED


class ClearableOldPlugin(OldPlugin):
    """As a plug-in author of 0.5.6 would write a tier that can be emptied."""

    def clear(self):
        self.data.clear()
        return 0


class WritesLater(ReportingPlugin):
    """Admits a put at once, and lists it in its order only when it was written."""

    def batched_submit_put_task(self, keys, objs, transfer_spec=None, on_complete_callback=None):
        with self.lock:
            for key, obj in zip(keys, objs, strict=True):
                self.page.stored(key, StoredBytes(obj.get_size()))

    def drain(self):
        self.calls.append("drain")


class LosesOne(OldPlugin):
    """Has evicted one chunk by the time it is read, as any shared tier may."""

    lost = None

    def batched_get_blocking(self, keys):
        return [None if key == self.lost else self.get_blocking(key) for key in keys]


def test_a_put_in_flight_to_a_lower_tier_is_present_from_its_admission(make_manager):
    sm = make_manager(tiers={"disk": WritesLater})
    put(sm, keys(1)[0], location="disk")

    answer = sm.touch(keys(1))

    assert answer.verdicts == [PRESENT]
    assert answer.locations == ["disk"]


def test_drain_reaches_every_tier(make_manager):
    sm = make_manager(tiers={"disk": WritesLater})

    sm.drain()

    assert sm.storage_backends["disk"].calls == ["drain"]


def test_a_key_seen_in_a_tier_of_0_5_6_is_present_afterwards(make_manager):
    sm = make_manager(tiers={"old": OldPlugin})
    put(sm, keys(1)[0], location="old")
    shared = OldPlugin(local_cpu_backend=sm.local_cpu_backend)
    shared.data.update(sm.storage_backends["old"].data)
    sm.storage_backends["shared"] = shared  # stored by somebody else: nothing is known of it
    del sm.storage_backends["old"]
    assert sm.touch(keys(1)).verdicts == [GONE]
    sm.set_backend_bypass(CPU, True)  # so that nothing is written back

    obj = sm.get(keys(1)[0])
    obj.ref_count_down()

    assert sm.touch(keys(1)).locations == ["shared"]


def test_a_key_that_a_tier_of_0_5_6_did_not_have_is_gone_afterwards(make_manager):
    sm = make_manager(tiers={"old": OldPlugin})
    put(sm, keys(1)[0], location="old")
    sm.storage_backends["old"].data.clear()  # evicted by the tier itself
    assert sm.touch(keys(1)).verdicts == [PRESENT]

    assert sm.get(keys(1)[0]) is None

    assert sm.touch(keys(1)).verdicts == [GONE]


def test_clearing_a_tier_of_0_5_6_forgets_what_was_known_of_it(make_manager):
    sm = make_manager(tiers={"old": ClearableOldPlugin})
    put(sm, keys(1)[0], location="old")

    sm.clear(["old"])

    assert sm.touch(keys(1)).verdicts == [GONE]


def test_what_a_tier_read_behind_a_gap_is_given_back(make_manager):
    sm = make_manager(tiers={"old": LosesOne})
    put_all(sm, keys(4), location="old")
    sm.storage_backends["old"].lost = keys(4)[1]

    prefix = []
    sm.get_prefix(keys(4), prefix)

    assert [bool((obj.raw_tensor == 1).all()) for obj in prefix] == [True]
    prefix[0].ref_count_down()
    written_back = sm.local_cpu_backend.hot_cache
    assert set(written_back) == {keys(4)[0], *keys(2, first=3)}
    assert [obj.get_ref_count() for obj in written_back.values()] == [1, 1, 1]
    assert evict(sm, 3)


def test_a_hint_is_bounded_and_forgets_the_key_seen_longest_ago():
    hint = ResidencyHint(max_keys=3)
    hint.add(keys(3))
    hint.add(keys(1))  # seen again

    hint.add(keys(1, first=4))

    assert len(hint) == 3
    assert [key in hint for key in keys(4)] == [True, False, True, True]


@pytest.mark.parametrize("policy", ["FIFO", "MRU"])
def test_a_get_moves_nothing_without_recency(make_manager, policy):
    sm = make_manager(policy)
    put_all(sm, keys(3))

    sm.get(keys(1)[0]).ref_count_down()
    for obj in sm.batched_get(keys(2)):
        obj.ref_count_down()

    assert order(sm) == [1, 2, 3]


@pytest.mark.parametrize("policy", ["LRU", "LFU", "FIFO", "MRU"])
def test_admission_is_asked_of_every_policy_alike(make_manager, policy):
    sm = make_manager(policy, num_chunks=2)
    free = allocate(sm)
    nbytes = free.get_size()
    assert sm.would_admit(nbytes, Placement.SPARE)
    free.ref_count_down()
    put_all(sm, keys(2))

    assert not sm.would_admit(nbytes, Placement.SPARE)
    assert sm.would_admit(2 * nbytes, Placement.COLD)
    assert not sm.would_admit(3 * nbytes, Placement.YOUNG)
    assert order(sm) == [1, 2]
    assert sm.contains(keys(1)[0]) == CPU


@pytest.mark.parametrize("policy", ["LRU", "LFU"])
def test_a_key_demoted_twice_in_one_call_counts_at_its_first_position(make_manager, policy):
    sm = make_manager(policy)
    put_all(sm, keys(4))
    k1, k2 = keys(2)

    answer = sm.demote([k1, k2, k1])

    assert answer.verdicts == [REFRESHED] * 3
    assert order(sm) == [2, 1, 3, 4]


def test_what_a_tier_of_0_5_6_read_behind_a_gap_is_given_back_by_an_asynchronous_read(make_manager):
    sm = make_manager(tiers={"low": OldPlugin})
    low = sm.storage_backends["low"]
    put_all(sm, [*keys(2), *keys(1, first=4)], location="low")

    prefix = asyncio.run(low.batched_get_non_blocking("lookup", keys(4)))

    assert len(prefix) == 2
    for obj in prefix:
        obj.ref_count_down()
    assert sm.gauges().cpu.num_memory_objs == 0
