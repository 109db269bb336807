"""What a store tells its statistics, and when it waits for memory."""

import os
import threading

import pytest
from builders import CHUNK_TOKENS, gauges, hold
from engine_builders import Prompt, assert_nothing_held, store

from lmcache.v1.stats import NullStats

N = CHUNK_TOKENS
FOREVER_SECONDS = 250  # far beyond any test's time limit


class StoresHeard(NullStats):
    """Keeps what it hears of stores: tokens (requested, stored, resident)."""

    def __init__(self):
        self.stores = []

    def store_done(self, done):
        self.stores.append((done.requested_tokens, done.stored_tokens, done.resident_tokens))


def test_a_store_counts_nothing_that_its_mask_leaves_out(make_engine, connector):
    heard = StoresHeard()
    engine = make_engine(stats=heard)
    prompt = Prompt(1, 5 * N)

    store(engine, prompt, connector, upto=3 * N)
    store(engine, prompt, connector, first=2 * N)
    store(engine, prompt, connector, first=4 * N)
    store(engine, prompt, connector)

    assert heard.stores == [
        (3 * N, 3 * N, 0),
        (3 * N, 2 * N, N),  # of three resident chunks one is asked for
        (N, 0, N),
        (5 * N, 0, 5 * N),
    ]


def test_a_store_that_finds_no_room_counts_what_it_stored(make_engine, connector):
    heard = StoresHeard()
    engine = make_engine(stats=heard, num_chunks=4)

    store(engine, Prompt(1, 6 * N), connector, first=N)

    assert heard.stores == [(5 * N, 4 * N, 0)]


# ---- force_store_wait ---------------------------------------------------------------------------


@pytest.fixture
def read_pool(make_engine, connector):
    """`read_pool(num_read, waits)`: an engine of four chunks, of which readers hold some.

    Returns the engine and the readers' objects.
    """
    all_readers = []

    def make(num_read, waits=True):
        engine = make_engine(
            num_chunks=4,
            blocking_timeout_secs=FOREVER_SECONDS,
            extra_config={"force_store_wait": waits},
        )
        store(engine, Prompt(9, 4 * N, first_block=64), connector)
        resident = engine.storage_manager.local_cpu_backend.get_keys()
        readers = [hold(engine.storage_manager, key) for key in resident[:num_read]]
        all_readers.extend(readers)
        return engine, readers

    yield make
    for reader in all_readers:
        if reader.get_ref_count() > 1:
            reader.ref_count_down()


def store_beside(engine, prompt, connector):
    """Start a store on another thread; returns the thread once it has ended or waits."""
    thread = threading.Thread(target=store, args=(engine, prompt, connector), daemon=True)
    thread.start()
    while thread.is_alive() and gauges(engine.storage_manager)["num_waiting"] == 0:
        os.sched_yield()
    return thread


def assert_did_not_wait(engine, thread):
    is_waiting = gauges(engine.storage_manager)["num_waiting"] > 0
    if is_waiting:  # let it end, so that the next test begins with nobody waiting
        engine.close()
    thread.join(timeout=60)
    assert not is_waiting and not thread.is_alive()


def test_with_force_store_wait_a_store_waits_until_a_reader_lets_go(read_pool, connector):
    engine, readers = read_pool(num_read=4)
    prompt = Prompt(1, N)
    thread = store_beside(engine, prompt, connector)
    assert thread.is_alive() and engine.lookup(prompt.tokens) == 0

    readers[2].ref_count_down()
    thread.join(timeout=60)

    assert not thread.is_alive()
    assert engine.lookup(prompt.tokens) == N


def test_without_force_store_wait_a_store_keeps_a_shorter_prefix_at_once(read_pool, connector):
    engine, _ = read_pool(num_read=3, waits=False)
    prompt = Prompt(1, 3 * N)
    thread = store_beside(engine, prompt, connector)

    assert_did_not_wait(engine, thread)
    assert engine.lookup(prompt.tokens) == N


def test_a_store_that_has_taken_memory_does_not_wait_for_more(read_pool, connector):
    engine, _ = read_pool(num_read=3)
    prompt = Prompt(1, 3 * N)
    thread = store_beside(engine, prompt, connector)

    assert_did_not_wait(engine, thread)
    assert engine.lookup(prompt.tokens) == N


def test_a_store_does_not_wait_for_what_its_own_prefix_takes(read_pool, connector):
    engine, _ = read_pool(num_read=0)
    longer = Prompt(9, 6 * N, first_block=64)  # its first four chunks fill the pool
    thread = store_beside(engine, longer, connector)

    assert_did_not_wait(engine, thread)
    assert engine.lookup(longer.tokens) == 4 * N


def test_a_store_with_a_resident_prefix_waits_for_what_readers_hold_beside_it(
    make_engine, connector
):
    engine = make_engine(
        num_chunks=4,
        blocking_timeout_secs=FOREVER_SECONDS,
        extra_config={"force_store_wait": True},
    )
    prompt, other = Prompt(1, 3 * N), Prompt(2, 2 * N, first_block=64)
    store(engine, prompt, connector, upto=2 * N)
    store(engine, other, connector)
    chunks = engine.token_database.split(other.tokens)
    of_other = engine.token_database.make_keys(chunks.hashes)
    readers = [hold(engine.storage_manager, key) for key in of_other]
    thread = store_beside(engine, prompt, connector)
    assert thread.is_alive()

    for reader in readers:
        reader.ref_count_down()
    thread.join(timeout=60)

    assert not thread.is_alive()
    assert engine.lookup(prompt.tokens) == 3 * N
    assert_nothing_held(engine)
