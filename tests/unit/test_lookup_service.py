"""The lookup service: hits over ranks, pins, silent and restarted servers, mismatched settings."""

import os
import threading

import pytest
from builders import CHUNK_TOKENS, make_config, make_metadata, until
from engine_builders import Prompt, assert_nothing_held, store
from fakes import FakeClock

from lmcache.v1.errors import ConfigError
from lmcache.v1.lookup_client import LookupClientFactory
from lmcache.v1.lookup_client.lookup_server import LMCacheLookupServer

N = CHUNK_TOKENS
SHORT_MS = 150
LONG_MS = 30_000  # long enough for a reply on the busiest machine


def test_the_least_of_the_ranks_answers_counts(ranks, connect):
    """H33: ranks that evicted on their own reported different hits, a fatal error."""
    engines, connectors = ranks(3)
    prompt = Prompt(1, 4 * N)
    for engine, connector in zip(engines, connectors, strict=True):
        store(engine, prompt, connector)
    engines[1].clear(prompt.tokens)
    store(engines[1], Prompt(1, 2 * N), connectors[1])

    client = connect(world_size=3)

    assert client.lookup(prompt.tokens.tolist(), "r") == 2 * N
    assert [sum(map(len, e.lookup_pins["r"].values())) for e in engines] == [4, 2, 4]
    for engine in engines:
        engine.lookup_unpin("r")
        assert_nothing_held(engine)


def test_repeated_lookups_of_a_waiting_request_pin_and_use_a_chunk_once(ranks, connect):
    (engine,), (connector,) = ranks(1, cache_policy="LFU")
    prompt, other = Prompt(1, N), Prompt(2, N, first_block=64)
    store(engine, prompt, connector)
    store(engine, other, connector)
    client = connect()
    for _ in range(5):
        assert client.lookup(prompt.tokens, "waiting") == N
    held = []
    hashes = engine.token_database.split(prompt.tokens).hashes
    engine.storage_manager.hold_hot_prefix(engine.token_database.make_keys(hashes), held)
    (obj,) = held
    assert obj.pin_count == 1
    obj.ref_count_down()

    engine.lookup_unpin("waiting")
    for _ in range(2):
        store(engine, other, connector)

    hot = list(engine.storage_manager.local_cpu_backend.hot_cache)
    assert hot[0].chunk_hash == engine.token_database.split(prompt.tokens).hashes[0]
    assert_nothing_held(engine)


def test_an_answer_is_remembered_until_it_is_cleared(ranks, connect):
    (engine,), (connector,) = ranks(1)
    store(engine, Prompt(1, 2 * N), connector)
    client = connect()
    assert client.lookup_cache("r") == -1

    client.lookup(Prompt(1, 2 * N).tokens, "r")

    assert client.lookup_cache("r") == 2 * N
    client.clear_lookup_status("r")
    assert client.lookup_cache("r") == -1
    assert client.supports_producer_reuse()
    engine.lookup_unpin("r")


def test_a_prompt_without_a_whole_chunk_asks_nobody(connect):
    client = connect(timeout_ms=SHORT_MS)

    assert client.lookup([1] * (N - 1), "r") == 0
    assert client.silent_ranks == []


def test_a_hit_below_the_minimum_is_none(ranks, connect):
    (engine,), (connector,) = ranks(1)
    store(engine, Prompt(1, 2 * N), connector)

    assert connect(min_retrieve_tokens=2 * N + 1).lookup(Prompt(1, 2 * N).tokens, "r") == 0
    assert connect(min_retrieve_tokens=2 * N).lookup(Prompt(1, 2 * N).tokens, "r") == 2 * N
    engine.lookup_unpin("r")


def test_tags_travel_with_the_lookup(ranks, connect):
    (engine,), (connector,) = ranks(1)
    prompt, tags = Prompt(1, N), {"lmcache.tag.user": "a", "other": [1, {"x": None}]}
    prompt.compute(connector)
    engine.store(prompt.tokens, block_ids=prompt.block_ids, request_configs=tags)
    client = connect()

    assert client.lookup(prompt.tokens, "r") == 0
    assert client.lookup(prompt.tokens, "r", request_configs=tags) == N
    engine.lookup_unpin("r")
    with pytest.raises(ValueError, match="request_configs cannot be sent"):
        client.lookup(prompt.tokens, "r", request_configs={"x": object()})


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "builtin"])
def test_hashes_of_every_algorithm_pass_the_wire(ranks, connect, algorithm):
    (engine,), (connector,) = ranks(1, pre_caching_hash_algorithm=algorithm)
    prompt = Prompt(1, 8 * N)
    store(engine, prompt, connector)

    client = connect(pre_caching_hash_algorithm=algorithm)

    assert client.lookup(prompt.tokens, "r") == 8 * N
    engine.lookup_unpin("r")


