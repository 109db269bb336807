"""Faults of engines that users reported: each kind must not exist here.

Each docstring begins with the id of the report. A chunk has 16 tokens.
"""

import pytest
from builders import CHUNK_TOKENS, evict
from engine_builders import Prompt, assert_nothing_held, keep_from, retrieve, store
from fakes import FakeClock

from lmcache.v1.pin_monitor import PinMonitor
from lmcache.v1.stats_monitor import StatsMonitor
from lmcache.v1.storage_backend.touch import TouchVerdict

N = CHUNK_TOKENS


def hashes_of(engine, prompt):
    return list(engine.token_database.split(prompt.tokens).hashes)


def keys_of(engine, prompt):
    return engine.token_database.make_keys(hashes_of(engine, prompt))


def num_pins(engine):
    return engine.storage_manager.local_cpu_backend.pins.num_pins


@pytest.mark.parametrize("refresh", ["lookup", "retrieve", "store"])
def test_whatever_uses_a_prefix_its_tail_leaves_before_its_head(make_engine, connector, refresh):
    """H02: the head of a prefix was evicted before its tail, which can never be hit then."""
    engine = make_engine(num_chunks=12)
    prompt, other = Prompt(1, 8 * N), Prompt(2, 4 * N, first_block=64)
    store(engine, prompt, connector)
    store(engine, other, connector)

    if refresh == "lookup":
        engine.lookup(prompt.tokens, lookup_id="r", pin=True)
        engine.lookup_unpin("r")
    elif refresh == "retrieve":
        retrieve(engine, prompt)
    else:
        store(engine, prompt, connector)

    gone = evict(engine.storage_manager, 12, nbytes=4096)
    assert gone == [*reversed(hashes_of(engine, other)), *reversed(hashes_of(engine, prompt))]


def test_a_prefix_used_in_part_keeps_its_head_longest(make_engine, connector):
    """H02: a request that hits the first chunks only made them leave after the tail's orphans."""
    engine = make_engine(num_chunks=8)
    prompt = Prompt(1, 8 * N)
    store(engine, prompt, connector)

    engine.retrieve(prompt.tokens[: 3 * N], block_ids=prompt.block_ids)

    assert evict(engine.storage_manager, 8, nbytes=4096) == hashes_of(engine, prompt)[::-1]


def test_a_thousand_lookups_without_a_retrieve_leave_no_pin(engine, connector):
    """H09: lookup pinned, no retrieve followed, nobody unpinned: the hit rate decayed to zero."""
    prompt = Prompt(1, 4 * N)
    store(engine, prompt, connector)

    for number in range(1000):
        assert engine.lookup(prompt.tokens, lookup_id=str(number), pin=True) == 4 * N
        engine.lookup_unpin(str(number))

    assert (num_pins(engine), engine.lookup_pins) == (0, {})
    assert_nothing_held(engine)
    assert len(evict(engine.storage_manager, 4, nbytes=4096)) == 4


def test_lookups_nobody_ever_releases_end_with_the_time_out(engine, connector):
    """H09, H10: pins of requests that vanished stayed until an unrelated lookup came along."""
    prompt = Prompt(1, 4 * N)
    store(engine, prompt, connector)
    clock = FakeClock()
    engine.storage_manager.local_cpu_backend.pins.clock = clock
    for number in range(100):
        engine.lookup(prompt.tokens, lookup_id=str(number), pin=True)

    clock.advance(engine.pin_timeout_seconds)
    PinMonitor.GetOrCreate().check_now()  # what its thread does, with no further traffic

    assert (num_pins(engine), engine.lookup_pins) == (0, {})
    assert_nothing_held(engine)
    engine.lookup_unpin("0")


def test_a_request_aborted_between_lookup_and_retrieve_is_released_twice_without_harm(
    engine, connector
):
    """H10: cleaning up after an abort hung off the path of requests that succeed."""
    prompt = Prompt(1, 2 * N)
    store(engine, prompt, connector)
    engine.lookup(prompt.tokens, lookup_id="aborted", pin=True)
    engine.lookup(prompt.tokens, lookup_id="alive", pin=True)

    engine.lookup_unpin("aborted")
    engine.lookup_unpin("aborted")

    assert num_pins(engine) == 2
    engine.lookup_unpin("alive")
    assert_nothing_held(engine)


