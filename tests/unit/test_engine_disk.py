"""Engines over CPU and disk: prompts outlive the pool, the process, and the lack of a hot cache."""

import pytest
from builders import CHUNK_TOKENS, CPU, make_metadata
from disk_builders import DISK, HEAD_BYTES, check_disk, disk_of
from engine_builders import AtomMetadata, Prompt, assert_nothing_held, retrieve, store

N = CHUNK_TOKENS
FILE_BYTES = HEAD_BYTES + 4 * 96  # a chunk of four blocks


@pytest.fixture
def make_disk_engine(make_engine, tmp_path):
    """`make_disk_engine(num_files=64, num_chunks=16, **settings)`."""

    def make(num_files=64, **settings):
        return make_engine(
            local_disk=str(tmp_path), max_local_disk_size=num_files * FILE_BYTES / 2**30, **settings
        )

    return make


def wait_for_disk(engine):
    engine.storage_manager.drain()


def test_prompts_that_left_the_pool_come_back_from_disk(make_disk_engine, connector):
    engine = make_disk_engine(num_chunks=8)
    prompts = [Prompt(seed, 6 * N, first_block=32 * seed) for seed in range(6)]
    for prompt in prompts:
        for end in range(2 * N, 7 * N, 2 * N):  # within what may be in flight
            store(engine, prompt, connector, first=end - 2 * N, upto=end)
            wait_for_disk(engine)

    for prompt in prompts:
        prompt.erase(connector)
        assert engine.lookup(prompt.tokens) == 6 * N
        assert retrieve(engine, prompt) == 6 * N
        assert prompt.is_intact(connector, 6 * N)
    assert_nothing_held(engine)
    check_disk(engine.storage_manager)


def test_a_prompt_is_loaded_from_both_tiers_together(make_disk_engine, connector):
    engine = make_disk_engine(num_chunks=16)
    prompt = Prompt(1, 10 * N)
    store(engine, prompt, connector)
    wait_for_disk(engine)
    keys = list(engine.storage_manager.local_cpu_backend.hot_cache)
    engine.storage_manager.batched_remove(keys[:5], [CPU])  # the tail: coldest first
    prompt.erase(connector)

    assert engine.lookup(prompt.tokens, lookup_id="r", pin=True) == 10 * N
    assert {name: len(part) for name, part in engine.lookup_pins["r"].items()} == {CPU: 5, DISK: 5}
    assert retrieve(engine, prompt) == 10 * N
    assert prompt.is_intact(connector, 10 * N)
    engine.lookup_unpin("r")
    assert engine.storage_manager.gauges().disk.num_pins == 0
    assert_nothing_held(engine)


def test_another_engine_on_the_directory_finds_the_prompts_of_the_one_before(
    make_disk_engine, connector
):
    engine = make_disk_engine()
    prompts = [Prompt(seed, 4 * N, first_block=32 * seed) for seed in range(3)]
    for prompt in prompts:
        store(engine, prompt, connector)
    engine.close()

    engine = make_disk_engine()
    wait_for_disk(engine)
    for prompt in prompts:
        prompt.erase(connector)
        assert retrieve(engine, prompt) == 4 * N
        assert prompt.is_intact(connector, 4 * N)


def test_without_a_hot_cache_a_long_run_never_fills_the_staging_pool(make_disk_engine, connector):
    engine = make_disk_engine(num_chunks=8, num_files=1000, local_cpu=False)
    for seed in range(50):
        prompt = Prompt(seed, 4 * N)
        store(engine, prompt, connector)
        wait_for_disk(engine)
        prompt.erase(connector)
        assert engine.lookup(prompt.tokens, lookup_id="r", pin=True) == 4 * N
        assert retrieve(engine, prompt) == 4 * N
        assert prompt.is_intact(connector, 4 * N)
        engine.lookup_unpin("r")
        assert engine.storage_manager.gauges().cpu.num_memory_objs == 0

    first = Prompt(0, 4 * N)
    assert retrieve(engine, first) == 4 * N
    assert first.is_intact(connector, 4 * N)
    assert len(disk_of(engine.storage_manager).dict) == 200
    assert engine.storage_manager.gauges().disk.dropped_queue_full == 0


