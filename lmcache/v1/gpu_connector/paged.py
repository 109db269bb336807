"""vLLM's paged KV cache: slots of one token, K and V per layer."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from lmcache.v1.errors import UnsupportedFeatureError
from lmcache.v1.gpu_connector import utils
from lmcache.v1.gpu_connector.connector_interface import GPUConnectorInterface
from lmcache.v1.gpu_connector.ids import leading_skips, num_cached_tokens
from lmcache.v1.memory_format import MemoryFormat
from lmcache.v1.memory_object import MemoryObj
from lmcache.v1.memory_ops import BlockLayout, check_num_threads, gather, scatter
from lmcache.v1.metadata import LMCacheMetadata

KVCaches = Mapping[str, utils.KVLayer] | Sequence[utils.KVLayer]
_KNOWN_KV_LAYOUTS = (None, "NHD", "HND")


class _Registered(NamedTuple):
    layers: tuple[utils.KVLayer, ...]  # as given
    layout: BlockLayout
    dtype: torch.dtype


class VLLMPagedMemGPUConnectorV2(GPUConnectorInterface):
    """Copies between vLLM's paged KV cache and objects of [2, layers, tokens, hidden].

    Keywords of the calls:
        kvcaches: One entry a layer, list or dict; see `utils` for the forms. Kept, so that later
            calls may come without.
        slot_mapping: Slot of each token of the whole request; a range takes [start:end] of it.
        vllm_cached_tokens: `to_gpu` leaves out the tokens before it: other requests may be
            reading them.
        Others are ignored; so is `offset`, which vLLM's adapter sends along with a mapping of the
        whole request.

    Bytes are copied as they are, whatever their dtype. On this build the caches must be in host
    memory.

    Args:
        hidden_dim_size: Elements of one token in one tensor: heads times head size.
        num_layers: Layers of the KV cache.
        use_gpu: Accepted; the CPU core needs no buffer on the device.
        **kwargs: `use_mla`; `layout_hints` with `kv_layout` ("NHD" or "HND", checked against the
            strides) and `kv_axis` (0 or 1, for a cache of 2 blocks); `num_heads`, checked;
            `num_threads` that share a large copy. Others are ignored.

    Threads: concurrent calls are allowed.
    Source: upstream 0.5.6 v1/gpu_connector/gpu_connectors.py, same bytes.
    """

    def __init__(
        self, hidden_dim_size: int, num_layers: int, use_gpu: bool = False, **kwargs: Any
    ) -> None:
        hints = kwargs.get("layout_hints") or {}
        if not isinstance(hints, Mapping):
            raise TypeError(f"layout_hints must be a mapping, not {hints!r}")
        if hints.get("kv_layout") not in _KNOWN_KV_LAYOUTS:
            raise UnsupportedFeatureError(
                f"layout_hints: kv_layout {hints['kv_layout']!r} is not supported; use NHD or HND"
            )
        self.hidden_dim_size = hidden_dim_size
        self.num_layers = num_layers
        self.use_mla = bool(kwargs.get("use_mla"))
        self.num_threads = check_num_threads(kwargs.get("num_threads", 1))
        self._num_heads: int | None = kwargs.get("num_heads")
        self._kv_axis = utils.check_kv_axis(hints.get("kv_axis"))
        self._kv_layout: str | None = hints.get("kv_layout")
        self._registered: _Registered | None = None

    @classmethod
    def from_metadata(
        cls,
        metadata: LMCacheMetadata,
        use_gpu: bool = False,
        device: torch.device | None = None,
        layout_hints: Mapping[str, Any] | None = None,
    ) -> "VLLMPagedMemGPUConnectorV2":
        """Return a connector for the KV shape that the metadata describes.

        Args:
            metadata: Its `kv_shape` and `use_mla` are read.
            use_gpu: As in the constructor.
            device: Accepted; the device is that of the caches.
            layout_hints: As in the constructor.

        Raises:
            UnsupportedFeatureError: The layers are in groups of different KV layout.
        """
        if metadata.get_num_groups() > 1:
            raise UnsupportedFeatureError(
                f"kv_layer_groups_manager: {metadata.get_num_groups()} groups of layers with "
                "different KV layouts are not supported; use upstream LMCache"
            )
        num_layers, _, _, num_heads, head_size = metadata.kv_shape
        return cls(
            num_heads * head_size,
            num_layers,
            use_gpu,
            use_mla=metadata.use_mla,
            num_heads=num_heads,
            layout_hints=layout_hints,
        )

    @property
    def kvcaches(self) -> tuple[utils.KVLayer, ...] | None:
        """The KV cache per layer, or None before it is known."""
        return self._registered.layers if self._registered is not None else None

    def initialize_kvcaches_ptr(self, **kwargs: Any) -> None:
        """Remember `kvcaches`, if given.

        Raises:
            ValueError: Layers whose number, form, dtype or device cannot be used; the message
                names the layer.
        """
        if kwargs.get("kvcaches") is not None:
            self._registered = self._register(kwargs["kvcaches"])

    def batched_to_gpu(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        **kwargs: Any,
    ) -> None:
        """Write objects into the slots of their tokens, but for `vllm_cached_tokens`.

        Raises:
            ValueError: No kvcaches or slot mapping, an object of another format, dtype or shape, a
                freed object, a range outside the mapping, a slot outside the cache or there twice,
                a negative `vllm_cached_tokens`. Nothing was written.
            TypeError: A slot mapping or `vllm_cached_tokens` that is not of whole numbers.
        """
        registered, slots = self._prepare(memory_objs, starts, ends, kwargs)
        num_cached = num_cached_tokens("vllm_cached_tokens", kwargs.get("vllm_cached_tokens"))
        skips = leading_skips(starts, ends, num_cached)
        lengths = _lengths(starts, ends)
        scatter(memory_objs, slots, lengths, registered.layout, self.num_threads, skips)

    def batched_from_gpu(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        **kwargs: Any,
    ) -> None:
        """Read the slots of ranges of tokens into objects.

        Raises:
            ValueError, TypeError: As for `batched_to_gpu`. Nothing was written.
        """
        registered, slots = self._prepare(memory_objs, starts, ends, kwargs)
        gather(memory_objs, slots, _lengths(starts, ends), registered.layout, self.num_threads)

    def get_shape(self, num_tokens: int) -> torch.Size:
        """Return [2 (1 for MLA), layers, tokens, hidden]."""
        return utils.kv_shape(self.num_layers, num_tokens, self.hidden_dim_size, self.use_mla)

    def _prepare(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        kwargs: Mapping[str, Any],
    ) -> tuple[_Registered, torch.Tensor]:
        if not len(memory_objs) == len(starts) == len(ends):
            raise ValueError(
                f"{len(memory_objs)} memory objects do not go with {len(starts)} starts and "
                f"{len(ends)} ends"
            )
        registered = self._registered
        if kwargs.get("kvcaches") is not None:
            registered = self._registered = self._register(kwargs["kvcaches"])
        if registered is None:
            raise ValueError("pass kvcaches= once, here or to initialize_kvcaches_ptr")
        if kwargs.get("slot_mapping") is None:
            raise ValueError("pass slot_mapping=, the slot of each token of the request")
        slots = utils.slots_of(kwargs["slot_mapping"], starts, ends)
        lengths = _lengths(starts, ends)
        shapes = {num_tokens: self.get_shape(num_tokens) for num_tokens in set(lengths)}
        for index, memory_obj in enumerate(memory_objs):
            self._check_object(index, memory_obj, shapes[lengths[index]], registered.dtype)
        return registered, slots

    def _check_object(
        self, index: int, memory_obj: MemoryObj, shape: torch.Size, dtype: torch.dtype
    ) -> None:
        fmt = MemoryFormat.KV_MLA_FMT if self.use_mla else MemoryFormat.KV_2LTD
        if memory_obj.is_laid_out_as(shape, dtype, fmt):
            return
        found = memory_obj.get_shapes()
        raise ValueError(
            f"memory object {index} is {memory_obj.get_memory_format()}, "
            f"{memory_obj.get_dtypes()}, {[tuple(one) for one in found]}; the KV cache needs "
            f"{fmt}, {dtype}, {tuple(shape)}"
        )

    def _register(self, kvcaches: KVCaches) -> _Registered:
        if not isinstance(kvcaches, (Mapping, Sequence, torch.Tensor)):
            raise TypeError(
                f"kvcaches must be a list or dict of layers, not {type(kvcaches).__name__}"
            )
        layers = tuple(kvcaches.values() if isinstance(kvcaches, Mapping) else kvcaches)
        known = self._registered
        if known is not None and list(map(id, layers)) == list(map(id, known.layers)):
            return known
        if len(layers) != self.num_layers:
            raise ValueError(f"kvcaches has {len(layers)} layers, the model {self.num_layers}")
        split = [self._split(index, layer) for index, layer in enumerate(layers)]
        for index, views in enumerate(split):
            for view in views:
                self._check_view(index, view, split[0][0])
        parts = [utils.parts_of(views[kv]) for kv in range(len(split[0])) for views in split]
        try:
            layout = BlockLayout.from_views(
                [part for some in parts for part in some],
                len(parts[0]),
                may_repeat=True,  # vLLM registers layers that share their KV under several names
            )
        except ValueError as error:
            raise ValueError(
                f"kvcaches: {error} (a layer has {len(parts[0])} segments for K, and as many for V "
                "after those of all layers)"
            ) from None
        return _Registered(layers, layout, split[0][0].dtype)

    def _split(self, index: int, layer: utils.KVLayer) -> list[torch.Tensor]:
        try:
            return utils.split_layer(layer, self.use_mla, self._kv_axis)
        except ValueError as error:
            raise ValueError(f"kvcaches: layer {index}: {error}") from None

    def _check_view(self, index: int, view: torch.Tensor, first: torch.Tensor) -> None:
        """`view` and `first` are [blocks, tokens, heads, head_size]."""
        if 0 in view.shape:
            raise ValueError(f"layer {index} of shape {tuple(view.shape)} holds no slot")
        num_heads = 1 if self.use_mla else self._num_heads
        if view.shape[2] * view.shape[3] != self.hidden_dim_size or num_heads not in (
            None,
            view.shape[2],
        ):
            raise ValueError(
                f"layer {index} has {view.shape[2]} heads of {view.shape[3]}, but the metadata "
                f"says hidden size {self.hidden_dim_size}, heads {num_heads}"
            )
        if (view.shape, view.dtype, view.device) != (first.shape, first.dtype, first.device):
            raise ValueError(
                f"layer {index} is {tuple(view.shape)} {view.dtype} on {view.device}, layer 0 "
                f"{tuple(first.shape)} {first.dtype} on {first.device}; layers must be alike"
            )
        adjacent = utils.heads_are_adjacent(view)
        if adjacent != utils.heads_are_adjacent(first):
            raise ValueError(f"layer {index} has its heads in another order of memory than layer 0")
        if self._kv_layout == "HND" and adjacent and min(view.shape[1:3]) > 1:
            raise ValueError(
                f"layer {index}: layout_hints say HND, the strides {view.stride()} say NHD; pass "
                "the view [blocks, tokens, heads, head_size] of the HND memory"
            )


def _lengths(starts: Sequence[int], ends: Sequence[int]) -> list[int]:
    return list(map(operator.sub, ends, starts))