@pytest.mark.parametrize(
    "other", [{"pre_caching_hash_algorithm": "builtin"}, {"chunk_size": 2 * N}]
)
def test_a_client_with_other_settings_finds_nothing_and_says_which(ranks, connect, caplog, other):
    (engine,), (connector,) = ranks(1)
    store(engine, Prompt(1, 4 * N), connector)
    client = connect(**other)

    for _ in range(3):
        assert client.lookup(Prompt(1, 4 * N).tokens, "r") == 0

    (name, value) = next(iter(other.items()))
    assert caplog.text.count(f"{name}={value}") == 1
    assert "give both processes the same LMCACHE_* settings" in caplog.text
    assert client.silent_ranks == []
    assert_nothing_held(engine)


def test_one_silent_rank_makes_every_lookup_a_miss_until_it_answers(ranks, connect, caplog):
    engines, connectors = ranks(2, serving={0})
    prompt = Prompt(1, 2 * N)
    for engine, connector in zip(engines, connectors, strict=True):
        store(engine, prompt, connector)
    clock = FakeClock()
    client = connect(world_size=2, timeout_ms=SHORT_MS, clock=clock)

    assert [client.lookup(prompt.tokens, str(i)) for i in range(3)] == [0, 0, 0]
    assert client.silent_ranks == [1]
    assert caplog.text.count("the lookup server of rank 1") == 1
    assert engines[0].lookup_pins.keys() <= {"0"}  # the others asked nobody

    client.config.lookup_timeout_ms = LONG_MS
    with LMCacheLookupServer(engines[1], engines[1].metadata):
        until(lambda: clock.advance(1) or client.lookup(prompt.tokens, "again") == 2 * N)
        assert client.silent_ranks == []
    for engine in engines:
        for lookup_id in list(engine.lookup_pins):
            engine.lookup_unpin(lookup_id)
        assert_nothing_held(engine)


def test_a_restarted_server_answers_the_same_client(ranks, connect):
    (engine,), (connector,) = ranks(1, serving=())
    prompt = Prompt(1, 2 * N)
    store(engine, prompt, connector)
    client = connect()
    for _ in range(3):
        server = LMCacheLookupServer(engine, engine.metadata)
        assert client.lookup(prompt.tokens, "r") == 2 * N
        server.close()
        server.close()
        assert not os.path.exists(server.path)
    engine.lookup_unpin("r")


def test_lookups_from_many_threads_each_get_their_own_answer(ranks, connect):
    (engine,), (connector,) = ranks(1, num_chunks=64)
    prompts = [Prompt(seed, seed * N) for seed in range(1, 9)]
    for prompt in prompts:
        store(engine, prompt, connector)
    client, barrier, wrong = connect(), threading.Barrier(8), []

    def run(seed, prompt):
        barrier.wait(timeout=60)
        for _ in range(25):
            if (found := client.lookup(prompt.tokens, f"r{seed}")) != seed * N:
                wrong.append((seed, found))

    threads = [threading.Thread(target=run, args=(i, p)) for i, p in enumerate(prompts, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert wrong == []
    for seed in range(1, 9):
        engine.lookup_unpin(f"r{seed}")
    assert_nothing_held(engine)


def test_a_second_server_of_the_same_name_is_warned_about(ranks, caplog):
    (engine,), _ = ranks(1)

    with LMCacheLookupServer(engine, engine.metadata):
        assert "another lookup server answers at" in caplog.text


def test_an_old_server_that_closes_leaves_the_path_to_the_one_that_took_it_over(ranks, connect):
    (engine,), (connector,) = ranks(1, serving=())
    store(engine, Prompt(1, N), connector)
    old = LMCacheLookupServer(engine, engine.metadata)
    with LMCacheLookupServer(engine, engine.metadata):
        old.close()

        assert connect().lookup(Prompt(1, N).tokens, "r") == N
    engine.lookup_unpin("r")


def test_a_socket_that_cannot_be_made_names_the_setting(make_engine, monkeypatch, tmp_path):
    blocked = tmp_path / "a file"
    blocked.write_text("")
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(blocked))
    engine = make_engine()

    with pytest.raises(ConfigError, match="VLLM_RPC_BASE_PATH"):
        LMCacheLookupServer(engine, engine.metadata)
    with pytest.raises(ConfigError, match="needs metadata.engine_id"):
        LookupClientFactory.create_lookup_client(make_config(), make_metadata())


def test_a_closed_client_finds_nothing(ranks, connect):
    (engine,), (connector,) = ranks(1)
    store(engine, Prompt(1, N), connector)
    client = connect()
    client.close()
    client.close()

    assert client.lookup(Prompt(1, N).tokens, "r") == 0


def test_wrong_arguments_of_a_lookup_are_named(connect):
    client = connect(timeout_ms=SHORT_MS)

    with pytest.raises(TypeError, match="lookup_id must be a str, not 7"):
        client.lookup([1] * N, 7)
    with pytest.raises(ValueError, match="Unsupported tokens type"):
        client.lookup("text", "r")
