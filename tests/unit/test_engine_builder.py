"""The builder: one engine an id, its statistics exported, and nothing left behind."""

import gc
import os
import subprocess
import sys
import threading

import pytest
from builders import CHUNK_TOKENS, make_config, make_metadata
from engine_builders import AtomMetadata, Prompt, store
from fakes import OldPlugin
from prometheus_client import REGISTRY, Gauge

from lmcache.observability import LMCStatsMonitor, engine_labels
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


# --- equal labels ---------------------------------------------------------------------------------
def lookups():
    return sample("lmcache:num_lookup_requests_total", 0) or 0


def test_an_engine_keeps_its_monitor_when_another_of_its_labels_is_destroyed(ids, connector):
    first, _ = (build(name, connector) for name in ids)
    first.post_init()
    monitor = LMCStatsMonitor.GetOrCreate(first.metadata)
    before = lookups()

    LMCacheEngineBuilder.destroy(ids[1])
    assert LMCStatsMonitor.GetOrCreate(first.metadata) is monitor
    first.lookup(Prompt(1, N).tokens)
    LMCacheEngineBuilder.destroy(ids[0])

    assert lookups() == before + 1
    assert LMCStatsMonitor.GetOrCreate(first.metadata) is not monitor
    LMCStatsMonitor.DestroyInstance(first.metadata)


def test_an_engine_keeps_its_monitor_when_another_of_its_labels_cannot_be_made(ids, connector):
    metadata = build(ids[0], connector).metadata
    monitor = LMCStatsMonitor.GetOrCreate(metadata)

    with pytest.raises(ConfigError):
        build(ids[1], connector, extra_config={"histogram_bucket_time_to_store": "123"})

    assert LMCStatsMonitor.GetOrCreate(metadata) is monitor


def test_an_engine_that_cannot_be_made_leaves_no_monitor(connector):
    metadata = AtomMetadata(make_metadata(worker_id=7))
    with pytest.raises(ConfigError):
        LMCacheEngineBuilder.get_or_create(
            "broken",
            make_config(extra_config={"histogram_bucket_time_to_store": "123"}),
            metadata,
            connector,
            None,
            None,
        )
    assert engine_labels(metadata) not in LMCStatsMonitor._instances


def test_engines_of_equal_labels_are_told_so_once(ids, connector, caplog):
    build(ids[0], connector)
    build("other", connector, worker_id=1)
    assert "gauges show one or the other" not in caplog.text

    build(ids[1], connector)
    build(ids[1], connector)

    assert caplog.text.count("gauges show one or the other") == 1
    LMCacheEngineBuilder.destroy("other")


def test_gauges_show_the_engine_that_is_left_of_two_with_equal_labels(ids, connector):
    engines = [build(name, connector) for name in ids]
    for engine in engines:
        engine.post_init()
    prompt = Prompt(1, 2 * N)
    store(engines[0], prompt, connector)

    LMCacheEngineBuilder.destroy(ids[1])

    assert sample("lmcache:local_cpu_hot_cache_count", 0) == 2


# --- the end of an engine -------------------------------------------------------------------------
def removed_by_clear():
    return REGISTRY.get_sample_value(
        "lmcache:removals_total",
        {
            **dict(zip(LABELS, engine_labels(make_metadata(role="worker")), strict=True)),
            "tier": "LocalCPUBackend",
            "reason": "clear",
        },
    )


def test_what_closing_removed_is_exported_and_no_gauge_is_left(ids, connector):
    engine = build(ids[0], connector, max_local_cpu_size=0.001)
    engine.post_init()
    store(engine, Prompt(1, 2 * N), connector)
    before = removed_by_clear() or 0

    LMCacheEngineBuilder.destroy(ids[0])

    assert removed_by_clear() == before + 2
    left = [
        family.name
        for family in REGISTRY.collect()
        if family.name.startswith("lmcache:") and family.type == "gauge"
        for found in family.samples
        if (found.labels["worker_id"], found.labels["role"]) == ("0", "worker")
    ]
    assert left == []


class SlowToClose(OldPlugin):
    """A tier that closes when it is let, and does something meanwhile."""

    def __init__(self, then=None):
        super().__init__()
        self.is_closing, self.may_close = threading.Event(), threading.Event()
        self.then = then

    def close(self):
        self.is_closing.set()
        if self.then is not None:
            self.then()
            return
        assert self.may_close.wait(60)


def build_slow(name, connector, then=None):
    engine = build(name, connector)
    engine.post_init()
    tier = engine.storage_manager.storage_backends["slow"] = SlowToClose(then)
    return engine, tier


def test_an_id_is_free_when_its_engine_is_closed_and_others_are_made_meanwhile(ids, connector):
    old, tier = build_slow(ids[0], connector)
    told = []

    def destroy():
        LMCacheEngineBuilder.destroy(ids[0])
        told.append("destroyed")

    def make():
        told.append(build(ids[0], connector))

    destroying, making = (threading.Thread(target=work, daemon=True) for work in (destroy, make))
    destroying.start()
    assert tier.is_closing.wait(60)
    assert LMCacheEngineBuilder.get(ids[0]) is None
    assert build(ids[1], connector, worker_id=1) is not None
    making.start()
    while not (LMCacheEngineBuilder._closed._waiters or told):
        os.sched_yield()
    assert told == []
    tier.may_close.set()
    destroying.join(60)
    making.join(60)

    assert len(told) == 2
    assert LMCacheEngineBuilder.get(ids[0]) in told
    assert LMCacheEngineBuilder.get(ids[0]) is not old


def test_a_second_destroy_returns_when_the_engine_is_closed(ids, connector):
    _, tier = build_slow(ids[0], connector)
    told = []

    def destroy_again():
        LMCacheEngineBuilder.destroy(ids[0])
        told.append(tier.may_close.is_set())

    first = threading.Thread(target=LMCacheEngineBuilder.destroy, args=(ids[0],), daemon=True)
    second = threading.Thread(target=destroy_again, daemon=True)
    first.start()
    assert tier.is_closing.wait(60)
    second.start()
    while not (LMCacheEngineBuilder._closed._waiters or told):
        os.sched_yield()
    tier.may_close.set()
    first.join(60)
    second.join(60)

    assert told == [True]


def test_the_thread_that_closes_an_engine_does_not_wait_for_itself(ids, connector):
    told = []

    def ask():
        LMCacheEngineBuilder.destroy(ids[0])
        try:
            build(ids[0], connector)
        except RuntimeError as error:
            told.append(str(error))

    build_slow(ids[0], connector, then=ask)
    LMCacheEngineBuilder.destroy(ids[0])

    assert told == ["the engine 'first' is being closed by this very thread"]


def test_an_engine_is_made_where_a_metric_s_name_is_taken(ids, connector, fresh_metrics, caplog):
    taken = Gauge("lmcache:num_hit_tokens", "of somebody else")
    try:
        engine = build(ids[0], connector)
        engine.post_init()
        store(engine, Prompt(1, N), connector)
        assert engine.lookup(Prompt(1, N).tokens) == N
        LMCacheEngineBuilder.destroy(ids[0])
    finally:
        REGISTRY.unregister(taken)
    assert caplog.text.count("exports no metrics") == 1


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
