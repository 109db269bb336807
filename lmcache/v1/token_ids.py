"""Token ids as the hash algorithms take them: converted once a call, never one by one in Python."""

import ctypes
import struct
import sys
from collections.abc import Sequence
from typing import TypeAlias

import torch

from lmcache.v1.native import pack_int64

TokenIds: TypeAlias = torch.Tensor | Sequence[int]
TOKEN_BYTES = 8


def check_tokens(tokens: TokenIds) -> None:
    """Refuse what is no row of token ids.

    Raises:
        ValueError: A tensor that is not one-dimensional or not of whole numbers, or another type
            than a tensor, list, tuple or the like; names what it is.
    """
    if isinstance(tokens, torch.Tensor):
        is_whole = not (tokens.is_floating_point() or tokens.is_complex())
        has_values = tokens.layout == torch.strided and not tokens.is_meta
        if tokens.dim() != 1 or not is_whole or tokens.dtype == torch.bool or not has_values:
            raise ValueError(
                f"Unsupported tokens: a tensor of shape {list(tokens.shape)}, {tokens.dtype} and "
                f"{tokens.layout} on {tokens.device}; token ids are one row of whole numbers"
            )
    elif not isinstance(tokens, Sequence) or isinstance(tokens, (str, bytes, bytearray)):
        raise ValueError(
            f"Unsupported tokens type: {type(tokens).__name__}; use a list or an integer tensor"
        )


def token_bytes(tokens: TokenIds) -> bytes:
    """Return [num_tokens] ids as little-endian int64.

    Raises:
        ValueError: See `check_tokens`; or an id is no whole number of 64 bits.
    """
    check_tokens(tokens)
    if isinstance(tokens, torch.Tensor):
        if sys.byteorder == "little":
            return tensor_bytes(tokens.to(device="cpu", dtype=torch.int64))
        tokens = tokens.tolist()
    return pack_int64(tokens)


def token_ints(tokens: TokenIds) -> tuple[int, ...]:
    """Return the ids as plain ints, whatever integer type the list holds.

    Raises:
        ValueError: See `token_bytes`.
    """
    data = token_bytes(tokens)
    return struct.unpack(f"<{len(data) // TOKEN_BYTES}q", data)


def token_list(tokens: TokenIds) -> list[int]:
    """Return the ids as a list.

    Raises:
        ValueError: See `check_tokens`.
    """
    check_tokens(tokens)
    if isinstance(tokens, torch.Tensor):
        ids: list[int] = tokens.tolist()
        return ids
    return tokens if isinstance(tokens, list) else list(tokens)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Return a copy of the bytes of a CPU tensor, in row-major order."""
    contiguous = tensor.contiguous()
    return ctypes.string_at(contiguous.data_ptr(), contiguous.nbytes)
