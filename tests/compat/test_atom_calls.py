"""What ATOM's offload connectors do with the cache, call by call.

The ids are those of the contract between the two: A1 imports, A2 settings, A3 metadata, A4 engine,
A5 storage manager, A6 lookup transport.
"""

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
from builders import CHUNK_TOKENS, CPU, make_metadata
from engine_builders import (
    AtomConnector,
    AtomMetadata,
    Prompt,
    assert_nothing_held,
    keep_from,
    store,
)

from lmcache.utils import CacheEngineKey
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.lookup_client.factory import LookupClientFactory
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata

N = CHUNK_TOKENS


@pytest.fixture(autouse=True)
def sockets_of_this_test(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))


def atom_metadata(**changes):
    """As ATOM builds it: keywords only, then wrapped."""
    fields = {
        "model_name": "m",
        "world_size": 1,
        "local_world_size": 1,
        "worker_id": 0,
        "local_worker_id": 0,
        "kv_dtype": torch.bfloat16,
        "kv_shape": (2, 2, N, 2, 64),
        "use_mla": False,
        "chunk_size": N,
        "engine_id": "atom-offload-dp0",
    }
    return AtomMetadata(LMCacheMetadata(**{**fields, **changes}))


@pytest.fixture
def built(connector, monkeypatch):
    """An engine built from the environment as ATOM builds it."""
    monkeypatch.setenv("LMCACHE_LOCAL_CPU", "True")
    monkeypatch.setenv("LMCACHE_MAX_LOCAL_CPU_SIZE", str(16 * 4096 / 2**30))
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", str(N))
    config = LMCacheEngineConfig.from_env()
    config.use_gds = False
    config.lookup_server_worker_ids = [0]
    engine = LMCacheEngineBuilder.get_or_create(
        "atom", config, atom_metadata(), connector, lambda tensor, src: None, lambda obj, src: obj
    )
    engine.fmt = MemoryFormat.KV_2LTD
    engine.post_init()
    yield engine
    LMCacheEngineBuilder.destroy("atom")


# ---- A1, A2 ------------------------------------------------------------------------------------


def test_a1_a2_settings_are_plain_attributes_that_can_be_overridden_and_unknown_ones_are_absent():
    config = LMCacheEngineConfig.from_defaults(chunk_size=N)

    for name in [
        "chunk_size",
        "use_gds",
        "local_cpu",
        "max_local_cpu_size",
        "local_disk",
        "max_local_disk_size",
        "store_location",
        "retrieve_locations",
        "remote_url",
        "extra_config",
        "numa_mode",
        "local_cpu_use_hugepages",
        "blocking_timeout_secs",
        "lookup_server_worker_ids",
        "cache_policy",
    ]:
        assert hasattr(config, name)
        setattr(config, name, getattr(config, name))
    assert not hasattr(config, "no_such_setting")
    config.extra_config = {"a": 1}
    config.extra_config["b"] = 2
    config.cache_policy = "FIFO"
    assert config.get_extra_config_value("b") == 2


def test_a2_the_same_id_with_another_config_is_an_error_and_with_an_equal_one_the_same_engine(
    built, connector
):
    def again(config, metadata):
        return LMCacheEngineBuilder.get_or_create("atom", config, metadata, connector, None, None)

    same = LMCacheEngineConfig.from_env()
    same.use_gds = False
    same.lookup_server_worker_ids = [0]
    other = LMCacheEngineConfig.from_env()
    other.use_gds = False
    other.lookup_server_worker_ids = [0]
    other.max_local_cpu_size *= 2

    assert again(same, atom_metadata()) is built
    with pytest.raises(ValueError, match="'atom' exists already with another configuration"):
        again(other, atom_metadata())
    with pytest.raises(ValueError, match="'atom' exists already"):
        again(same, atom_metadata(model_name="other"))
    assert LMCacheEngineBuilder.get("atom") is built
    assert LMCacheEngineBuilder.get("nobody") is None
    LMCacheEngineBuilder.destroy("nobody")


# ---- A3 ----------------------------------------------------------------------------------------


