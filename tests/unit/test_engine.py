"""The engine's operations: what they store, load, find, refresh and give up."""

import pytest
import torch
from builders import CHUNK_TOKENS, evict, order
from engine_builders import (
    AtomConnector,
    Prompt,
    assert_nothing_held,
    keep_from,
    retrieve,
    store,
)

from lmcache.v1.errors import UnsupportedFeatureError

N = CHUNK_TOKENS


def chunk_order(engine):
    """Positions of the resident chunks of the prompts known to the test, coldest first."""
    return order(engine.storage_manager)


def hashes_of(engine, prompt):
    return list(engine.token_database.split(prompt.tokens).hashes)


@pytest.mark.parametrize("as_list", [False, True])
def test_what_was_stored_is_found_and_loaded_bit_for_bit(engine, connector, as_list):
    prompt = Prompt(1, 8 * N)
    store(engine, prompt, connector)
    prompt.erase(connector)
    tokens = prompt.tokens.tolist() if as_list else prompt.tokens

    assert engine.lookup(tokens) == 8 * N
    loaded = engine.retrieve(tokens, block_ids=prompt.block_ids)

    assert loaded.dtype == torch.bool and loaded.device.type == "cpu" and bool(loaded.all())
    assert prompt.is_intact(connector, 8 * N)
    assert_nothing_held(engine)


def test_a_miss_is_an_answer_of_nothing(engine, connector):
    prompt = Prompt(1, 4 * N)

    assert engine.lookup(prompt.tokens) == 0
    assert not engine.retrieve(prompt.tokens, block_ids=prompt.block_ids).any()
    assert connector.calls == []


def test_an_unfull_tail_is_left_out_by_default(engine, connector):
    prompt = Prompt(1, 2 * N + 8)
    store(engine, prompt, connector)

    assert engine.lookup(prompt.tokens) == 2 * N
    assert retrieve(engine, prompt) == 2 * N
    assert connector.calls[0][1:3] == ([0, N], [N, 2 * N])


def test_an_unfull_tail_is_stored_where_the_setting_says_so(make_engine, connector):
    engine = make_engine(save_unfull_chunk=True)
    prompt = Prompt(1, 2 * N + 8)
    store(engine, prompt, connector)
    prompt.erase(connector)

    assert engine.lookup(prompt.tokens) == 2 * N + 8
    assert retrieve(engine, prompt) == 2 * N + 8
    assert prompt.is_intact(connector, 2 * N + 8)


def test_only_the_common_prefix_of_two_prompts_hits(engine, connector):
    prompt = Prompt(1, 4 * N)
    store(engine, prompt, connector)
    other = prompt.tokens.clone()
    other[2 * N] += 1

    assert engine.lookup(other) == 2 * N


def test_a_resident_chunk_is_refreshed_and_not_copied_again(engine, connector):
    prompt, other = Prompt(1, 3 * N), Prompt(2, 2 * N, first_block=64)
    store(engine, prompt, connector)
    store(engine, other, connector)
    connector.calls.clear()

    store(engine, prompt, connector)

    assert connector.calls == []
    expected = [*reversed(hashes_of(engine, other)), *reversed(hashes_of(engine, prompt))]
    assert chunk_order(engine) == expected
    assert_nothing_held(engine)


def test_a_store_copies_only_what_is_missing_in_the_middle(engine, connector):
    prompt = Prompt(1, 4 * N)
    store(engine, prompt, connector)
    engine.storage_manager.remove(
        engine.token_database.make_keys(hashes_of(engine, prompt)[1:2])[0]
    )
    connector.calls.clear()

    store(engine, prompt, connector)

    assert connector.calls[0][1:3] == ([N], [2 * N])
    prompt.erase(connector)
    assert retrieve(engine, prompt) == 4 * N
    assert prompt.is_intact(connector, 4 * N)


def test_the_mask_keeps_its_prefix_from_being_copied_and_loaded(engine, connector):
    prompt = Prompt(1, 4 * N)
    store(engine, prompt, connector, upto=2 * N)
    store(engine, prompt, connector, first=2 * N)
    assert [call[1] for call in connector.calls] == [[0, N], [2 * N, 3 * N]]
    prompt.erase(connector)

    loaded = engine.retrieve(prompt.tokens, mask=keep_from(4 * N, N), block_ids=prompt.block_ids)

    assert loaded.tolist() == [False] * N + [True] * 3 * N
    assert bool((connector.blocks[prompt.block_ids[:4]] == 0xEE).all())


def test_the_masked_prefix_is_not_stored_even_where_it_is_missing(engine, connector):
    prompt = Prompt(1, 4 * N)

    store(engine, prompt, connector, first=2 * N)

    assert connector.calls[0][1] == [2 * N, 3 * N]
    assert engine.lookup(prompt.tokens) == 0


