"""Arithmetic of KV layouts: views of paged caches, slots of token ranges, shapes.

B blocks of T tokens (slots), H heads of size D. What one layer of a serving engine may be:

    [2, B, T, H, D]            K and V in one tensor (flash attention)
    [B, 2, T, H, D]            K and V side by side in every block (flash infer)
    (K, V), each [B, T, H, D]  a pair
    [B, T, hidden]             MLA

The strides tell the order of memory. Where the heads of a token do not lie side by side (HND), each
head is a part of its own.
"""

import operator
from collections.abc import Sequence

import torch

from lmcache.v1.gpu_connector.ids import int64_ids

KVLayer = torch.Tensor | Sequence[torch.Tensor]
SlotMapping = torch.Tensor | Sequence[int]


def kv_shape(num_layers: int, num_tokens: int, hidden_dim_size: int, use_mla: bool) -> torch.Size:
    """Return [2 (1 for MLA), layers, tokens, hidden], the shape of an object."""
    return torch.Size((1 if use_mla else 2, num_layers, num_tokens, hidden_dim_size))


def kv_axis(shape: Sequence[int], known: int | None = None) -> int:
    """Return which axis of a rank-5 layer tells K from V: 0 or 1.

    Args:
        shape: Of the layer.
        known: The axis, where somebody said it.

    Raises:
        ValueError: Both axes or neither could be it.
    """
    axes = (0, 1) if known is None else (known,)
    candidates = [axis for axis in axes if len(shape) == 5 and shape[axis] == 2]
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise ValueError(
            f"KV cache of shape {tuple(shape)} is ambiguous: with 2 blocks, axis 0 or 1 may tell K "
            "from V; pass (K, V) pairs, or layout_hints={'kv_axis': 0 or 1}"
        )
    raise ValueError(
        f"KV cache of shape {tuple(shape)} is none of [2, blocks, tokens, heads, head_size], "
        "[blocks, 2, tokens, heads, head_size] or a (K, V) pair; MLA needs use_mla=True"
    )


def split_layer(layer: KVLayer, use_mla: bool, axis: int | None = None) -> list[torch.Tensor]:
    """Return K and V of one layer, [B, T, H, D] each, or MLA's one tensor, [B, T, 1, hidden].

    Args:
        layer: One of the forms above.
        use_mla: The layer is one tensor for K and V.
        axis: Which axis of a single tensor tells K from V, where it is known.

    Raises:
        ValueError: Another form, or an ambiguous one.
    """
    if use_mla:
        if not isinstance(layer, torch.Tensor) or layer.dim() != 3:
            raise ValueError(f"an MLA layer must be [blocks, tokens, hidden], not {_form(layer)}")
        return [layer.unsqueeze(2)]
    if isinstance(layer, torch.Tensor):
        return list(layer.unbind(kv_axis(layer.shape, axis)))
    if not isinstance(layer, (list, tuple)) or [
        part.dim() if isinstance(part, torch.Tensor) else None for part in layer
    ] != [4, 4]:
        raise ValueError(
            f"a layer's K and V must be [blocks, tokens, heads, head_size] each, not {_form(layer)}"
        )
    return list(layer)


def check_kv_axis(axis: object) -> int | None:
    """Return the hint which axis tells K from V; ValueError when it is not None, 0 or 1."""
    if axis is None:
        return None
    if not isinstance(axis, int) or isinstance(axis, bool) or axis not in (0, 1):
        raise ValueError(f"layout_hints: kv_axis must be 0 or 1, not {axis!r}")
    return axis


def heads_are_adjacent(view: torch.Tensor) -> bool:
    """Whether the heads of a token lie side by side in memory; `view` is [B, T, H, D]."""
    return view[0, 0].is_contiguous()


def parts_of(view: torch.Tensor) -> list[torch.Tensor]:
    """Return [B, T, H, D] as the parts whose items are contiguous: itself, or its heads."""
    return [view] if heads_are_adjacent(view) else list(view.unbind(2))


def slots_of(slot_mapping: SlotMapping, starts: Sequence[int], ends: Sequence[int]) -> torch.Tensor:
    """Return the slots of token ranges, one range after the other: flat int64 on the CPU.

    Ranges that follow one another are taken without a copy from an int64 tensor on the CPU.

    Args:
        slot_mapping: Slot of each token of the whole request, [num_tokens].
        starts: First token of each range.
        ends: The token after each range.

    Raises:
        ValueError: A range that is reversed or outside the mapping; a mapping that is no row.
        TypeError: A mapping that is not of integers.
    """
    mapping = int64_ids("slot_mapping", slot_mapping)
    for start, end in _misfits(starts, ends, len(mapping)):
        raise ValueError(
            f"tokens {start} to {end} are outside the slot mapping of {len(mapping)} tokens; "
            "it must cover the request from its first token"
        )
    return take_ranges(mapping, starts, ends)


def take_ranges(ids: torch.Tensor, starts: Sequence[int], ends: Sequence[int]) -> torch.Tensor:
    """Return ranges of a flat tensor, one after the other; a view if they follow one another."""
    if not starts:
        return ids[:0]
    if list(starts[1:]) == list(ends[:-1]):
        return ids[starts[0] : ends[-1]]
    return torch.cat([ids[start:end] for start, end in zip(starts, ends, strict=True)])


def _misfits(starts: Sequence[int], ends: Sequence[int], num_tokens: int) -> list[tuple[int, int]]:
    """Return the ranges that are reversed or outside the tokens; one pass in C if there is none."""
    ordered = len(starts) == len(ends) and all(map(operator.le, starts, ends))
    if ordered and (not starts or (min(starts) >= 0 and max(ends) <= num_tokens)):
        return []
    pairs = zip(starts, ends, strict=True)
    return [(start, end) for start, end in pairs if not 0 <= start <= end <= num_tokens]


def _form(layer: KVLayer) -> str:
    if isinstance(layer, torch.Tensor):
        return f"a tensor of shape {tuple(layer.shape)}"
    if isinstance(layer, (list, tuple)) and all(isinstance(part, torch.Tensor) for part in layer):
        return f"{len(layer)} tensors of shapes {[tuple(part.shape) for part in layer]}"
    return f"{type(layer).__name__} {layer!r}"
