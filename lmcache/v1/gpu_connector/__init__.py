"""Connectors to serving engines' KV caches, and the one that fits an engine."""

from collections.abc import Mapping
from typing import Any

from lmcache.utils import EngineType
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.errors import UnsupportedFeatureError
from lmcache.v1.gpu_connector import utils
from lmcache.v1.gpu_connector.gpu_connectors import (
    GPUConnectorInterface,
    VLLMPagedMemGPUConnectorV2,
)
from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
from lmcache.v1.gpu_connector.raw_block import BlockOrder, RawBlockConnector
from lmcache.v1.metadata import LMCacheMetadata

__all__ = [
    "BlockOrder",
    "CreateGPUConnector",
    "GPUConnectorInterface",
    "MockGPUConnector",
    "RawBlockConnector",
    "VLLMPagedMemGPUConnectorV2",
    "utils",
]


def CreateGPUConnector(
    config: LMCacheEngineConfig,
    metadata: LMCacheMetadata,
    engine: EngineType,
    layout_hints: Mapping[str, Any] | None = None,
) -> GPUConnectorInterface:
    """Return the connector for a serving engine.

    Args:
        config: In 0.5.6's signature; no setting that is supported changes the choice.
        metadata: KV shape of the worker.
        engine: VLLM, or MOCK for a connector that copies nothing.
        layout_hints: What the serving engine says of its KV layout.

    Raises:
        UnsupportedFeatureError: Another engine.
    """
    if engine is EngineType.VLLM:
        return VLLMPagedMemGPUConnectorV2.from_metadata(metadata, layout_hints=layout_hints)
    if engine is EngineType.MOCK:
        return MockGPUConnector(metadata.kv_shape)
    if engine is EngineType.ATOM:
        raise UnsupportedFeatureError(
            "ATOM hands its own connector to LMCacheEngineBuilder.get_or_create; "
            "RawBlockConnector copies blocks such as its own"
        )
    raise UnsupportedFeatureError(f"there is no connector for {engine}; use upstream LMCache")
