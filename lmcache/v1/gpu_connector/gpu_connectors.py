"""The connectors' contract and the connector of vLLM, where 0.5.6 has them."""

from lmcache.v1.gpu_connector.connector_interface import GPUConnectorInterface
from lmcache.v1.gpu_connector.paged import VLLMPagedMemGPUConnectorV2

__all__ = ["GPUConnectorInterface", "VLLMPagedMemGPUConnectorV2"]
