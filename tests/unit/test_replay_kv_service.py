"""The replay's KV side: the real engine behind a real lookup server, and nothing left behind."""

import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.replay.engine import ReplayEngine
from benchmarks.replay.kv_service import KVService, KVTotals, LoadOutcome
from benchmarks.replay.naming import prompt_tokens
from benchmarks.replay.requests import Request
from benchmarks.replay.runner import run_arm
from benchmarks.replay.settings import Arm, Settings
from lmcache.v1.cache_key import CacheEngineKey
from lmcache.v1.memory_management import TensorMemoryObj

SETTINGS = Settings(pool_blocks=6, image_blocks=1, interval_blocks=8)
PROMPT = (1, 2, 3, 4)
TOO_LARGE = 1 << 70  # for a token


@pytest.fixture
def kv() -> Iterator[KVService]:
    kv = KVService(SETTINGS)
    yield kv
    kv.manager.check_integrity()
    kv.close()


@pytest.fixture
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "/nonexistent/of/another")
    return tmp_path


def keys_of(kv: KVService, prompt: tuple[int, ...]) -> list[CacheEngineKey]:
    database = kv.engine.token_database
    return database.make_keys(database.split(prompt_tokens(prompt)).hashes)


def engine_threads() -> set[str]:
    names = {thread.name for thread in threading.enumerate()}
    return names & {"lmcache-lookup-server", "lmcache-stats-logger"}


def test_prompts_match_as_far_as_they_share_blocks(kv: KVService) -> None:
    kv.store(PROMPT, 0)
    assert kv.match(PROMPT, "a") == 4
    assert kv.match((1, 2, 13), "b") == 2
    assert kv.match((2, 3), "c") == 0
    assert kv.match((), "d") == 0


def test_overwritten_byte_is_found_at_the_load(kv: KVService) -> None:
    kv.store(PROMPT, 0)
    assert kv.load(PROMPT) is LoadOutcome.LOADED
    held = []
    kv.manager.hold_hot_prefix(keys_of(kv, PROMPT), held)
    for memory_object in held[3:]:
        assert isinstance(memory_object, TensorMemoryObj) and memory_object.tensor is not None
        memory_object.tensor[4095] ^= 1
    assert kv.load(PROMPT) is LoadOutcome.WRONG_BYTES
    assert kv.load(PROMPT[:3]) is LoadOutcome.LOADED


def test_prefix_that_is_not_all_there_is_missing(kv: KVService) -> None:
    kv.store(PROMPT[:2], 0)
    assert kv.load(PROMPT) is LoadOutcome.MISSING


def test_matched_blocks_stay_until_their_request_is_done(kv: KVService) -> None:
    kv.store(PROMPT, 0)
    assert kv.match(PROMPT, "a") == 4
    kv.store((11, 12, 13, 14), 0)
    kv.store((21, 22, 23, 24), 0)
    assert kv.match(PROMPT, "a") == 4
    assert kv.manager.lookup_pins().keys() == {"a"}
    kv.release("a")
    assert kv.manager.lookup_pins() == {}
    kv.store((31, 32, 33, 34, 35, 36), 0)
    assert kv.match(PROMPT, "a") == 0


def test_totals_tell_stored_resident_and_what_found_no_room() -> None:
    kv = KVService(SETTINGS)
    kv.store(PROMPT, 0)
    assert kv.match(PROMPT, "a") == 4
    kv.release("a")
    kv.manager.batched_remove(keys_of(kv, PROMPT)[1:2])
    kv.store(PROMPT, 1)  # block 2 again; 3 and 4 are there
    kv.store((*PROMPT, 5, 6, 7, 8), 4)  # two find room
    kv.close()
    assert kv.totals() == KVTotals(stored=4 + 1 + 2, resident=2, no_room=2, lookups=1)


def test_totals_that_contradict_the_connector_are_refused() -> None:
    kv = KVService(SETTINGS)
    kv.store(PROMPT, 0)
    kv.connector.num_filled += 1
    kv.close()
    with pytest.raises(RuntimeError, match="4 blocks as stored, .* asked for 5"):
        kv.totals()


def test_lookups_that_nobody_made_are_refused() -> None:
    kv = KVService(SETTINGS)
    kv.match(PROMPT, "a")
    kv.engine.lookup(prompt_tokens(PROMPT))
    kv.close()
    with pytest.raises(RuntimeError, match="2 lookups of 1"):
        kv.totals()


def test_runs_side_by_side_do_not_hear_one_another(kv: KVService) -> None:
    other = KVService(SETTINGS)
    kv.store(PROMPT, 0)
    assert (kv.match(PROMPT, "a"), other.match(PROMPT, "a")) == (4, 0)
    other.close()
    assert kv.match(PROMPT, "a") == 4
    assert other.totals() == KVTotals(stored=0, resident=0, no_room=0, lookups=1)


def test_sockets_are_the_runs_own_and_go_with_it(sockets: Path) -> None:
    kv = KVService(SETTINGS)
    assert os.environ["VLLM_RPC_BASE_PATH"] == "/nonexistent/of/another"
    assert [path.is_socket() for path in sockets.rglob("*") if not path.is_dir()] == [True]
    kv.close()
    kv.close()
    assert list(sockets.iterdir()) == []
    assert engine_threads() == set()


def test_run_that_fails_leaves_nothing_behind(sockets: Path) -> None:
    requests = [Request(0, PROMPT), Request(1, (TOO_LARGE,))]
    with pytest.raises(ValueError, match="Overflow"):
        run_arm(requests, SETTINGS, Arm.EVENTS, with_model=False)
    assert list(sockets.iterdir()) == []
    assert engine_threads() == set()


def test_engine_that_cannot_be_made_leaves_nothing_behind(sockets: Path) -> None:
    with pytest.raises(ValueError, match="capacity"):
        ReplayEngine(SETTINGS, Arm.EVENTS, events_capacity=0)
    assert list(sockets.iterdir()) == []
    assert engine_threads() == set()