@pytest.mark.parametrize("num_calls", [1, 4, 16])
def test_the_head_of_a_prompt_outlives_its_tail_however_many_calls_stored_it(
    make_engine, connector, num_calls
):
    engine = make_engine(num_chunks=32)
    prompt, other = Prompt(1, 16 * N), Prompt(2, 4 * N, first_block=128)
    store(engine, other, connector)
    step = 16 // num_calls * N
    for end in range(step, 16 * N + 1, step):
        store(engine, prompt, connector, first=end - step, upto=end)

    gone = evict(engine.storage_manager, 20, nbytes=4096)

    assert gone == [*reversed(hashes_of(engine, other)), *reversed(hashes_of(engine, prompt))]


@pytest.mark.parametrize("num_calls", [1, 5, 20])
def test_a_prompt_larger_than_the_pool_keeps_its_head(make_engine, connector, num_calls):
    engine = make_engine(num_chunks=8)
    store(engine, Prompt(2, 4 * N, first_block=128), connector)
    prompt = Prompt(1, 20 * N)
    step = 20 // num_calls * N
    for end in range(step, 20 * N + 1, step):
        store(engine, prompt, connector, first=end - step, upto=end)

    assert engine.lookup(prompt.tokens) == 8 * N
    prompt.erase(connector)
    assert retrieve(engine, prompt) == 8 * N
    assert prompt.is_intact(connector, 8 * N)
    assert_nothing_held(engine)


def test_orphans_behind_a_gap_make_room_for_the_head(make_engine, connector):
    engine = make_engine(num_chunks=8)
    prompt = Prompt(1, 8 * N)
    store(engine, prompt, connector)
    keys = engine.token_database.make_keys(hashes_of(engine, prompt))
    longer = Prompt(1, 8 * N)
    engine.storage_manager.batched_remove(keys[:2])
    engine.storage_manager.touch(keys[2:])
    store(engine, Prompt(3, 2 * N, first_block=128), connector)

    store(engine, longer, connector)

    assert engine.lookup(longer.tokens) == 8 * N


def test_a_store_that_finds_no_room_stores_nothing_and_evicts_nothing(make_engine, connector):
    engine = make_engine(num_chunks=4)
    prompt = Prompt(1, 4 * N)
    store(engine, prompt, connector)
    assert engine.lookup(prompt.tokens, lookup_id="r", pin=True) == 4 * N

    store(engine, Prompt(2, 2 * N, first_block=64), connector)

    assert engine.lookup(prompt.tokens) == 4 * N
    engine.lookup_unpin("r")
    assert_nothing_held(engine)


def test_every_extra_keyword_reaches_the_connector(engine, connector):
    prompt, event = Prompt(1, N), object()
    prompt.compute(connector)
    extra = {
        "block_ids": prompt.block_ids,
        "req_id": 7,
        "producer_event": event,
        "request_configs": {"lmcache.tag.user": "a"},
        "transfer_spec": None,
    }

    engine.store(prompt.tokens, mask=None, **extra)
    engine.retrieve(prompt.tokens, **extra)

    assert [call[3] for call in connector.calls] == [extra, extra]
    assert connector.calls[0][3]["producer_event"] is event


def test_tags_of_a_request_are_part_of_its_keys(engine, connector):
    prompt = Prompt(1, N)
    prompt.compute(connector)
    tags = {"lmcache.tag.user": "a"}
    engine.store(prompt.tokens, block_ids=prompt.block_ids, request_configs=tags)

    assert engine.lookup(prompt.tokens) == 0
    assert engine.lookup(prompt.tokens, request_configs=tags) == N
    assert engine.lookup(prompt.tokens, request_configs={"lmcache.tag.user": "b"}) == 0
    assert engine.clear(prompt.tokens, request_configs=tags) == 1
    assert engine.lookup(prompt.tokens, request_configs=tags) == 0


def test_hashes_stand_in_for_tokens(engine, connector):
    prompt = Prompt(1, 3 * N)
    prompt.compute(connector)
    hashes = hashes_of(engine, prompt)

    engine.store(hashes=hashes, offsets=[N] * 3, block_ids=prompt.block_ids)

    assert engine.lookup(prompt.tokens) == 3 * N
    assert engine.lookup(hashes=hashes[:2], offsets=[N] * 2) == 2 * N


def test_clear_forgets_a_prompt_or_everything_nobody_holds(engine, connector):
    prompt, other = Prompt(1, 3 * N), Prompt(2, 2 * N, first_block=64)
    store(engine, prompt, connector)
    store(engine, other, connector)

    assert engine.clear(prompt.tokens) == 3
    assert (engine.lookup(prompt.tokens), engine.lookup(other.tokens)) == (0, 2 * N)
    engine.lookup(other.tokens[:N], lookup_id="r", pin=True)
    engine.clear()
    assert engine.lookup(other.tokens) == N
    engine.lookup_unpin("r")
    assert engine.clear(locations=["nowhere"]) == 0


