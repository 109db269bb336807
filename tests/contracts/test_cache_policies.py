"""What every eviction policy keeps, and what each one is for, over a mapping of the caller's."""

from dataclasses import dataclass
from typing import Any

import pytest

from lmcache.v1.storage_backend.cache_policy import BaseCachePolicy, get_cache_policy
from lmcache.v1.storage_backend.cache_policy.ordered_policy import OrderedCachePolicy

NAMES = ["LRU", "LFU", "FIFO", "MRU"]


@dataclass
class Value:
    """Something that may be in use."""

    can_evict: bool = True


class Cache:
    """A mapping and its policy, as an owner keeps them."""

    def __init__(self, name: str) -> None:
        policy = get_cache_policy(name)
        assert isinstance(policy, OrderedCachePolicy)
        self.policy: OrderedCachePolicy[str] = policy
        self.values: Any = policy.init_mutable_mapping()

    def put(self, *keys: str, cold: bool = False) -> None:
        for key in keys:
            self.values[key] = Value()
            self.policy.update_on_put(key, cold)

    def victims(self, number: int = 10) -> str:
        return "".join(self.policy.get_evict_candidates(self.values, number))


@pytest.fixture(params=NAMES)
def cache(request: pytest.FixtureRequest) -> Any:
    made = Cache(request.param)
    yield made
    made.policy.check_integrity()


def test_naming_victims_forgets_none_of_them(cache: Cache) -> None:
    cache.put("a", "b", "c")
    first = cache.victims()
    assert sorted(first) == ["a", "b", "c"]
    assert cache.victims() == first


def test_keys_in_use_are_skipped_however_many_there_are(cache: Cache) -> None:
    cache.put(*(f"{number}," for number in range(100)))
    order = cache.policy.get_evict_candidates(cache.values, 100)
    for key in order[:99]:
        cache.values[key].can_evict = False
    assert cache.policy.get_evict_candidates(cache.values, 1) == [order[99]]
    cache.values[order[99]].can_evict = False
    assert cache.policy.get_evict_candidates(cache.values, 1) == []


def test_a_key_that_left_is_no_victim_and_may_leave_twice(cache: Cache) -> None:
    cache.put("a", "b")
    cache.policy.update_on_force_evict("a")
    cache.policy.update_on_force_evict("a")
    assert cache.victims() == "b"


def test_a_hit_on_an_absent_key_is_ignored(cache: Cache) -> None:
    cache.put("a")
    cache.policy.update_on_hit("z", cache.values)
    assert cache.victims() == "a"


def test_a_key_put_back_is_listed_once(cache: Cache) -> None:
    cache.put("a", "b")
    cache.put("a")
    assert sorted(cache.victims()) == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "after_hit", "after_touch", "after_put_again"),
    [
        ("LRU", "bca", "bca", "bca"),
        ("LFU", "bca", "bca", "bca"),
        ("FIFO", "abc", "abc", "abc"),
        ("MRU", "acb", "cba", "cba"),
    ],
)
def test_what_moves_a_key(
    name: str, after_hit: str, after_touch: str, after_put_again: str
) -> None:
    hit, touched, again = Cache(name), Cache(name), Cache(name)
    for cache in (hit, touched, again):
        cache.put("a", "b", "c")
    hit.policy.update_on_hit("a", hit.values)
    touched.policy.touch("a")
    again.put("a")
    assert (hit.victims(), touched.victims(), again.victims()) == (
        after_hit,
        after_touch,
        after_put_again,
    )


@pytest.mark.parametrize(
    ("name", "order"), [("LRU", "yxab"), ("LFU", "yxab"), ("FIFO", "abxy"), ("MRU", "yxba")]
)
def test_cold_keys_leave_first_and_the_newest_of_them_before_the_others(
    name: str, order: str
) -> None:
    cache = Cache(name)
    cache.put("a", "b")
    cache.put("x", "y", cold=True)
    assert cache.victims() == order


@pytest.mark.parametrize(("name", "order"), [("LRU", "cab"), ("LFU", "cab"), ("FIFO", "abc")])
def test_a_demoted_key_leaves_first_where_the_policy_has_recency(name: str, order: str) -> None:
    cache = Cache(name)
    cache.put("a", "b", "c")
    assert cache.policy.demote("c") == (name in ("LRU", "LFU"))
    assert cache.victims() == order


def test_lfu_prefers_to_keep_what_was_used_more_often() -> None:
    cache = Cache("LFU")
    cache.put("a", "b", "c")
    for key, uses in (("a", 3), ("b", 1), ("c", 2)):
        for _ in range(uses):
            cache.policy.touch(key)
    assert cache.victims() == "bca"


def test_an_unknown_policy_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'ARC'.*LRU, LFU, FIFO, MRU"):
        get_cache_policy("ARC")


@pytest.mark.parametrize("spelling", ["lru", "Lru", "LRU"])
def test_a_policy_name_may_be_of_any_case(spelling: str) -> None:
    policy: BaseCachePolicy[Any] = get_cache_policy(spelling)
    assert type(policy).__name__ == "LRUCachePolicy"
