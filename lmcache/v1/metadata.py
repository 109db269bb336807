"""`LMCacheMetadata`: model, ranks, dtype and KV shape of one worker."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch


class KVShapeDescription(Protocol):
    """How one group of layers lays out its KV: 2 for K and V, 1 for MLA's single tensor."""

    @property
    def kv_size(self) -> int:
        """Tensors per layer."""
        ...


class KVLayerGroup(Protocol):
    """Layers that share one KV layout."""

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        ...

    @property
    def num_layers(self) -> int:
        """Layers in the group."""
        ...

    @property
    def hidden_dim_size(self) -> int:
        """Elements of one token in one tensor: heads times head size."""
        ...

    @property
    def shape_desc(self) -> KVShapeDescription:
        """Layout of the group."""
        ...


class KVLayerGroups(Protocol):
    """What a serving engine registers when its layers differ in KV layout."""

    @property
    def kernel_groups(self) -> Sequence[KVLayerGroup]:
        """The groups, in the order of their bytes inside a chunk; empty until registered."""
        ...


@dataclass
class LMCacheMetadata:
    """What the cache must know of the serving engine; positional order as in upstream 0.5.6.

    Serving engines pass proxies of it, so the engine reads these attributes and accessors and
    checks no type.

    Attributes:
        model_name: Part of every key.
        world_size: Ranks over all hosts.
        local_world_size: Ranks on this host.
        worker_id: This rank over all hosts.
        local_worker_id: This rank on its host.
        kv_dtype: Element type of the KV cache.
        kv_shape: (layers, 2 or 1 for MLA, chunk_size, kv_heads, head_size).
        use_mla: K and V are one tensor, alike on all ranks.
        role: "scheduler" (no pool) or "worker".
        served_model_name: Name shown in metrics.
        chunk_size: Tokens of a full chunk.
        kv_layer_groups_manager: Set when layers differ in KV layout.
        engine_id: Names the engine in the paths of the lookup sockets.
        kv_connector_extra_config: The serving engine's own options for its connector.
    """

    model_name: str
    world_size: int
    local_world_size: int
    worker_id: int
    local_worker_id: int
    kv_dtype: torch.dtype
    kv_shape: tuple[int, int, int, int, int]
    use_mla: bool = False
    role: str | None = None
    first_rank: ClassVar[int] = 0
    served_model_name: str | None = None
    chunk_size: int = 256
    kv_layer_groups_manager: KVLayerGroups | None = None
    engine_id: str | None = None
    kv_connector_extra_config: dict[str, Any] | None = None

    def is_first_rank(self) -> bool:
        """Return whether this is rank 0."""
        return self.worker_id == self.first_rank

    def get_dtypes(self) -> list[torch.dtype]:
        """Return the element type of each layer group."""
        groups = self._groups()
        return [group.dtype for group in groups] if groups else [self.kv_dtype]

    def get_shapes(self, num_tokens: int | None = None) -> list[torch.Size]:
        """Return the shape [kv, layers, tokens, heads * head_size] of each layer group.

        Args:
            num_tokens: Tokens of the chunk; a full chunk if None.
        """
        tokens = self.chunk_size if num_tokens is None else num_tokens
        groups = self._groups()
        if groups:
            return [
                torch.Size(
                    (group.shape_desc.kv_size, group.num_layers, tokens, group.hidden_dim_size)
                )
                for group in groups
            ]
        num_layers, kv_size, _, num_heads, head_size = self.kv_shape
        return [torch.Size((kv_size, num_layers, tokens, num_heads * head_size))]

    def get_num_groups(self) -> int:
        """Return how many layer groups a chunk holds."""
        return len(self._groups()) or 1

    def _groups(self) -> Sequence[KVLayerGroup]:
        manager = self.kv_layer_groups_manager
        return manager.kernel_groups if manager is not None else ()
