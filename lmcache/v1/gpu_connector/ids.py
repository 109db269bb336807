"""Block ids and slot mappings as serving engines give them: whole numbers, or refused by name."""

import operator
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lmcache.v1.native import pack_int64

_INTEGER_DTYPES = frozenset(
    [
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ]
)
_INTEGER_FORMATS = frozenset("hHiIlLqQ")  # of the buffer protocol; bytes are not ids
_INT64_RANGE = range(-(2**63), 2**63)


def int64_ids(keyword: str, ids: Any) -> torch.Tensor:
    """Return ids as a flat int64 tensor on the CPU; one that is so already is not copied.

    Args:
        keyword: What the caller calls them; errors begin with it.
        ids: A list, tuple or other sequence of whole numbers, a buffer of them (a NumPy array), or
            a tensor of any integer dtype on any device; one row.

    Raises:
        TypeError: Not of whole numbers: text, bytes, sets and mappings; truth values and floats,
            as elements or as a tensor's dtype.
        ValueError: No row, no values (a meta or sparse tensor), or a number beyond 64 bits.
    """
    if isinstance(ids, torch.Tensor):
        return _from_tensor(keyword, ids)
    if isinstance(ids, (str, bytes, bytearray)):
        raise TypeError(f"{keyword} must be whole numbers, not {type(ids).__name__}")
    if isinstance(ids, memoryview) or not isinstance(ids, Sequence):
        ids = _from_buffer(keyword, ids)
    if set(map(type, ids)) - {int}:
        ids = [whole_number(f"{keyword}[{index}]", n) for index, n in enumerate(ids)]
    try:
        packed = array("q", pack_int64(ids))
    except ValueError:
        index = next(i for i, number in enumerate(ids) if number not in _INT64_RANGE)
        raise ValueError(f"{keyword}[{index}] is {ids[index]}: it must fit into 64 bits") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return torch.frombuffer(packed, dtype=torch.int64) if packed else torch.empty(0).long()


def _from_tensor(keyword: str, ids: torch.Tensor) -> torch.Tensor:
    if ids.dtype not in _INTEGER_DTYPES:
        raise TypeError(f"{keyword} must be of integers, not a tensor of {ids.dtype}")
    if ids.dim() != 1:
        raise ValueError(f"{keyword} must be one row, not a tensor of shape {list(ids.shape)}")
    if ids.layout != torch.strided or ids.is_meta:
        raise ValueError(f"{keyword} must hold values, not be {ids.layout} on {ids.device}")
    on_host = ids.to("cpu", torch.int64)
    if ids.dtype is torch.uint64 and bool((on_host < 0).any()):
        index = int((on_host < 0).nonzero()[0])
        raise ValueError(f"{keyword}[{index}] does not fit into a signed number of 64 bits")
    return on_host


def _from_buffer(keyword: str, ids: Any) -> list[int]:
    try:
        view = memoryview(ids)
    except TypeError:
        raise TypeError(
            f"{keyword} must be a list or a tensor of whole numbers, not {type(ids).__name__}"
        ) from None
    if view.format not in _INTEGER_FORMATS:
        raise TypeError(f"{keyword} must be of integers, not elements of format {view.format!r}")
    if view.ndim != 1:
        raise ValueError(f"{keyword} must be one row, not of shape {list(view.shape or ())}")
    numbers: list[int] = view.tolist()
    return numbers


def whole_number(name: str, number: Any) -> int:
    """Return a whole number as int; TypeError names what is none: truth values are not."""
    is_truth = isinstance(number, bool) or (
        isinstance(number, torch.Tensor) and number.dtype not in _INTEGER_DTYPES
    )
    try:
        if not is_truth:
            return operator.index(number)
    except (TypeError, ValueError):  # a tensor of several elements raises the latter
        pass
    raise TypeError(f"{name} must be a whole number, not {number!r}")


def num_cached_tokens(keyword: str, value: Any) -> int:
    """Return a count of leading tokens; None is 0.

    Raises:
        TypeError: No whole number.
        ValueError: A negative one.
    """
    if value is None:
        return 0
    count = whole_number(keyword, value)
    if count < 0:
        raise ValueError(f"{keyword} must be at least 0, not {count}")
    return count


def leading_skips(starts: Iterable[int], ends: Iterable[int], num_tokens: int) -> list[int]:
    """Return how many leading tokens of each range lie before token `num_tokens`."""
    return [max(0, min(end, num_tokens) - start) for start, end in zip(starts, ends, strict=True)]
