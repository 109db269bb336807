"""Canonical CBOR (RFC 8949 section 4.2) for the few shapes that chunk hashes need.

Whole numbers of up to 64 bits, bytes, texts, booleans, null and arrays of these. `cbor2` gives
the same bytes with `canonical=True`.
"""

import struct
from collections.abc import Iterable

_UNSIGNED, _NEGATIVE, _BYTES, _TEXT, _ARRAY = (major << 5 for major in (0, 1, 2, 3, 4))
_FALSE, _TRUE, _NULL = b"\xf4", b"\xf5", b"\xf6"
_LARGEST_IN_HEAD = 23
# More than a vocabulary has; some 30 MB when full.
_MOST_KNOWN_NUMBERS = 1 << 18
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


def encode_numbers(numbers: Iterable[int]) -> bytes:
    """Return the encodings of many whole numbers in a row, as fast as looking each up.

    Threads: safe from any thread.
    """
    return b"".join(map(_KNOWN_NUMBERS.__getitem__, numbers))


class _KnownNumbers(dict[int, bytes]):
    """Number → encoding, for numbers that come again, as token ids do; starts anew when full."""

    def __missing__(self, number: int) -> bytes:
        if len(self) >= _MOST_KNOWN_NUMBERS:
            self.clear()
        encoded = self[number] = encode(number)
        return encoded


_KNOWN_NUMBERS = _KnownNumbers()


def _head(major: int, number: int) -> bytes:
    if number <= _LARGEST_IN_HEAD:
        return bytes((major | number,))
    for position, (num_bytes, number_format) in enumerate(_PAYLOADS):
        if number < 1 << (8 * num_bytes):
            return bytes((major | (24 + position),)) + struct.pack(number_format, number)
    raise ValueError(f"{number} needs more than 64 bits and cannot be part of a chunk hash")
