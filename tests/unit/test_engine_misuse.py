"""Bad input and faults: a clear error or a miss, and never a pin, a reference or half a chunk."""

import pytest
import torch
from builders import CHUNK_TOKENS, order
from engine_builders import (
    AtomConnector,
    Prompt,
    assert_nothing_held,
    keep_from,
    retrieve,
    store,
)

from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.errors import UnsupportedFeatureError

N = CHUNK_TOKENS

NO_TOKENS = [
    pytest.param("text", id="text"),
    pytest.param(b"bytes", id="bytes"),
    pytest.param(7, id="a number"),
    pytest.param({1, 2}, id="a set"),
    pytest.param([1.5] * N, id="fractions"),
    pytest.param(["1"] * N, id="texts"),
    pytest.param([None] * N, id="nothings"),
    pytest.param([1 << 64] * N, id="too large"),
    pytest.param(torch.rand(N), id="a tensor of fractions"),
    pytest.param(torch.zeros(2, N, dtype=torch.int64), id="a tensor of two rows"),
    pytest.param(torch.zeros(N, dtype=torch.bool), id="a tensor of truths"),
    pytest.param(torch.zeros(N, dtype=torch.int64, device="meta"), id="a tensor without values"),
    pytest.param(torch.zeros(N, dtype=torch.int64).to_sparse(), id="a sparse tensor"),
]


@pytest.mark.parametrize("tokens", NO_TOKENS)
def test_tokens_of_a_wrong_type_are_named_and_nothing_happens(engine, connector, tokens):
    prompt = Prompt(1, 2 * N)
    store(engine, prompt, connector)
    connector.calls.clear()

    for call in (
        lambda: engine.store(tokens, block_ids=prompt.block_ids),
        lambda: engine.retrieve(tokens, block_ids=prompt.block_ids),
        lambda: engine.lookup(tokens, lookup_id="r", pin=True),
    ):
        with pytest.raises((ValueError, TypeError), match=r"[Tt]oken"):
            call()

    assert connector.calls == []
    assert engine.lookup(prompt.tokens) == 2 * N
    assert_nothing_held(engine)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (torch.ones(N, dtype=torch.bool), "16 entries for 64 tokens"),
        (keep_from(4 * N, N - 1), "not a multiple of the chunk size"),
        (~keep_from(4 * N, N), "not its first entries"),
        (keep_from(4 * N, N).view(1, -1), "one entry a token"),
        (keep_from(4 * N, N).view(8, 8), "one entry a token"),
        (keep_from(4 * N, N).tolist(), "one entry a token"),
        (7, "one entry a token"),
        (torch.ones(4 * N, dtype=torch.bool, device="meta"), "one entry a token"),
    ],
    ids=["too short", "half a chunk", "not a prefix", "row", "square", "list", "number", "meta"],
)
def test_a_mask_that_is_no_prefix_of_whole_chunks_is_refused(engine, connector, mask, words):
    prompt = Prompt(1, 4 * N)
    prompt.compute(connector)

    with pytest.raises(ValueError, match=words):
        engine.store(prompt.tokens, mask=mask, block_ids=prompt.block_ids)
    with pytest.raises(ValueError, match=words):
        engine.retrieve(prompt.tokens, mask=mask, block_ids=prompt.block_ids)

    assert (connector.calls, order(engine.storage_manager)) == ([], [])
    assert_nothing_held(engine)


@pytest.mark.parametrize("fail_at", [0, 1, 3])
def test_a_connector_that_raises_in_a_store_leaves_nothing_listed_and_nothing_held(
    engine, connector, fail_at
):
    prompt = Prompt(1, 4 * N)
    connector.fail_at = fail_at

    with pytest.raises(RuntimeError, match="the copy engine stopped"):
        store(engine, prompt, connector)

    assert engine.lookup(prompt.tokens) == 0
    assert_nothing_held(engine)
    connector.fail_at = None
    store(engine, prompt, connector)
    assert engine.lookup(prompt.tokens) == 4 * N


def test_a_connector_that_raises_while_a_prefix_is_extended_costs_only_the_extension(
    engine, connector
):
    prompt = Prompt(1, 6 * N)
    store(engine, prompt, connector, upto=3 * N)
    connector.fail_at = 1

    with pytest.raises(RuntimeError, match="the copy engine stopped"):
        store(engine, prompt, connector, first=3 * N)

    connector.fail_at = None
    assert engine.lookup(prompt.tokens) == 3 * N
    prompt.erase(connector)
    assert retrieve(engine, prompt) == 3 * N
    assert prompt.is_intact(connector, 3 * N)
    assert_nothing_held(engine)