def test_without_a_hot_cache_stored_chunks_are_refreshed_and_not_copied_again(
    make_disk_engine, connector
):
    engine = make_disk_engine(num_files=8, local_cpu=False)
    first, second = Prompt(1, 4 * N), Prompt(2, 4 * N, first_block=64)
    for prompt in (first, second):
        store(engine, prompt, connector)
        wait_for_disk(engine)
    connector.calls.clear()

    store(engine, first, connector)

    assert connector.calls == []
    store(engine, Prompt(3, 4 * N, first_block=128), connector)
    assert engine.lookup(first.tokens) == 4 * N
    assert engine.lookup(second.tokens) == 0


def test_the_head_of_a_prompt_outlives_its_tail_on_disk_however_many_calls_stored_it(
    make_disk_engine, connector
):
    engine = make_disk_engine(num_files=8, local_cpu=False)
    prompt = Prompt(1, 8 * N)
    for end in range(2 * N, 9 * N, 2 * N):
        store(engine, prompt, connector, first=end - 2 * N, upto=end)
        wait_for_disk(engine)

    for number in range(3):
        store(engine, Prompt(10 + number, N, first_block=64), connector)
        wait_for_disk(engine)

    assert engine.lookup(prompt.tokens) == 5 * N


def test_a_file_that_went_bad_ends_the_prefix_and_the_rest_is_computed(make_disk_engine, connector):
    engine = make_disk_engine()
    prompt = Prompt(1, 6 * N)
    store(engine, prompt, connector)
    wait_for_disk(engine)
    head_first = list(disk_of(engine.storage_manager).dict.values())[::-1]
    engine.storage_manager.clear([CPU])
    with open(head_first[3].path, "r+b") as file:
        file.seek(HEAD_BYTES)
        file.write(b"\x00" * 100)
    prompt.erase(connector)

    assert engine.lookup(prompt.tokens) == 6 * N
    assert retrieve(engine, prompt) == 3 * N
    assert prompt.is_intact(connector, 3 * N)
    assert engine.lookup(prompt.tokens) == 3 * N
    assert_nothing_held(engine)


@pytest.mark.parametrize(("where", "other"), [(CPU, DISK), (DISK, CPU)])
def test_store_location_and_retrieve_locations_name_one_tier(
    make_disk_engine, connector, where, other
):
    engine = make_disk_engine(store_location=where, retrieve_locations=[where])
    prompt = Prompt(1, 3 * N)

    store(engine, prompt, connector)
    wait_for_disk(engine)
    prompt.erase(connector)

    assert engine.lookup(prompt.tokens, search_range=[other]) == 0
    assert retrieve(engine, prompt) == 3 * N
    assert prompt.is_intact(connector, 3 * N)


def test_ranks_of_one_model_on_one_directory_keep_their_own_shards(
    make_disk_engine, make_engine, connector
):
    engines = []
    for rank in range(2):
        base = make_metadata(world_size=2, worker_id=rank, local_worker_id=rank, engine_id="e")
        engines.append(make_disk_engine(metadata=AtomMetadata(base)))
    prompts = [Prompt(1, 4 * N, first_block=0), Prompt(1, 4 * N, first_block=64)]
    prompts[1]._seed = 99  # the same tokens, another rank's bytes
    for engine, prompt in zip(engines, prompts, strict=True):
        store(engine, prompt, connector)
        wait_for_disk(engine)
        engine.storage_manager.clear([CPU])

    for engine, prompt in zip(engines, prompts, strict=True):
        prompt.erase(connector)
        assert retrieve(engine, prompt) == 4 * N
        assert prompt.is_intact(connector, 4 * N)
