"""What ATOM's offload connectors do with the cache, call by call.

The ids are those of the contract between the two: A1 imports, A2 settings, A3 metadata, A4 engine,
A5 storage manager. A6, the lookup transport, is in test_atom_lookups.py; of A4, "an engine that is
never closed does not keep the process" is in tests/unit/test_engine_builder.py.
"""

import pytest
import torch
from builders import CHUNK_TOKENS, CPU
from engine_builders import (
    Prompt,
    assert_nothing_held,
    atom_metadata,
    keep_from,
    store,
)
from fakes import ReportingPlugin

from lmcache.utils import CacheEngineKey
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat

N = CHUNK_TOKENS


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


class TwoCalls:
    """The KV of token t is row t. It takes no keyword, and there is nothing else to call."""

    __slots__ = ("_rows",)

    def __init__(self, rows):
        self._rows = rows

    def batched_from_gpu(self, memory_objs, starts, ends):
        for obj, start, end in zip(memory_objs, starts, ends, strict=True):
            obj.tensor.view(end - start, -1).copy_(self._rows[start:end])

    def batched_to_gpu(self, memory_objs, starts, ends):
        for obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self._rows[start:end] = obj.tensor.view(end - start, -1)


def test_a4_store_tokens_alone_with_a_connector_that_has_two_calls_and_no_base_class(built):
    """A4: `store(tokens)` without a mask or any keyword; no other call, type or attribute."""
    rows = torch.randint(0, 256, (3 * N, 24), dtype=torch.uint8)
    expected, tokens = rows.clone(), Prompt(1, 3 * N).tokens
    built.gpu_connector = TwoCalls(rows)

    assert built.store(tokens) is None
    assert built.lookup(tokens) == 3 * N
    rows.fill_(0xEE)
    assert bool(built.retrieve(tokens).all())

    assert torch.equal(rows, expected)
    assert_nothing_held(built)


class AsksForDrains(ReportingPlugin):
    """A lower tier that counts how often somebody waited until all of it was written."""

    num_drains = 0

    def drain(self):
        self.num_drains += 1


def test_a4_store_returns_after_submission_and_waits_for_no_medium(built, connector):
    """A4: what was stored can be read when `store` returns; durable it is after `drain`."""
    manager, prompt = built.storage_manager, Prompt(1, 2 * N)
    lower = AsksForDrains(local_cpu_backend=manager.local_cpu_backend)
    manager.storage_backends["slow"] = lower

    store(built, prompt, connector)

    assert (built.lookup(prompt.tokens), len(lower.data), lower.num_drains) == (2 * N, 2, 0)
    manager.drain()
    assert lower.num_drains == 1


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


def with_reporting_plugin(make_engine):
    return make_engine(
        storage_plugins=["mine"],
        extra_config={
            "storage_plugin.mine.module_path": "fakes",
            "storage_plugin.mine.class_name": "ReportingPlugin",
        },
    )


def test_a5_a_hit_outside_the_cpu_tier_is_written_back_into_it(make_engine, connector):
    """A5: `get` of what only a lower tier holds; the next one is served by LocalCPU."""
    engine, prompt = with_reporting_plugin(make_engine), Prompt(1, N)
    store(engine, prompt, connector)
    manager = engine.storage_manager
    (key,) = manager.local_cpu_backend.get_keys()
    assert manager.remove(key, locations=[CPU]) == 1
    assert manager.contains(key) == "mine"

    got = manager.get(key)

    assert torch.equal(got.raw_tensor.view(-1)[: 4 * 96], prompt.kv().view(-1))
    assert manager.contains(key) == CPU
    assert got.get_ref_count() == 2  # ours and the cache's
    got.ref_count_down()
    again = manager.get(key, location=CPU)
    assert torch.equal(again.raw_tensor.view(-1)[: 4 * 96], prompt.kv().view(-1))
    again.ref_count_down()


def test_a5_remove_takes_the_copies_of_the_named_tiers_and_counts_them(make_engine, connector):
    """A5: `remove(key, locations=[...])` returns the number of copies; 0 is legal."""
    engine = with_reporting_plugin(make_engine)
    store(engine, Prompt(1, 2 * N), connector)
    manager = engine.storage_manager
    first, second = manager.local_cpu_backend.get_keys()

    assert manager.remove(first, locations=["mine"]) == 1
    assert (manager.contains(first), manager.contains(first, ["mine"])) == (CPU, None)
    assert manager.remove(first, locations=["mine"]) == 0
    assert manager.remove(first, locations=[CPU]) == 1
    assert manager.remove(second, locations=[CPU, "mine"]) == 2
    assert manager.contains(second) is None


def test_a5_contains_with_pin_keeps_the_chunk_from_eviction(make_engine, connector):
    """A5: `contains(key, search_range=None, pin=True)` names the tier and pins."""
    engine = make_engine(num_chunks=2)
    store(engine, Prompt(1, 2 * N), connector)
    manager = engine.storage_manager
    tail, head = manager.local_cpu_backend.get_keys()

    assert manager.contains(tail, search_range=None, pin=True) == CPU

    store(engine, Prompt(2, 2 * N, first_block=64), connector)
    assert (manager.contains(tail), manager.contains(head)) == (CPU, None)
    manager.batched_unpin([tail])
    store(engine, Prompt(3, 2 * N, first_block=64), connector)
    assert manager.contains(tail) is None
