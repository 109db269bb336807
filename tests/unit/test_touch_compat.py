"""Callers that reach inside, subclass, or skip `__init__`: an unmodified ATOM among them."""

from collections import OrderedDict

import pytest
from builders import CPU, evict, keys, make_config, make_metadata, order, put_all

from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.storage_backend.cache_policy import get_cache_policy
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.storage_manager import StorageManager
from lmcache.v1.storage_backend.touch import TouchVerdict


class BareManager(StorageManager):
    """A storage manager whose base `__init__` never ran."""

    def __init__(self):
        pass


class BareBackend(LocalCPUBackend):
    """A CPU tier as callers of 0.5.6 fake it: a dict, a lock and a policy, no base `__init__`."""

    def __init__(self, policy_name="LRU"):
        self.cache_policy = get_cache_policy(policy_name)
        self.hot_cache = self.cache_policy.init_mutable_mapping()

    def take(self, key):
        self.hot_cache[key] = "an object"
        self.cache_policy.update_on_put(key)


class RefCountedObject:
    """What a policy asks of a value."""

    can_evict = True


@pytest.mark.parametrize("policy", ["LRU", "LFU", "MRU"])
def test_a_caller_that_reaches_for_the_policy_under_the_lock_moves_the_order(make_manager, policy):
    sm = make_manager(policy, num_chunks=3)
    put_all(sm, keys(3))
    backend, key = sm.local_cpu_backend, keys(1)[0]

    with backend.cpu_lock:
        assert key in backend.hot_cache
        backend.cache_policy.update_on_hit(key, backend.hot_cache)

    assert order(sm) == [2, 3, 1]


def test_reaching_for_the_policy_of_an_absent_key_moves_nothing_and_does_not_raise(manager):
    put_all(manager, keys(3))
    backend = manager.local_cpu_backend

    with backend.cpu_lock:
        backend.cache_policy.update_on_hit(keys(1, first=9)[0], backend.hot_cache)

    assert order(manager) == [1, 2, 3]


def test_cpu_lock_is_the_lock_that_puts_and_touches_take(manager):
    import threading

    put_all(manager, keys(2))
    done = threading.Event()

    def touch():
        manager.touch(keys(1))
        done.set()

    with manager.local_cpu_backend.cpu_lock:
        thread = threading.Thread(target=touch)
        thread.start()
        assert order(manager) == [1, 2]
        assert not done.is_set()
    thread.join(timeout=30)

    assert order(manager) == [2, 1]


def test_the_candidates_of_the_policy_are_the_next_victims_and_stay(manager):
    put_all(manager, keys(8))
    backend = manager.local_cpu_backend

    named = backend.cache_policy.get_evict_candidates(backend.hot_cache, num_candidates=3)

    assert named == keys(3)
    assert order(manager) == list(range(1, 9))
    assert evict(manager, 3) == [1, 2, 3]


def test_hot_cache_is_a_read_only_mapping_coldest_first(manager):
    put_all(manager, keys(3))
    view = manager.local_cpu_backend.hot_cache
    k1, absent = keys(1)[0], keys(1, first=9)[0]

    assert (len(view), list(view), k1 in view, absent in view) == (3, keys(3), True, False)
    assert view[k1].is_valid()
    assert view.get(absent) is None
    assert "no key" not in view
    with pytest.raises(KeyError):
        view[absent]
    with pytest.raises(TypeError):
        view[absent] = view[k1]
    with pytest.raises(TypeError):
        del view[k1]


def test_a_manager_without_its_init_tolerates_touch_and_events():
    sm = BareManager()

    with sm.subscribe() as events:
        assert list(sm.touch(keys(1))) == [TouchVerdict.GONE]
        assert sm.demote(keys(1)).gone == 1
        assert events.take() == []
    assert sm.snapshot().residents == {}
    assert not sm.would_admit(1)
    assert sm.touch_errors == 0
    sm.touch_cache()
    sm.close()


def test_managers_without_their_init_share_no_tiers_and_no_ledger():
    one, other = BareManager(), BareManager()

    assert one.snapshot().incarnation != other.snapshot().incarnation
    one.close()
    other.close()


@pytest.mark.parametrize(
    ("policy", "verdict", "moved"),
    [("LRU", "REFRESHED", [2, 1]), ("LFU", "REFRESHED", [2, 1]), ("FIFO", "PRESENT", [1, 2])],
)
def test_a_backend_without_its_init_is_touched_through_its_policy(policy, verdict, moved):
    sm, backend = BareManager(), BareBackend(policy)
    sm.storage_backends = OrderedDict({CPU: backend})
    k1, k2 = keys(2)
    backend.take(k1)
    backend.take(k2)

    result = sm.touch([k1, keys(1, first=9)[0]])

    assert list(result) == [TouchVerdict[verdict], TouchVerdict.GONE]
    values = {key: RefCountedObject() for key in (k1, k2)}
    leaving = backend.cache_policy.get_evict_candidates(values, num_candidates=2)
    assert [key.chunk_hash for key in leaving] == moved


def test_a_backend_built_around_a_callers_own_tiers_is_attached_when_first_seen(manager):
    put_all(manager, keys(2))
    sm = BareManager()
    sm.storage_backends = OrderedDict({CPU: manager.local_cpu_backend})

    assert sm.touch(keys(2)).all_refreshed
    assert set(sm.snapshot().residents) == set(keys(2))
    sm.touch(keys(2))
    manager.touch(keys(2))


def test_a_manager_of_the_scheduler_has_no_cpu_tier_and_answers_gone():
    sm = StorageManager(make_config(), make_metadata(role="scheduler"))

    assert list(sm.touch(keys(1))) == [TouchVerdict.GONE]
    assert (sm.local_cpu_backend, sm.allocator_backend) == (None, None)
    sm.close()


def test_touch_after_close_answers_gone(make_manager):
    sm = make_manager()
    put_all(sm, keys(2))
    sm.close()

    assert sm.touch(keys(2)).gone == 2


def test_the_default_policy_is_lru():
    assert LMCacheEngineConfig.from_defaults().cache_policy == "LRU"
