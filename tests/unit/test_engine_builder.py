"""The builder: one engine an id, its statistics exported, and nothing left behind."""

import gc
import subprocess
import sys
import threading

import pytest
from builders import CHUNK_TOKENS, make_config, make_metadata
from engine_builders import AtomMetadata, Prompt, store
from prometheus_client import REGISTRY

from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.errors import ConfigError

N = CHUNK_TOKENS
LABELS = ("model_name", "worker_id", "role", "served_model_name")


def build(instance_id, connector, worker_id=0, **settings):
    metadata = AtomMetadata(make_metadata(worker_id=worker_id, world_size=2, role="worker"))
    config = make_config(**settings)
    return LMCacheEngineBuilder.get_or_create(instance_id, config, metadata, connector, None, None)


@pytest.fixture
def ids():
    """Ids of engines that are destroyed at the end."""
    names = ["first", "second"]
    yield names
    for name in names:
        LMCacheEngineBuilder.destroy(name)


def sample(name, worker_id):
    for family in REGISTRY.collect():
        for found in family.samples:
            if found.name == name and found.labels["worker_id"] == str(worker_id):
                return found.value
    return None


def test_what_an_engine_did_is_exported_when_it_is_destroyed_at_the_latest(ids, connector):
    prompt = Prompt(1, 2 * N)
    for worker_id, name in enumerate(ids):
        engine = build(name, connector, worker_id, max_local_cpu_size=0.001)
        engine.post_init()
        before = sample("lmcache:num_stored_tokens_total", worker_id) or 0
        store(engine, prompt, connector)
        if worker_id == 0:
            engine.storage_manager.touch([])
        LMCacheEngineBuilder.destroy(name)
        assert sample("lmcache:num_stored_tokens_total", worker_id) == before + 2 * N


def test_destroyed_an_engine_leaves_no_thread(ids, connector):
    before = set(threading.enumerate())
    build(ids[0], connector).post_init()
    assert {t.name for t in set(threading.enumerate()) - before} == {"lmcache-stats-logger"}

    LMCacheEngineBuilder.destroy(ids[0])

    assert set(threading.enumerate()) <= before | {threading.current_thread()}
    assert LMCacheEngineBuilder.get(ids[0]) is None


def test_many_threads_that_ask_for_one_id_get_one_engine(ids, connector):
    made, barrier = [], threading.Barrier(8)

    def ask():
        barrier.wait(timeout=60)
        made.append(build(ids[0], connector))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)

    assert len(made) == 8
    assert all(engine is made[0] for engine in made)


def test_a_setting_that_cannot_be_used_leaves_no_engine(ids, connector):
    with pytest.raises(ConfigError, match="histogram_bucket_time_to_store"):
        build("broken", connector, extra_config={"histogram_bucket_time_to_store": ["no number"]})
    assert LMCacheEngineBuilder.get("broken") is None


def test_garbage_collection_is_switched_off_only_where_the_setting_says_so(ids, connector):
    build(ids[0], connector)
    assert gc.isenabled()
    try:
        build(ids[1], connector, worker_id=1, py_enable_gc=False)
        assert not gc.isenabled()
    finally:
        gc.enable()


UNCLOSED = """
from builders import make_config, make_metadata
from engine_builders import AtomConnector, AtomMetadata, Prompt, store
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.lookup_client.factory import LookupClientFactory
connector = AtomConnector()
metadata = AtomMetadata(make_metadata(engine_id="e"))
engine = LMCacheEngineBuilder.get_or_create("x", make_config(), metadata, connector, None, None)
engine.post_init()
store(engine, Prompt(1, 64), connector)
server = LookupClientFactory.create_lookup_server(engine, metadata)
client = LookupClientFactory.create_lookup_client(engine.config, metadata)
assert client.lookup(Prompt(1, 64).tokens.tolist(), "r") == 64
print("end of main")
"""


def test_a_process_that_closes_nothing_exits(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", ":".join(path for path in sys.path if path))

    ran = subprocess.run(
        [sys.executable, "-c", UNCLOSED], capture_output=True, text=True, timeout=60
    )

    assert (ran.returncode, ran.stdout) == (0, "end of main\n"), ran.stderr
