"""The names other programs import, the signatures they call, and the attributes they reach into."""

import importlib
import inspect
import json
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from builders import CHUNK_SHAPE, CPU, keys, make_config, put

from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import AdHocMemoryAllocator
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.abstract_backend import StorageBackendInterface
from lmcache.v1.storage_backend.cache_policy import get_cache_policy
from lmcache.v1.storage_backend.cache_policy.base_policy import BaseCachePolicy
from lmcache.v1.storage_backend.storage_manager import allocate_and_copy_objects

SURFACE = {
    "lmcache": "torch_dev torch_device_type",
    "lmcache.utils": "CacheEngineKey CacheRemoveEvent CacheStoreEvent DiskCacheMetadata EngineType "
    "LayerCacheEngineKey cdiv convert_tokens_to_list get_version init_logger mock_up_broadcast_fn "
    "mock_up_broadcast_object_fn parse_cache_key round_down round_up "
    "start_loop_in_thread_with_exceptions",
    "lmcache.observability": "LMCStatsMonitor PrometheusLogger",
    "lmcache.v1.cache_engine": "LMCacheEngine LMCacheEngineBuilder",
    "lmcache.v1.config": "LMCacheEngineConfig load_engine_config_with_overrides",
    "lmcache.v1.config_base": "validate_and_set_config_value",
    "lmcache.v1.event_manager": "EventManager EventStatus EventType",
    "lmcache.v1.gpu_connector": "CreateGPUConnector GPUConnectorInterface MockGPUConnector "
    "RawBlockConnector VLLMPagedMemGPUConnectorV2 utils",
    "lmcache.v1.gpu_connector.gpu_connectors": "GPUConnectorInterface VLLMPagedMemGPUConnectorV2",
    "lmcache.v1.gpu_connector.mock_gpu_connector": "MockGPUConnector",
    "lmcache.v1.lookup_client": "LookupClientFactory",
    "lmcache.v1.lookup_client.abstract_client": "LookupClientInterface",
    "lmcache.v1.lookup_client.factory": "LookupClientFactory",
    "lmcache.v1.lookup_client.lmcache_lookup_client": "LMCacheLookupClient LMCacheLookupServer",
    "lmcache.v1.rpc_utils": "IPC_SOCKET_PATH_MAX_LEN get_zmq_rpc_path_lmcache",
    "lmcache.v1.memory_allocators.ad_hoc_memory_allocator": "AdHocMemoryAllocator",
    "lmcache.v1.memory_allocators.host_memory_allocator": "HostMemoryAllocator",
    "lmcache.v1.memory_allocators.mixed_memory_allocator": "MixedMemoryAllocator",
    "lmcache.v1.memory_allocators.paged_tensor_memory_allocator": "PagedTensorMemoryAllocator",
    "lmcache.v1.memory_allocators.pin_memory_allocator": "PinMemoryAllocator",
    "lmcache.v1.memory_allocators.tensor_memory_allocator": "TensorMemoryAllocator",
    "lmcache.v1.memory_management": "AddressManager BytesBufferMemoryObj MemoryFormat MemoryObj "
    "MemoryObjMetadata TensorMemoryObj MemoryAllocatorInterface",
    "lmcache.v1.metadata": "LMCacheMetadata",
    "lmcache.v1.pin_monitor": "PinMonitor",
    "lmcache.v1.storage_backend": "CreateStorageBackends LocalCPUBackend",
    "lmcache.v1.storage_backend.abstract_backend": "AllocatorBackendInterface "
    "StoragePluginInterface ConfigurableStorageBackendInterface StorageBackendInterface",
    "lmcache.v1.storage_backend.cache_policy": "get_cache_policy",
    "lmcache.v1.storage_backend.cache_policy.base_policy": "BaseCachePolicy",
    "lmcache.v1.storage_backend.local_cpu_backend": "LocalCPUBackend",
    "lmcache.v1.storage_backend.storage_manager": "StorageManager allocate_and_copy_objects",
    "lmcache.v1.storage_backend.touch": "TouchVerdict TouchResult",
    "lmcache.v1.storage_backend.cache_events": "CacheEvent EventKind RemovalReason Subscription "
    "Residents",
    "lmcache.v1.token_database": "ChunkedTokenDatabase",
}
NAMES = [(module, name) for module, names in SURFACE.items() for name in names.split()]
RECORDED = json.loads((Path(__file__).parent / "goldens" / "signatures.json").read_text())

# Layerwise mode, async loading, P2P and cachegen are refused, whatever the arguments are.
OUT_OF_SCOPE = {
    "LMCacheEngine.async_lookup_and_prefetch",
    "LMCacheEngine.cleanup_memory_objs",
    "LMCacheEngine.compress",
    "LMCacheEngine.decompress",
    "LMCacheEngine.move",
    "LMCacheEngine.retrieve_layer",
    "LMCacheEngine.store_layer",
    "StorageManager.async_lookup_and_prefetch",
    "StorageManager.layerwise_batched_get",
    "StorageManager.prefetch_all_done_callback",
    "StorageManager.prefetch_single_done_callback",
}
# Named otherwise in 0.5.6's own base class, by which callers and plug-ins go.
RENAMED = {"memory_objs": "objs"}


