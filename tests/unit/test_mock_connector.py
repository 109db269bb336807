"""The connector that copies nothing."""

import torch
from builders import make_metadata

from lmcache.utils import EngineType
from lmcache.v1.gpu_connector import CreateGPUConnector, GPUConnectorInterface, MockGPUConnector
from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import AdHocMemoryAllocator

KV_SHAPE = (3, 2, 16, 4, 8)


def test_the_shape_keeps_the_axes_of_kv_shape():
    connector = MockGPUConnector(KV_SHAPE)
    assert connector.get_shape(5) == torch.Size([3, 2, 5, 4, 8])
    assert connector.get_shape() == torch.Size(KV_SHAPE)


def test_every_call_is_answered_and_no_byte_moves():
    connector = CreateGPUConnector(None, make_metadata(kv_shape=KV_SHAPE), EngineType.MOCK)
    assert isinstance(connector, MockGPUConnector) and isinstance(connector, GPUConnectorInterface)
    obj = AdHocMemoryAllocator().allocate(torch.Size([64]), torch.uint8)
    obj.raw_tensor.fill_(3)

    connector.from_gpu(obj, 0, 16, anything=1)
    connector.to_gpu(obj, 0, 16)
    connector.batched_from_gpu([obj], [0], [16])
    connector.batched_to_gpu([obj], [0], [16])

    assert bool((obj.raw_tensor == 3).all()) and obj.get_ref_count() == 1


def test_kvcaches_are_kept():
    connector = MockGPUConnector(KV_SHAPE)
    connector.initialize_kvcaches_ptr(kvcaches=["layer"])
    connector.initialize_kvcaches_ptr()
    assert connector.kvcaches == ["layer"]