def test_frozen_the_engine_stores_nothing_and_still_loads(engine, connector):
    prompt, other = Prompt(1, 2 * N), Prompt(2, 2 * N, first_block=64)
    store(engine, prompt, connector)

    engine.freeze(True)
    store(engine, other, connector)

    assert engine.is_frozen()
    assert (engine.lookup(prompt.tokens), engine.lookup(other.tokens)) == (2 * N, 0)
    engine.freeze(False)
    store(engine, other, connector)
    assert engine.lookup(other.tokens) == 2 * N


def test_with_the_hot_cache_off_and_no_other_tier_nothing_is_copied(engine, connector):
    store(engine, Prompt(1, 2 * N), connector)
    connector.calls.clear()

    engine.set_hot_cache(False)
    store(engine, Prompt(2, 2 * N), connector)

    assert connector.calls == []
    assert not engine.is_hot_cache_enabled()
    engine.set_hot_cache(True)
    store(engine, Prompt(2, 2 * N), connector)
    assert engine.lookup(Prompt(2, 2 * N).tokens) == 2 * N


def test_an_unhealthy_engine_answers_like_a_miss_and_says_so_once(engine, connector, caplog):
    class Monitor:
        healthy = False

        def is_healthy(self):
            return self.healthy

    prompt, monitor = Prompt(1, 2 * N), Monitor()
    store(engine, prompt, connector)
    engine.set_health_monitor(monitor)
    connector.calls.clear()

    store(engine, Prompt(2, 2 * N, first_block=64), connector)
    assert engine.lookup(prompt.tokens) == 0
    assert not engine.retrieve(prompt.tokens, block_ids=prompt.block_ids).any()

    assert connector.calls == []
    assert caplog.text.count("the engine is unhealthy") == 1
    monitor.healthy = True
    assert engine.lookup(prompt.tokens) == 2 * N
    assert engine.health() == 0


def test_an_engine_that_failed_to_start_answers_like_a_miss(engine):
    engine.mark_init_failed("no device")

    assert not engine.is_healthy()
    assert engine.lookup(Prompt(1, N).tokens) == 0


def test_before_post_init_an_operation_says_what_is_missing(make_engine, connector):
    engine = make_engine()
    fresh = type(engine)(
        engine.config, engine.metadata, engine.token_database, connector, None, None
    )

    assert fresh.storage_manager is None
    for call in ("store", "retrieve", "lookup"):
        with pytest.raises(RuntimeError, match=rf"{call} needs post_init\(\)"):
            getattr(fresh, call)(Prompt(1, N).tokens)
    fresh.lookup_unpin("nobody")
    assert fresh.lookup_pins == {}
    fresh.close()


def test_closed_the_engine_answers_like_a_miss(engine, connector):
    prompt = Prompt(1, 2 * N)
    store(engine, prompt, connector)
    connector.calls.clear()

    engine.close()
    engine.close()

    assert engine.lookup(prompt.tokens) == 0
    assert not engine.retrieve(prompt.tokens, block_ids=prompt.block_ids).any()
    store(engine, prompt, connector)
    assert connector.calls == []
    assert not engine.is_healthy()
    with pytest.raises(RuntimeError, match="closed engine"):
        engine.post_init()


def test_the_effective_pin_time_out_can_be_read(make_engine):
    assert make_engine(pin_timeout_sec=12.5).pin_timeout_seconds == 12.5


def test_calls_of_features_left_to_upstream_say_so(engine):
    for call in (
        "store_layer",
        "retrieve_layer",
        "async_lookup_and_prefetch",
        "cleanup_memory_objs",
        "move",
        "compress",
        "decompress",
    ):
        with pytest.raises(UnsupportedFeatureError, match=call):
            getattr(engine, call)([1, 2], "x")
    for call in ("layerwise_batched_get", "async_lookup_and_prefetch"):
        with pytest.raises(UnsupportedFeatureError, match=call):
            getattr(engine.storage_manager, call)([[1]], "x")
    with pytest.raises(UnsupportedFeatureError, match="async_lookup_server"):
        type(engine)(
            engine.config, engine.metadata, engine.token_database, None, None, None
        ).post_init(async_lookup_server=object())


def test_two_engines_of_a_process_do_not_share_chunks(make_engine):
    one, two = AtomConnector(), AtomConnector()
    first, second = make_engine(connector=one), make_engine(connector=two)
    prompt = Prompt(1, 4 * N)
    store(first, prompt, one)

    assert (first.lookup(prompt.tokens), second.lookup(prompt.tokens)) == (4 * N, 0)
    store(second, prompt, two)
    prompt.erase(one)
    prompt.erase(two)
    assert retrieve(first, prompt) == 4 * N
    assert prompt.is_intact(one, 4 * N)
    assert not prompt.is_intact(two, 4 * N)
