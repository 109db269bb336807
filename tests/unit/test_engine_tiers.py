"""Engines over several tiers: where chunks go, who serves them, and what counts as resident."""

import threading

import pytest
from builders import CHUNK_TOKENS, CPU
from engine_builders import Prompt, assert_nothing_held, retrieve, store
from fakes import ReportingPlugin

from lmcache.v1.errors import ConfigError

N = CHUNK_TOKENS


def with_plugin(make_engine, **settings):
    return make_engine(
        storage_plugins=["mine"],
        extra_config={
            "storage_plugin.mine.module_path": "fakes",
            "storage_plugin.mine.class_name": "ReportingPlugin",
        },
        **settings,
    )


def test_a_lower_tier_serves_what_the_cpu_tier_lost(make_engine, connector):
    engine = with_plugin(make_engine, num_chunks=4)
    prompt = Prompt(1, 4 * N)
    store(engine, prompt, connector)
    store(engine, Prompt(2, 3 * N, first_block=64), connector)
    lower = engine.storage_manager.storage_backends["mine"]
    assert isinstance(lower, ReportingPlugin)
    prompt.erase(connector)

    assert engine.lookup(prompt.tokens, lookup_id="r", pin=True) == 4 * N
    assert set(engine.lookup_pins["r"]) == {CPU, "mine"}
    assert retrieve(engine, prompt) == 4 * N
    assert prompt.is_intact(connector, 4 * N)
    engine.lookup_unpin("r")
    assert engine.lookup_pins == {}


def test_a_chunk_that_only_a_lower_tier_holds_is_stored_again_into_the_cpu_tier(
    make_engine, connector
):
    engine = with_plugin(make_engine, num_chunks=4)
    prompt = Prompt(1, 2 * N)
    store(engine, prompt, connector)
    store(engine, Prompt(2, 4 * N, first_block=64), connector)
    connector.calls.clear()

    store(engine, prompt, connector)

    assert connector.calls[0][1] == [0, N]
    assert engine.lookup(prompt.tokens, search_range=[CPU]) == 2 * N


def test_a_store_location_decides_where_chunks_go_and_what_counts_as_resident(
    make_engine, connector
):
    engine = with_plugin(make_engine, store_location="mine")
    prompt = Prompt(1, 2 * N)

    store(engine, prompt, connector)
    store(engine, prompt, connector)

    assert [call[1] for call in connector.calls] == [[0, N]]
    assert engine.lookup(prompt.tokens, search_range=[CPU]) == 0
    assert engine.lookup(prompt.tokens) == 2 * N
    assert_nothing_held(engine)


def test_retrieve_locations_restrict_lookups_and_loads(make_engine, connector):
    engine = with_plugin(make_engine, retrieve_locations=["mine"])
    prompt = Prompt(1, 2 * N)
    prompt.compute(connector)
    engine.store(prompt.tokens, block_ids=prompt.block_ids)
    engine.storage_manager.clear(["mine"])
    lower = engine.storage_manager.storage_backends["mine"]
    lower.data.clear()

    assert engine.lookup(prompt.tokens) == 0
    assert retrieve(engine, prompt) == 0
    assert engine.lookup(prompt.tokens, search_range=[CPU]) == 2 * N


def test_an_unknown_store_location_is_refused_and_an_unknown_retrieve_location_warned_about(
    make_engine, caplog
):
    with pytest.raises(ConfigError, match="store_location='Nowhere' names no tier"):
        make_engine(store_location="Nowhere")
    make_engine(retrieve_locations=["Nowhere"])
    assert "retrieve_locations names 'Nowhere'" in caplog.text


def test_a_post_init_that_fails_leaves_no_event_loop_of_its_plugins(make_engine):
    def loops():
        return [t for t in threading.enumerate() if t.name == "storage-manager-event-loop"]

    before = loops()
    with pytest.raises(ConfigError, match="store_location='Nowhere' names no tier"):
        with_plugin(make_engine, store_location="Nowhere")

    assert loops() == before
    with_plugin(make_engine)
    assert len(loops()) == len(before) + 1