@pytest.mark.parametrize("fail_at", [0, 2])
def test_a_connector_that_raises_in_a_retrieve_gives_every_reference_back(
    engine, connector, fail_at
):
    prompt = Prompt(1, 4 * N)
    store(engine, prompt, connector)
    engine.lookup(prompt.tokens, lookup_id="r", pin=True)
    connector.fail_at = fail_at

    with pytest.raises(RuntimeError, match="the copy engine stopped"):
        retrieve(engine, prompt)

    engine.lookup_unpin("r")
    assert_nothing_held(engine)
    connector.fail_at = None
    assert retrieve(engine, prompt) == 4 * N


class GreedyConnector(AtomConnector):
    """Empties the lists it is given, as one that pops its work would."""

    def batched_from_gpu(self, memory_objs, starts, ends, **kwargs):
        super().batched_from_gpu(memory_objs, starts, ends, **kwargs)
        memory_objs.clear()
        starts.clear()
        ends.clear()

    def batched_to_gpu(self, memory_objs, starts, ends, **kwargs):
        super().batched_to_gpu(memory_objs, starts, ends, **kwargs)
        memory_objs.clear()
        starts.clear()
        ends.clear()


def test_a_connector_may_empty_the_lists_it_is_given(make_engine):
    connector = GreedyConnector()
    engine = make_engine(connector=connector)
    prompt = Prompt(1, 4 * N)

    store(engine, prompt, connector)

    assert retrieve(engine, prompt) == 4 * N
    assert_nothing_held(engine)


def test_blocks_out_of_range_are_an_error_and_nothing_is_stored(engine, connector):
    prompt = Prompt(1, 4 * N)

    with pytest.raises(IndexError):
        engine.store(prompt.tokens, block_ids=[9_999] * 16)
    with pytest.raises(KeyError):
        engine.store(prompt.tokens)  # no block_ids at all

    assert engine.lookup(prompt.tokens) == 0
    assert_nothing_held(engine)


def test_a_lookup_id_used_for_two_prompts_holds_both_until_it_is_released(engine, connector):
    one, two = Prompt(1, 2 * N), Prompt(2, 3 * N, first_block=64)
    store(engine, one, connector)
    store(engine, two, connector)

    engine.lookup(one.tokens, lookup_id="r", pin=True)
    engine.lookup(two.tokens, lookup_id="r", pin=True)

    assert sum(map(len, engine.lookup_pins["r"].values())) == 5
    engine.lookup_unpin("r")
    assert engine.lookup_pins == {}
    assert_nothing_held(engine)


def test_a_lookup_that_pins_needs_an_id_of_the_right_type(engine):
    with pytest.raises(ValueError, match="needs a lookup_id"):
        engine.lookup([1] * N, pin=True)
    with pytest.raises(TypeError, match="lookup_id must be a str, not 7"):
        engine.lookup([1] * N, pin=True, lookup_id=7)
    with pytest.raises(TypeError, match="search_range must be a list"):
        engine.lookup([1] * N, search_range="LocalCPUBackend")
    engine.lookup_unpin(7)


def test_hashes_without_fitting_offsets_are_refused(engine):
    for call in (engine.lookup, engine.store):
        with pytest.raises(ValueError, match="Hashes need offsets"):
            call(hashes=[1, 2])
        with pytest.raises(ValueError, match="2 hashes have 1 offsets"):
            call(hashes=[1, 2], offsets=[N])
        with pytest.raises(ValueError, match="Either tokens or hashes"):
            call()
        for wrong in (0, -N, 2 * N, 1 << 70):
            with pytest.raises(ValueError, match=f"1 to {N} tokens, not {wrong}"):
                call(hashes=[1, 2], offsets=[N, wrong])


def test_a_chunk_removed_while_it_is_loaded_is_loaded_right_all_the_same(make_engine):
    class Saboteur(AtomConnector):
        def batched_to_gpu(self, memory_objs, starts, ends, **kwargs):
            engine.clear(prompt.tokens)
            store(engine, Prompt(2, 8 * N, first_block=64), self)
            super().batched_to_gpu(memory_objs, starts, ends, **kwargs)

    connector = Saboteur()
    engine = make_engine(connector=connector, num_chunks=8)
    prompt = Prompt(1, 4 * N)
    store(engine, prompt, connector)
    prompt.erase(connector)

    assert retrieve(engine, prompt) == 4 * N
    assert prompt.is_intact(connector, 4 * N)
    assert_nothing_held(engine)


def test_an_engine_without_a_connector_only_looks_up(make_engine):
    engine = make_engine(connector=None)

    assert engine.lookup([1] * N) == 0
    for call in (engine.store, engine.retrieve):
        with pytest.raises(RuntimeError, match="needs a GPU connector"):
            call([1] * N)


def test_settings_of_features_left_to_upstream_are_refused_also_when_assigned():
    config = LMCacheEngineConfig.from_defaults(chunk_size=N, max_local_cpu_size=0.001)
    config.use_layerwise = True

    with pytest.raises(UnsupportedFeatureError, match="use_layerwise=True asks for"):
        LMCacheEngineBuilder.get_or_create("refused", config, None, None, None, None)
    assert LMCacheEngineBuilder.get("refused") is None