def test_a_retrieve_takes_no_pin_that_a_lookup_holds(engine, connector):
    """H11: retrieve consumed the lookup's pin, and the unpin after it another request's."""
    prompt = Prompt(1, 2 * N)
    store(engine, prompt, connector)
    for request in "AB":
        engine.lookup(prompt.tokens, lookup_id=request, pin=True)

    assert retrieve(engine, prompt) == 2 * N
    assert num_pins(engine) == 4
    for _ in range(3):
        engine.lookup_unpin("A")

    objs = []
    engine.storage_manager.hold_hot_prefix(keys_of(engine, prompt), objs)
    assert [(obj.pin_count, obj.get_ref_count()) for obj in objs] == [(1, 2)] * 2
    for obj in objs:
        obj.ref_count_down()
    store(engine, Prompt(2, 16 * N, first_block=128), connector)
    assert engine.lookup(prompt.tokens) == 2 * N
    engine.lookup_unpin("B")
    assert_nothing_held(engine)


def test_an_unfull_last_chunk_is_neither_stored_nor_found(engine, connector):
    """H25: an unfull chunk was saved, and later loaded over live KV."""
    prompt = Prompt(1, 40)
    prompt.compute(connector)

    engine.store(prompt.tokens, block_ids=prompt.block_ids)
    assert engine.lookup(prompt.tokens) == 32
    engine.clear()

    engine.store(prompt.tokens[:N], block_ids=prompt.block_ids)
    assert engine.lookup(prompt.tokens) == N
    connector.calls.clear()
    engine.store(prompt.tokens[: N + 1], mask=keep_from(N + 1, N), block_ids=prompt.block_ids)
    assert connector.calls == []
    assert engine.lookup(prompt.tokens) == N


def test_a_rank_that_lost_a_chunk_says_gone_and_raises_nothing(make_engine, connector):
    """H33: ranks whose pools evicted on their own ended in a fatal error."""
    ranks = [make_engine(), make_engine()]
    prompt = Prompt(1, 2 * N)
    for engine in ranks:
        store(engine, prompt, connector)
    ranks[1].clear(prompt.tokens[:N])

    verdicts = [list(e.storage_manager.touch(keys_of(e, prompt))) for e in ranks]

    assert verdicts[0] == [TouchVerdict.REFRESHED] * 2
    assert verdicts[1] == [TouchVerdict.GONE, TouchVerdict.REFRESHED]
    assert min(engine.lookup(prompt.tokens) for engine in ranks) == 0
    assert retrieve(ranks[1], prompt) == 0


def test_the_hit_rate_is_what_was_hit_of_what_was_asked(make_engine, connector):
    """H42: the hit-rate metric was always 1, or its counters stuck at 0."""
    monitor = StatsMonitor()
    engine = make_engine(stats=monitor)
    prompt = Prompt(1, 4 * N)
    store(engine, prompt, connector, upto=2 * N)
    monitor.get_stats_and_clear()

    engine.lookup(prompt.tokens, lookup_id="r", pin=True)
    assert (engine.gauges().cpu.num_pins, engine.gauges().cpu.num_pinned_objs) == (2, 2)
    retrieve(engine, prompt)
    engine.lookup_unpin("r")
    store(engine, prompt, connector)

    stats = monitor.get_stats_and_clear()
    assert stats.interval_lookup_tokens == stats.interval_requested_tokens == 4 * N
    assert stats.interval_lookup_hits == stats.interval_hit_tokens == 2 * N
    assert (stats.lookup_hit_rate, stats.retrieve_hit_rate) == (0.5, 0.5)
    assert stats.interval_stored_tokens == 2 * N
    assert (engine.gauges().cpu.num_pins, engine.gauges().cpu.num_pinned_objs) == (0, 0)
    engine.clear()
    assert engine.gauges().cpu.num_memory_objs == engine.gauges().cpu.used_bytes == 0