def signatures():
    for full_name, methods in RECORDED["classes"].items():
        module, _, class_name = full_name.rpartition(".")
        for method, parameters in methods.items():
            if f"{class_name}.{method}" not in OUT_OF_SCOPE:
                yield pytest.param(
                    module,
                    class_name,
                    method,
                    parameters,
                    id=f"{class_name}.{method}",
                )


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_the_name_can_be_imported_from_where_it_was(module, name):
    imported = importlib.import_module(module)

    assert getattr(imported, name) is not None


@pytest.mark.parametrize(("module", "class_name", "method", "parameters"), list(signatures()))
def test_the_method_takes_the_arguments_of_0_5_6_in_their_places(
    module, class_name, method, parameters
):
    owner = getattr(importlib.import_module(module), class_name)
    signature = inspect.signature(getattr(owner, method))

    ours = [name for name in signature.parameters if name != "self"]
    assert ours[: len(parameters)] == [
        RENAMED.get(name, name) if class_name == "LocalCPUBackend" else name for name in parameters
    ]
    for name in ours[len(parameters) :]:
        parameter = signature.parameters[name]
        assert parameter.default is not parameter.empty or parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )


def test_attributes_of_the_cpu_tier_that_callers_reach_into(manager):
    put(manager, keys(1)[0])
    backend = manager.local_cpu_backend

    assert backend.use_hot is True
    assert list(backend.hot_cache) == keys(1)
    with backend.cpu_lock:
        assert backend.cpu_lock.locked()
        assert backend.hot_cache[keys(1)[0]].can_evict
    assert backend.cache_policy.get_evict_candidates(backend.hot_cache) == keys(1)
    assert backend.memory_allocator.memcheck()
    assert backend.get_memory_allocator() is backend.memory_allocator
    assert backend.get_allocator_backend() is backend


def test_attributes_of_the_storage_manager_that_callers_reach_into(manager):
    assert isinstance(manager.storage_backends, OrderedDict)
    assert list(manager.storage_backends) == [CPU]
    assert manager.storage_backends[CPU] is manager.local_cpu_backend is manager.allocator_backend
    assert manager.non_allocator_backends == []
    assert manager.loop.is_running()


def test_a_config_tells_what_was_set_explicitly():
    assert make_config(cache_policy="LFU")._user_set_keys >= {"cache_policy", "chunk_size"}


def test_metadata_is_positional_as_in_0_5_6():
    metadata = LMCacheMetadata("m", 2, 1, 1, 0, torch.half, (3, 2, 16, 4, 8), True, "worker")

    assert (metadata.model_name, metadata.world_size, metadata.local_world_size) == ("m", 2, 1)
    assert (metadata.worker_id, metadata.local_worker_id) == (1, 0)
    assert (metadata.kv_dtype, metadata.use_mla, metadata.role) == (torch.half, True, "worker")
    assert metadata.get_shapes(5) == [torch.Size([2, 3, 5, 32])]


def test_a_plugin_of_0_5_6_needs_only_the_methods_that_were_abstract_there():
    assert StorageBackendInterface.__abstractmethods__ <= {
        "contains",
        "exists_in_put_tasks",
        "batched_submit_put_task",
        "get_blocking",
        "pin",
        "unpin",
        "remove",
        "get_allocator_backend",
        "close",
    }


@pytest.mark.parametrize("name", ["LRU", "lfu", "Fifo", "MRU"])
def test_a_policy_is_found_by_name_in_any_case(name):
    assert isinstance(get_cache_policy(name), BaseCachePolicy)


def test_an_unknown_policy_is_a_value_error_with_the_known_names():
    with pytest.raises(ValueError, match="LRU, LFU, FIFO, MRU"):
        get_cache_policy("ARC")


def test_put_of_one_object_is_refused_as_in_0_5_6(manager):
    with pytest.raises(RuntimeError, match="batched_put"):
        manager.put(keys(1)[0], None)


def test_objects_are_copied_into_the_pool_until_it_is_full(make_manager):
    sm = make_manager(num_chunks=2)
    sources = AdHocMemoryAllocator().batched_allocate(CHUNK_SHAPE, torch.bfloat16, 3)
    for number, source in enumerate(sources):
        source.raw_tensor.fill_(number)

    copied, copies = allocate_and_copy_objects(sm.local_cpu_backend, keys(3), sources)

    assert list(copied) == keys(2)
    assert [int(copy.raw_tensor.float().mean()) for copy in copies] == [0, 1]
    for copy in copies:
        copy.ref_count_down()
