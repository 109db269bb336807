"""Canonical CBOR (RFC 8949 section 4.2) for the few shapes that chunk hashes need.

Whole numbers of up to 64 bits, bytes, texts, booleans, null and arrays of these. `cbor2` gives
the same bytes with `canonical=True`.
"""

import struct

import torch

_UNSIGNED, _NEGATIVE, _BYTES, _TEXT, _ARRAY = (major << 5 for major in (0, 1, 2, 3, 4))
_FALSE, _TRUE, _NULL = b"\xf4", b"\xf5", b"\xf6"
_LARGEST_IN_HEAD = 23
# Payload bytes after the head byte → number format; the head says 24 + the position in this list.
_PAYLOADS = ((1, ">B"), (2, ">H"), (4, ">I"), (8, ">Q"))


def encode(value: object) -> bytes:
    """Return the canonical CBOR bytes of `value`.

    Raises:
        ValueError: A number beyond 64 bits, or a type that is not covered; names it.
    """
    if value is None:
        return _NULL
    if isinstance(value, bool):
        return _TRUE if value else _FALSE
    if isinstance(value, int):
        return _head(_UNSIGNED, value) if value >= 0 else _head(_NEGATIVE, -1 - value)
    if isinstance(value, bytes):
        return _head(_BYTES, len(value)) + value
    if isinstance(value, str):
        text = value.encode()
        return _head(_TEXT, len(text)) + text
    if isinstance(value, (list, tuple)):
        return _head(_ARRAY, len(value)) + b"".join(map(encode, value))
    raise ValueError(f"{value!r} of type {type(value).__name__} cannot be part of a chunk hash")


def array_head(num_items: int) -> bytes:
    """Return the bytes that open an array of `num_items`."""
    return _head(_ARRAY, num_items)


def encode_numbers(numbers: torch.Tensor) -> tuple[bytes, torch.Tensor]:
    """Encode many whole numbers at once, none of them in Python.

    Args:
        numbers: [num_numbers], int64, CPU.

    Returns:
        The encodings in a row, and [num_numbers + 1], int64: where each begins, and the end.
    """
    sign = numbers >> 63
    magnitude = numbers ^ sign
    # 0 to 4: the number is in the head, or in a payload of 1, 2, 4 or 8 bytes.
    size_class = torch.zeros_like(numbers)
    for bound in (_LARGEST_IN_HEAD + 1, 1 << 8, 1 << 16, 1 << 32):
        size_class += magnitude >= bound
    sizes = torch.tensor((1, 2, 3, 5, 9))[size_class]
    bounds = torch.zeros(len(numbers) + 1, dtype=torch.int64)
    torch.cumsum(sizes, 0, out=bounds[1:])
    encoded = torch.empty(int(bounds[-1]), dtype=torch.uint8)
    head = torch.where(size_class == 0, magnitude, size_class + _LARGEST_IN_HEAD)
    encoded[bounds[:-1]] = (head | (sign & _NEGATIVE)).to(torch.uint8)
    for position in range(int(sizes.max()) - 1 if len(numbers) else 0):
        has_byte = sizes > position + 1
        low_byte = (magnitude[has_byte] >> (8 * position)) & 0xFF
        encoded[bounds[1:][has_byte] - 1 - position] = low_byte.to(torch.uint8)
    return encoded.numpy_free_bytes(), bounds


def _head(major: int, number: int) -> bytes:
    if number <= _LARGEST_IN_HEAD:
        return bytes((major | number,))
    for position, (num_bytes, number_format) in enumerate(_PAYLOADS):
        if number < 1 << (8 * num_bytes):
            return bytes((major | (24 + position),)) + struct.pack(number_format, number)
    raise ValueError(f"{number} needs more than 64 bits and cannot be part of a chunk hash")
