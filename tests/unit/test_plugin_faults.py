"""Storage plug-ins that lie: too many, too few, foreign or wrong answers cost a miss, no more."""

import pytest
import torch
from builders import CHUNK_TOKENS, CPU, gauges, keys, put_all
from engine_builders import Prompt, assert_nothing_held, retrieve, store
from fakes import OldPlugin

from lmcache.v1.memory_format import MemoryFormat
from lmcache.v1.pin_monitor import PinMonitor

N = CHUNK_TOKENS


class Liar(OldPlugin):
    """A plug-in whose next answers the test decides."""

    answer = None  # (call, function of the right answer)
    pins = 0
    fail_pin_at = None

    def _told(self, call, right):
        name, change = self.answer or (None, None)
        return change(right) if name == call else right

    def batched_get_blocking(self, keys):
        return self._told("get", [self.get_blocking(key) for key in keys])

    def batched_contains(self, keys, pin=False):
        return self._told("contains", super().batched_contains(keys, pin))

    def pin(self, key):
        if self.fail_pin_at is not None and self.pins >= self.fail_pin_at:
            raise OSError("the medium is gone")
        self.pins += key in self.data
        return key in self.data

    def unpin(self, key):
        self.pins -= 1
        return True


@pytest.fixture
def sm(make_manager):
    """Three chunks in the CPU tier, five more in the plug-in below it."""
    made = make_manager(num_chunks=16, tiers={"liar": Liar})
    put_all(made, keys(3), location=CPU)
    put_all(made, keys(5, first=4), location="liar")
    yield made
    made.storage_backends["liar"].answer = None


def nothing_held(sm):
    assert gauges(sm)["num_blocks"] == gauges(sm)["num_cached"]
    for obj in sm.local_cpu_backend.hot_cache.values():
        assert (obj.get_ref_count(), obj.pin_count) == (1, 0)


def interrupt(_right):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "change",
    [lambda got: got[:-1], lambda got: [*got, None], lambda got: None, lambda got: [1] * len(got)],
    ids=["too few", "too many", "no list", "no objects"],
)
def test_an_answer_to_a_get_that_is_none_costs_a_miss_and_holds_nothing(sm, change):
    sm.storage_backends["liar"].answer = ("get", change)

    prefix = []
    sm.get_prefix(keys(8), prefix)
    objs = sm.batched_get(keys(8))

    assert len(prefix) == 3
    assert [obj is not None for obj in objs] == [True] * 3 + [False] * 5
    for obj in [*prefix, *objs[:3]]:
        obj.ref_count_down()
    assert sm.gauges().tier_errors == 2


def test_an_interrupt_inside_a_tiers_get_gives_back_what_was_read_so_far(sm):
    sm.storage_backends["liar"].answer = ("get", interrupt)

    with pytest.raises(KeyboardInterrupt):
        sm.batched_get(keys(8))

    nothing_held(sm)


@pytest.mark.parametrize(
    "change",
    [lambda n: n + 1, lambda n: -1, lambda n: None, lambda n: [n], lambda n: 2.0, lambda n: True],
    ids=["too long", "negative", "nothing", "a list", "a fraction", "a truth"],
)
def test_an_answer_to_a_lookup_that_is_none_costs_a_miss(sm, change):
    sm.storage_backends["liar"].answer = ("contains", change)

    assert sm.batched_contains(keys(8), pin=True, owner="r") == (3, {CPU: keys(3)})
    sm.release_lookup("r")
    assert sm.storage_backends["liar"].pins == 0
    nothing_held(sm)


def test_pins_that_a_plug_in_took_before_it_failed_are_owned_and_released(sm):
    liar = sm.storage_backends["liar"]
    liar.fail_pin_at = 2

    PinMonitor.DestroyInstance()
    assert sm.batched_contains(keys(5, first=4), ["liar"], pin=True, owner="r")[0] == 2
    assert liar.pins == 2
    assert PinMonitor.GetOrCreate()._thread is not None  # they expire like any other
    sm.release_lookup("r")

    assert liar.pins == 0
    assert sm.lookup_pins() == {}
    nothing_held(sm)


class Shrinking(OldPlugin):
    """A plug-in that once gives objects of another size."""

    shrinks = False

    def _read_into_pool(self, stored):
        num_bytes = stored.numel() // 2 if self.shrinks else stored.numel()
        obj = self.local_cpu_backend.allocate(
            torch.Size([num_bytes]), torch.uint8, MemoryFormat.BINARY, busy_loop=False
        )
        obj.raw_tensor.copy_(stored[:num_bytes])
        return obj


def test_an_object_of_another_size_is_a_miss_that_is_never_listed(make_engine, connector):
    engine = make_engine(num_chunks=4)
    manager = engine.storage_manager
    manager.storage_backends["small"] = lower = Shrinking(
        local_cpu_backend=manager.local_cpu_backend
    )
    prompt = Prompt(1, 4 * N)
    store(engine, prompt, connector)
    manager.clear([CPU])
    lower.shrinks = True

    assert retrieve(engine, prompt) == 0
    assert manager.gauges().tier_errors > 0
    lower.shrinks = False
    prompt.erase(connector)

    assert retrieve(engine, prompt) == 4 * N
    assert prompt.is_intact(connector, 4 * N)
    assert_nothing_held(engine)


def test_a_listed_object_of_another_size_is_replaced_by_the_next_store(make_engine, connector):
    engine = make_engine(num_chunks=8)
    manager = engine.storage_manager
    prompt = Prompt(1, 3 * N)
    store(engine, prompt, connector)
    hashes = engine.token_database.split(prompt.tokens).hashes
    key = engine.token_database.make_keys(hashes)[1]
    foreign = manager.allocate(torch.Size([64]), torch.uint8, busy_loop=False)
    manager.batched_put([key], [foreign])
    assert retrieve(engine, prompt) == N

    store(engine, prompt, connector)
    prompt.erase(connector)

    assert retrieve(engine, prompt) == 3 * N
    assert prompt.is_intact(connector, 3 * N)
    assert_nothing_held(engine)


class Moody(OldPlugin):
    """A tier that takes owners and fails to count or to tell."""

    takes_pin_owner = True

    def batched_contains_for(self, keys, pin, owner):
        return 0

    def count_pinned_uses(self, owner):
        raise OSError("no")

    def pins_by_owner(self):
        raise OSError("no")

    def release_lookup(self, owner):
        return 0

    def release_pins(self, keys, owner):
        return 0


def test_a_tier_that_cannot_count_or_tell_pins_fails_no_lookup(make_manager):
    sm = make_manager(num_chunks=4, tiers={"moody": Moody})
    put_all(sm, keys(2), location=CPU)

    assert sm.batched_contains(keys(2), pin=True, owner="r")[0] == 2
    sm.touch_cache("r")

    assert sm.lookup_pins() == {"r": {CPU: keys(2)}}
    sm.release_lookup("r")
    assert sm.gauges().tier_errors >= 2
