"""`get_kv_events`: chunks announced once they can be read, and retracted when they are gone."""

import msgspec
import pytest
from builders import CHUNK_TOKENS, CPU
from engine_builders import Prompt, store

from lmcache.utils import CacheRemoveEvent, CacheStoreEvent
from lmcache.v1.engine import kv_event_log

N = CHUNK_TOKENS


@pytest.fixture
def engine(make_engine):
    """An engine that collects KV events, with a pool of four chunks."""
    made = make_engine(num_chunks=4, enable_kv_events=True)
    yield made
    made.get_kv_events()
    made._kv_events.check_integrity()


def told_hashes(engine, prompt):
    """The hashes of a prompt's chunks as events tell them."""
    return [h.to_bytes(16, "big") for h in engine.token_database.split(prompt.tokens).hashes]


def test_a_stored_chunk_is_announced_with_its_tokens_and_its_parent(engine, connector):
    prompt = Prompt(1, 2 * N)
    store(engine, prompt, connector)
    first, second = told_hashes(engine, prompt)

    events = engine.get_kv_events()

    def event(told, parent, tokens):
        return CacheStoreEvent([told], parent, tokens.tolist(), N, None, "cpu", None)

    expected = [event(first, None, prompt.tokens[:N]), event(second, first, prompt.tokens[N:])]
    assert sorted(events, key=lambda e: e.parent_block_hash or b"") == expected
    assert engine.get_kv_events() == []
    msgspec.msgpack.encode(events)


def test_a_refreshed_chunk_is_not_announced_again(engine, connector):
    store(engine, Prompt(1, 2 * N), connector)
    engine.get_kv_events()

    store(engine, Prompt(1, 2 * N), connector)

    assert engine.get_kv_events() == []


def test_a_chunk_that_left_is_retracted_and_announced_anew_when_it_is_back(engine, connector):
    one, two = Prompt(1, 2 * N), Prompt(2, 4 * N, first_block=64)
    store(engine, one, connector)
    engine.get_kv_events()

    store(engine, two, connector)
    store(engine, one, connector)

    kinds = [type(event) for event in engine.get_kv_events()]
    gone = told_hashes(engine, one)
    assert kinds.count(CacheRemoveEvent) == 4
    assert kinds.count(CacheStoreEvent) == 6
    engine.clear()
    assert {tuple(e.block_hashes) for e in engine.get_kv_events()} >= {(h,) for h in gone}


def test_events_come_in_the_order_in_which_things_happened(engine, connector):
    prompt = Prompt(1, N)
    for _ in range(2):
        store(engine, prompt, connector)
        engine.clear(prompt.tokens)

    kinds = [type(event).__name__ for event in engine.get_kv_events()]

    assert kinds == ["CacheStoreEvent", "CacheRemoveEvent"] * 2


def test_a_chunk_that_a_lower_tier_still_holds_is_not_retracted(make_engine, connector):
    engine = make_engine(
        num_chunks=4,
        enable_kv_events=True,
        storage_plugins=["mine"],
        extra_config={
            "storage_plugin.mine.module_path": "fakes",
            "storage_plugin.mine.class_name": "ReportingPlugin",
        },
    )
    prompt = Prompt(1, 2 * N)
    store(engine, prompt, connector)
    assert len(engine.get_kv_events()) == 2

    engine.clear(prompt.tokens, locations=[CPU])
    assert engine.get_kv_events() == []
    engine.clear(prompt.tokens)

    assert [type(e) for e in engine.get_kv_events()] == [CacheRemoveEvent] * 2


def test_a_store_that_failed_is_not_announced(engine, connector):
    connector.fail_at = 1
    with pytest.raises(RuntimeError):
        store(engine, Prompt(1, 2 * N), connector)

    assert engine.get_kv_events() == []


def test_images_put_beside_the_engine_are_not_told(engine):
    manager = engine.storage_manager
    key = engine.token_database.make_keys([12345])[0]
    from_pool = manager.allocate(
        engine.metadata.get_shapes()[0], engine.metadata.get_dtypes()[0], busy_loop=False
    )
    manager.batched_put([key], [from_pool])
    manager.remove(key)

    assert engine.get_kv_events() == []


def test_after_a_loss_the_events_still_end_in_what_is_there(make_engine, connector):
    engine = make_engine(num_chunks=4, enable_kv_events=True)
    engine._kv_events._subscription.close()
    engine._kv_events._subscription = engine.storage_manager.subscribe(capacity=3)
    known = set()
    for seed in range(1, 12):
        store(engine, Prompt(seed, 2 * N, first_block=16 * seed), connector)
        for event in engine.get_kv_events() if seed % 4 == 0 else []:
            (told,) = event.block_hashes
            (known.add if isinstance(event, CacheStoreEvent) else known.remove)(told)
    for event in engine.get_kv_events():
        (told,) = event.block_hashes
        (known.add if isinstance(event, CacheStoreEvent) else known.remove)(told)

    residents = engine.storage_manager.snapshot().residents
    assert known == {key.chunk_hash.to_bytes(16, "big") for key in residents}


def test_events_behind_a_loss_that_the_snapshot_has_told_are_not_told_again(make_engine, connector):
    engine = make_engine(num_chunks=4, enable_kv_events=True)
    engine._kv_events._subscription.close()
    engine._kv_events._subscription = engine.storage_manager.subscribe(capacity=2)
    one, two = Prompt(1, N), Prompt(2, N, first_block=64)
    store(engine, one, connector)
    assert len(engine.get_kv_events()) == 1

    store(engine, two, connector)  # this event is the one that is lost
    engine.clear(one.tokens)
    store(engine, one, connector)

    assert [event.block_hashes for event in engine.get_kv_events()] == [told_hashes(engine, two)]
    assert engine.get_kv_events() == []


def test_after_the_engine_was_closed_nothing_more_is_told(make_engine, connector):
    engine = make_engine(enable_kv_events=True)
    store(engine, Prompt(1, 2 * N), connector)
    engine.get_kv_events()
    store(engine, Prompt(2, 2 * N, first_block=64), connector)

    engine.close()

    assert engine.get_kv_events() == []


def test_hashes_of_64_bits_are_told_as_numbers(make_engine, connector):
    engine = make_engine(enable_kv_events=True, pre_caching_hash_algorithm="builtin")
    prompt = Prompt(1, N)
    store(engine, prompt, connector)

    (event,) = engine.get_kv_events()

    assert event.block_hashes == list(engine.token_database.split(prompt.tokens).hashes)


def test_without_the_setting_nothing_is_collected(make_engine, connector):
    engine = make_engine()
    store(engine, Prompt(1, N), connector)

    assert engine.get_kv_events() == []


def test_descriptions_nobody_asks_for_do_not_grow_without_bound(make_engine, connector):
    engine = make_engine(num_chunks=4, enable_kv_events=True)
    log = engine._kv_events
    chunks = engine.token_database.split([1] * N)
    most = kv_event_log.MAX_DESCRIBED
    for number in range(most + 100):
        log.describe(engine.token_database.make_keys([number]), [0], chunks, None)

    assert len(log._described) == most