def test_a3_chunks_take_what_the_wrapped_metadata_says(built, connector):
    prompt = Prompt(1, 2 * N)
    store(built, prompt, connector)

    for obj in built.storage_manager.local_cpu_backend.hot_cache.values():
        assert (obj.get_shapes(), obj.get_dtypes()) == (
            [torch.Size([N // 4 * 96])],
            [torch.uint8],
        )
        assert obj.get_memory_format() is MemoryFormat.KV_2LTD


# ---- A4 ----------------------------------------------------------------------------------------


def test_a4_the_storage_manager_is_there_after_post_init_and_fmt_is_settable_before(connector):
    config = LMCacheEngineConfig.from_defaults(chunk_size=N, max_local_cpu_size=0.001)
    engine = LMCacheEngineBuilder.get_or_create(
        "fresh", config, atom_metadata(), connector, None, None
    )
    try:
        assert engine.storage_manager is None
        engine.fmt = MemoryFormat.KV_2LTD
        engine.post_init()
        manager = engine.storage_manager
        engine.post_init()
        assert engine.storage_manager is manager is not None
        assert (engine.gpu_connector, engine.store_location, engine.retrieve_locations) == (
            connector,
            None,
            None,
        )
        assert engine.model_name == "m"
    finally:
        LMCacheEngineBuilder.destroy("fresh")


@pytest.mark.parametrize("as_list", [False, True])
def test_a4_store_takes_tokens_with_and_without_a_mask(built, connector, as_list):
    prompt = Prompt(1, 4 * N)
    prompt.compute(connector)
    tokens = prompt.tokens.tolist() if as_list else prompt.tokens

    built.store(tokens[: 2 * N], block_ids=prompt.block_ids)
    built.store(tokens, mask=keep_from(4 * N, 2 * N), block_ids=prompt.block_ids, req_id="7")

    assert built.lookup(tokens) == 4 * N
    assert [call[1] for call in connector.calls] == [[0, N], [2 * N, 3 * N]]


def test_a4_every_keyword_reaches_the_connector(built, connector):
    prompt, event = Prompt(1, N), object()
    prompt.compute(connector)

    built.store(prompt.tokens, block_ids=prompt.block_ids, req_id=3, producer_event=event)
    built.retrieve(prompt.tokens, block_ids=prompt.block_ids, req_id=3)

    stored, loaded = [call[3] for call in connector.calls]
    assert stored == {"block_ids": prompt.block_ids, "req_id": 3, "producer_event": event}
    assert stored["producer_event"] is event
    assert loaded == {"block_ids": prompt.block_ids, "req_id": 3}


def test_a4_retrieve_answers_for_the_tokens_beyond_the_mask(built, connector):
    prompt = Prompt(1, 4 * N)
    store(built, prompt, connector)
    prompt.erase(connector)

    mask = built.retrieve(
        prompt.tokens, mask=keep_from(4 * N, N), block_ids=prompt.block_ids, req_id="r"
    )

    assert (mask.dtype, len(mask)) == (torch.bool, 4 * N)
    assert bool(mask[N : 4 * N].all()) and not mask[:N].any()
    assert torch.equal(connector.blocks[prompt.block_ids[4:]], prompt.kv()[4:])


def test_a4_lookup_takes_a_search_range_and_unpin_any_id(built, connector):
    prompt = Prompt(1, 2 * N)
    store(built, prompt, connector)

    assert built.lookup(prompt.tokens, search_range=[CPU], pin=False, lookup_id=None) == 2 * N
    assert built.lookup(prompt.tokens, search_range=["LocalDiskBackend"]) == 0
    assert built.lookup(prompt.tokens, search_range=None, pin=True, lookup_id="5") == 2 * N
    built.lookup_unpin("5")
    built.lookup_unpin("5")
    built.lookup_unpin("never seen")
    assert_nothing_held(built)


def test_a4_without_its_hot_cache_the_cpu_tier_finds_nothing(built, connector):
    prompt = Prompt(1, 2 * N)
    store(built, prompt, connector)

    built.set_hot_cache(False)

    assert built.lookup(prompt.tokens, search_range=[CPU]) == 0
    store(built, prompt, connector)
    assert built.lookup(prompt.tokens, search_range=[CPU]) == 0


def test_a4_a_connector_needs_two_calls_and_no_base_class(built):
    assert {name for name in dir(AtomConnector) if not name.startswith("_")} == {
        "batched_from_gpu",
        "batched_to_gpu",
    }
    assert built.health() == 0


# ---- A5 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [torch.Size([96]), torch.Size([1, 1, 96])])
def test_a5_allocate_takes_flat_and_padded_shapes_of_bytes(built, shape):
    obj = built.storage_manager.allocate(
        shape, torch.uint8, fmt=MemoryFormat.KV_2LTD, busy_loop=False
    )

    assert obj.tensor.shape == shape
    assert obj.tensor.is_contiguous() and obj.tensor.dtype == torch.uint8
    assert obj.get_tensor(0).numel() == obj.get_size() == 96
    obj.ref_count_down()


def test_a5_allocate_answers_none_under_pressure_and_at_once(built):
    manager, held = built.storage_manager, []
    while (obj := manager.allocate(torch.Size([4096]), torch.uint8, busy_loop=False)) is not None:
        held.append(obj)

    assert len(held) == 16
    for obj in held:
        obj.ref_count_down()


def test_a5_batched_put_consumes_references_only_as_its_last_act(built):
    manager = built.storage_manager
    key = CacheEngineKey("m", 1, 0, 5, torch.uint8)
    obj = manager.allocate(torch.Size([96]), torch.uint8, busy_loop=False)

    with pytest.raises(ValueError, match="no storage backend 'Nowhere'"):
        manager.batched_put([key], [obj], location="Nowhere")
    with pytest.raises(TypeError):
        manager.batched_put(["no key"], [obj])
    assert obj.get_ref_count() == 1

    manager.batched_put([key], [obj], location=None)
    assert obj.get_ref_count() == 1  # the cache's own
    assert manager.contains(key) == CPU
    assert manager.contains(key, search_range=["LocalDiskBackend"], pin=False) is None
    got = manager.get(key, location=None)
    assert (got is obj, got.get_ref_count()) == (True, 2)
    got.ref_count_down()
    assert manager.get(CacheEngineKey("m", 1, 0, 6, torch.uint8)) is None
    assert (manager.remove(key, locations=None), manager.remove(key)) == (1, 0)


def test_a5_backends_can_be_listed_and_reached(built):
    manager = built.storage_manager

    assert manager.list_backends() == {CPU: "LocalCPUBackend"}
    assert manager.storage_backends[CPU] is manager.local_cpu_backend


def test_a5_keys_are_built_by_position_and_by_keyword():
    by_position = CacheEngineKey("m", 1, 0, 5, torch.uint8)
    by_keyword = CacheEngineKey(
        model_name="m", world_size=1, worker_id=0, chunk_hash=5, dtype=torch.uint8
    )

    assert by_position == by_keyword and hash(by_position) == hash(by_keyword)
    assert (by_keyword.to_string(), by_keyword.chunk_hash) == ("m@1@0@5@uint8", 5)


# ---- A6 ----------------------------------------------------------------------------------------


def test_a6_the_scheduler_hears_what_the_worker_has_and_its_lookup_pins(built, connector):
    prompt = Prompt(1, 4 * N)
    store(built, prompt, connector)
    client = LookupClientFactory.create_lookup_client(built.config, atom_metadata())
    server = LookupClientFactory.create_lookup_server(built, atom_metadata())
    with client, server:
        assert client.lookup(prompt.tokens.tolist(), lookup_id="12") == 4 * N
        assert client.lookup([1] * N, lookup_id="13") == 0
        assert list(built.lookup_pins) == ["12"]
        client.clear_lookup_status("12")
        client.clear_lookup_status("never seen")
    built.lookup_unpin("12")
    assert_nothing_held(built)


def test_a6_a_rank_that_is_left_out_gets_no_server(built):
    assert (
        LookupClientFactory.create_lookup_server(
            built, AtomMetadata(make_metadata(worker_id=1, world_size=2, engine_id="e"))
        )
        is None
    )


def test_a6_a_server_that_was_never_there_gives_no_hits_within_the_bound(built):
    built.config.lookup_timeout_ms = 200
    with LookupClientFactory.create_lookup_client(built.config, atom_metadata()) as client:
        thread = threading.Thread(target=client.lookup, args=([1] * N, "1"))
        thread.start()
        thread.join(timeout=30)

        assert not thread.is_alive()
        assert client.lookup_cache("1") == 0


SERVER_PROCESS = """
import sys
import torch
from engine_builders import AtomConnector, AtomMetadata, Prompt, make_engine, store
from builders import make_metadata
from lmcache.v1.lookup_client.factory import LookupClientFactory
connector = AtomConnector()
metadata = AtomMetadata(make_metadata(engine_id="atom-offload-dp0"))
engine = make_engine(connector, metadata)
store(engine, Prompt(1, 64), connector)
server = LookupClientFactory.create_lookup_server(engine, metadata)
print("ready", flush=True)
sys.stdin.read()
"""


def test_a6_a_server_whose_process_was_killed_gives_no_hits_within_the_bound(built, tmp_path):
    built.config.lookup_timeout_ms = 2000
    tests = os.path.dirname(os.path.dirname(__file__))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(tests), tests])}
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER_PROCESS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        with LookupClientFactory.create_lookup_client(built.config, atom_metadata()) as client:
            tokens = Prompt(1, 64).tokens.tolist()
            assert client.lookup(tokens, "1") == 64
            process.send_signal(signal.SIGKILL)
            process.wait(timeout=30)

            assert client.lookup(tokens, "1") == 0
            # Were each one waited for, these would take far longer than a test may.
            for number in range(1000):
                assert client.lookup(tokens, str(number)) == 0
    finally:
        process.kill()
        process.communicate()
