"""A connector that copies nothing, for when only the bookkeeping matters."""

from collections.abc import Sequence
from typing import Any

import torch

from lmcache.v1.gpu_connector.connector_interface import GPUConnectorInterface
from lmcache.v1.memory_object import MemoryObj


class MockGPUConnector(GPUConnectorInterface):
    """Answers every call and copies nothing.

    Args:
        kv_shape: (layers, 2 or 1 for MLA, tokens of a chunk, heads, head size).
    """

    def __init__(self, kv_shape: tuple[int, int, int, int, int]) -> None:
        self.kv_shape = kv_shape
        self.num_layers = kv_shape[0]
        self.kvcaches: Any = None

    def batched_to_gpu(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        **kwargs: Any,
    ) -> None:
        """Do nothing."""

    def batched_from_gpu(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        **kwargs: Any,
    ) -> None:
        """Do nothing: the objects keep the bytes they have."""

    def get_shape(self, num_tokens: int | None = None) -> torch.Size:
        """Return (layers, kv, tokens, heads, head size); a chunk's tokens if None."""
        num_layers, kv_size, chunk_tokens, num_heads, head_size = self.kv_shape
        num_tokens = chunk_tokens if num_tokens is None else num_tokens
        return torch.Size((num_layers, kv_size, num_tokens, num_heads, head_size))

    def initialize_kvcaches_ptr(self, **kwargs: Any) -> None:
        """Remember the `kvcaches` given, if any."""
        self.kvcaches = kwargs.get("kvcaches", self.kvcaches)
