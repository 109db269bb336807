"""`lmcache.utils` and the package itself: helpers, re-exports, and a light import."""

import asyncio
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import lmcache
from lmcache import utils
from lmcache.v1 import cache_key

IMPORT_AND_REPORT = """
import os, sys, threading
os.environ = None  # reading a setting would raise
import lmcache
print("torch" in sys.modules, threading.active_count())
print(lmcache.__version__)
"""


@pytest.mark.parametrize(
    ("a", "b", "up", "down"), [(0, 4, 0, 0), (1, 4, 4, 0), (4, 4, 4, 4), (9, 4, 12, 8)]
)
def test_rounding(a, b, up, down):
    assert utils.cdiv(a, b) * b == utils.round_up(a, b) == up
    assert utils.round_down(a, b) == down


def test_keys_are_those_of_the_key_module():
    assert utils.CacheEngineKey is cache_key.CacheEngineKey
    assert utils.LayerCacheEngineKey is cache_key.LayerCacheEngineKey
    assert utils.parse_cache_key is cache_key.parse_cache_key


@pytest.mark.parametrize("tokens", [[1, 2, 3, 4], torch.tensor([1, 2, 3, 4])])
def test_both_ends_of_a_token_range_are_included(tokens):
    assert utils.convert_tokens_to_list(tokens, 1, 2) == [2, 3]


def test_no_tokens_are_an_empty_list():
    assert utils.convert_tokens_to_list(None, 0, 5) == []


def test_a_broadcast_among_ranks_must_be_given():
    with pytest.raises(NotImplementedError):
        utils.mock_up_broadcast_fn(torch.zeros(1), 0)
    with pytest.raises(NotImplementedError):
        utils.mock_up_broadcast_object_fn({}, 0)


def test_atom_is_a_known_engine():
    assert utils.EngineType("atom") is utils.EngineType.ATOM
    assert {engine.value for engine in utils.EngineType} == {
        "vllm",
        "atom",
        "sglang",
        "trtllm",
        "mock",
    }


def test_a_pinned_file_is_not_evicted():
    entry = utils.DiskCacheMetadata("/f", 5)

    assert entry.can_evict
    assert entry.pin()
    assert (entry.is_pinned, entry.can_evict) == (True, False)
    assert entry.unpin()
    assert entry.can_evict


def test_store_events_are_positional_as_upstream():
    event = utils.CacheStoreEvent([1], None, [5, 6], 2, None, "cpu", None)

    assert (event.block_hashes, event.token_ids, event.medium) == ([1], [5, 6], "cpu")
    assert utils.CacheRemoveEvent([1], "cpu") == utils.CacheRemoveEvent([1], "cpu")


def test_a_loop_runs_in_a_daemon_thread_and_logs_what_a_callback_raises(caplog):
    loop = asyncio.new_event_loop()
    thread = threading.Thread(
        target=utils.start_loop_in_thread_with_exceptions, args=(loop,), daemon=True
    )
    thread.start()

    def fail():
        raise RuntimeError("told to fail")

    loop.call_soon_threadsafe(fail)
    still_alive = asyncio.run_coroutine_threadsafe(asyncio.sleep(0, "alive"), loop)

    assert still_alive.result(timeout=30) == "alive"
    assert "told to fail" in caplog.text
    loop.call_soon_threadsafe(loop.stop)
    thread.join(timeout=30)
    loop.close()


def test_the_version_is_that_of_the_project_file():
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()

    assert re.search(r'^version = "(.+)"$', project, re.MULTILINE)[1] == lmcache.__version__
    assert utils.get_version() == f"{lmcache.__version__}-NA"


def test_importing_the_package_loads_no_torch_starts_no_thread_and_reads_no_setting():
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_AND_REPORT], capture_output=True, text=True, check=True
    )

    assert done.stdout.split() == ["False", "1", lmcache.__version__]


def test_the_torch_device_is_looked_up_when_asked_for():
    kind = "cuda" if torch.cuda.is_available() else "cpu"

    assert lmcache.torch_device_type == kind
    assert lmcache.torch_dev is getattr(torch, kind)
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = lmcache.nope
