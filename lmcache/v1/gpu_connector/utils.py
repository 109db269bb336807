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
from array import array
from collections.abc import Sequence

import torch

from lmcache.v1.native import LEFT_OUT_ID

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
    if len(layer) != 2 or any(part.dim() != 4 for part in layer):
        raise ValueError(
            f"a layer's K and V must be [blocks, tokens, heads, head_size] each, not {_form(layer)}"
        )
    return list(layer)


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
        ValueError: A range that is reversed or outside the mapping.
        TypeError: A mapping that is not of integers.
    """
    mapping = _as_int64(slot_mapping)
    for start, end in _misfits(starts, ends, len(mapping)):
        raise ValueError(
            f"tokens {start} to {end} are outside the slot mapping of {len(mapping)} tokens; "
            "it must cover the request from its first token"
        )
    if not starts:
        return mapping[:0]
    if list(starts[1:]) == list(ends[:-1]):
        return mapping[starts[0] : ends[-1]]
    return torch.cat([mapping[start:end] for start, end in zip(starts, ends, strict=True)])


def leave_out_prefix(
    slots: torch.Tensor, starts: Sequence[int], ends: Sequence[int], num_tokens: int
) -> torch.Tensor:
    """Return `slots` with `LEFT_OUT_ID` for the tokens before `num_tokens` of the request.

    Args:
        slots: What `slots_of` gave for the same ranges; it is not changed.
        starts: First token of each range.
        ends: The token after each range.
        num_tokens: Tokens of the request to leave out.
    """
    if not starts or min(starts) >= num_tokens:
        return slots
    slots = slots.clone()
    at = 0
    for start, end in zip(starts, ends, strict=True):
        slots[at : at + max(0, min(end, num_tokens) - start)] = LEFT_OUT_ID
        at += end - start
    return slots


def _misfits(starts: Sequence[int], ends: Sequence[int], num_tokens: int) -> list[tuple[int, int]]:
    """Return the ranges that are reversed or outside the tokens; one pass in C if there is none."""
    ordered = len(starts) == len(ends) and all(map(operator.le, starts, ends))
    if ordered and (not starts or (min(starts) >= 0 and max(ends) <= num_tokens)):
        return []
    pairs = zip(starts, ends, strict=True)
    return [(start, end) for start, end in pairs if not 0 <= start <= end <= num_tokens]


def _as_int64(slot_mapping: SlotMapping) -> torch.Tensor:
    if not isinstance(slot_mapping, torch.Tensor):
        ids = array("q", slot_mapping)
        return torch.frombuffer(ids, dtype=torch.int64) if ids else torch.empty(0).long()
    if slot_mapping.is_floating_point() or slot_mapping.dim() != 1:
        raise TypeError(
            "the slot mapping must be flat and of integers, not "
            f"{slot_mapping.dtype} of {slot_mapping.dim()} axes"
        )
    return slot_mapping.to("cpu", torch.int64)


def _form(layer: KVLayer) -> str:
    if isinstance(layer, torch.Tensor):
        return f"a tensor of shape {tuple(layer.shape)}"
    return f"{len(layer)} tensors of shapes {[tuple(part.shape) for part in layer]}"
