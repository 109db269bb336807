"""What the bytes of an object must be: a 64-bit word made from its kind and prefix, repeated."""

import enum

import torch

_MASK = (1 << 63) - 1
_SPREAD = 0x1E37_79B9_7F4A_7C15
"""Odd, so that multiplying by it permutes the 63-bit integers."""
_UNSPREAD = pow(_SPREAD, -1, 1 << 63)


class Kind(enum.IntEnum):
    """What an object of the pool holds."""

    KV = 0
    IMAGE = 1


def chunk_hash(kind: Kind, prefix_id: int) -> int:
    """Return the 63-bit word of a prefix's KV block or state image, distinct for each.

    It is what the object's bytes repeat, and for an image the chunk hash in its key as well.
    """
    return ((prefix_id << 1 | kind) * _SPREAD) & _MASK


def kind_and_prefix(hash_value: int) -> tuple[Kind, int]:
    """Return what `chunk_hash` was given."""
    code = (hash_value * _UNSPREAD) & _MASK
    return Kind(code & 1), code >> 1


def fill(buffer: torch.Tensor, hash_value: int) -> None:
    """Write the bytes that belong to a hash; `buffer` is a flat uint8 CPU tensor, [8 n]."""
    buffer.view(torch.int64).fill_(hash_value)


def is_intact(buffer: torch.Tensor, hash_value: int, num_bytes: int) -> bool:
    """Return whether `buffer` has exactly `num_bytes` bytes and every one belongs to the hash."""
    return buffer.numel() == num_bytes and bool((buffer.view(torch.int64) == hash_value).all())
