"""The named chunk hash algorithms: parent hash and token ids of a chunk → hash of the chunk.

A chunk hash stands for the whole prefix that ends with the chunk. It is an int everywhere but on
the wire (`digest_bytes`).

| name        | value                                                                   |
|-------------|-------------------------------------------------------------------------|
| sha256      | below 2**128, alike in every process, machine and Python build          |
| sha256_cbor | below 2**64, what 0.5.6 gives beside vLLM with PYTHONHASHSEED=0         |
| builtin     | Python's hash of a tuple, 0.5.6's values without vLLM; may be negative  |

`sha256` hashes: 16 bytes of the parent's digest (zeros before the first chunk), then the token
ids as little-endian int64; the first 16 bytes of the digest, big endian, are the value. Extra
keys, where a chunk has any, follow as canonical CBOR, zeros up to a multiple of 8, the CBOR's
length as little-endian int64, and a byte 1: the total length modulo 8 tells whether there are
some, and the end tells where they begin, so no tokens and extra keys read like other ones.
"""

import hashlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

from lmcache.v1 import cbor
from lmcache.v1.errors import ConfigError
from lmcache.v1.token_ids import TOKEN_BYTES, TokenIds, token_bytes, token_ints, token_list

_DIGEST_BYTES = 16
_DIGEST_BOUND = 1 << (8 * _DIGEST_BYTES)
_FOLDED_BYTES = 8
_FOREIGN_PARENT = b"lmcache parent that is no sha256 digest"
# What vLLM takes as the parent of a first chunk with PYTHONHASHSEED=0.
_CBOR_SEED = "0"


class ChunkHasher(ABC):
    """One algorithm.

    Attributes:
        name: How settings call it.
        fits_64_bits: Its hashes are signed or unsigned integers of 64 bits.
        root: Parent of a first chunk.

    Threads: stateless, safe from any thread.
    """

    name: ClassVar[str]
    fits_64_bits: ClassVar[bool] = True
    root: int = 0

    @abstractmethod
    def chain(
        self, tokens: TokenIds, chunk_tokens: int, num_tokens: int, parent: int | None = None
    ) -> Iterator[int]:
        """Yield the hashes of the consecutive chunks of `tokens[:num_tokens]`.

        Args:
            tokens: [at least num_tokens] ids; a list and a tensor of any integer type hash alike.
            chunk_tokens: Tokens per chunk; the last one may be shorter.
            num_tokens: Where to stop.
            parent: Hash of the chunk before the first; `root` if None.

        Raises:
            ValueError: `tokens` are no token ids.
        """

    @abstractmethod
    def hash_chunk(
        self, tokens: TokenIds, parent: int | None = None, extra_keys: Sequence[object] = ()
    ) -> int:
        """Return the hash of one chunk.

        Args:
            tokens: [num_tokens] ids.
            parent: Hash of the chunk before it; `root` if None.
            extra_keys: What else the KV depends on: numbers, texts, bytes, None, lists of these.

        Raises:
            ValueError: `tokens` are no token ids, or an extra key cannot be hashed.
        """


class Sha256Hasher(ChunkHasher):
    """SHA-256 over the parent's digest and the token ids, cut to 128 bits."""

    name = "sha256"
    fits_64_bits = False

    def chain(
        self, tokens: TokenIds, chunk_tokens: int, num_tokens: int, parent: int | None = None
    ) -> Iterator[int]:
        """See `ChunkHasher.chain`."""
        data = token_bytes(tokens)[: num_tokens * TOKEN_BYTES]
        step = chunk_tokens * TOKEN_BYTES
        # Bound once: looking names up costs as much as a quarter of hashing a chunk.
        sha256, from_bytes = hashlib.sha256, int.from_bytes
        digest = _parent_digest(self.root if parent is None else parent)
        for start in range(0, len(data), step):
            digest = sha256(digest + data[start : start + step]).digest()[:_DIGEST_BYTES]
            yield from_bytes(digest, "big")

    def hash_chunk(
        self, tokens: TokenIds, parent: int | None = None, extra_keys: Sequence[object] = ()
    ) -> int:
        """See `ChunkHasher.hash_chunk`."""
        digest = _parent_digest(self.root if parent is None else parent)
        message = digest + token_bytes(tokens) + _extra_keys_suffix(extra_keys)
        return int.from_bytes(hashlib.sha256(message).digest()[:_DIGEST_BYTES], "big")


class CborSha256Hasher(ChunkHasher):
    """SHA-256 over the canonical CBOR of (parent, tokens, extra keys), cut to 64 bits.

    Source: upstream 0.5.6 with vLLM's `sha256_cbor`, same values.
    """

    name = "sha256_cbor"
    root = int.from_bytes(hashlib.sha256(cbor.encode(_CBOR_SEED)).digest()[:_FOLDED_BYTES], "big")

    def chain(
        self, tokens: TokenIds, chunk_tokens: int, num_tokens: int, parent: int | None = None
    ) -> Iterator[int]:
        """See `ChunkHasher.chain`."""
        ids = token_ints(tokens)[:num_tokens]
        chunk_hash = self.root if parent is None else parent
        for start in range(0, len(ids), chunk_tokens):
            chunk_hash = _cbor_hash(chunk_hash, ids[start : start + chunk_tokens], ())
            yield chunk_hash

    def hash_chunk(
        self, tokens: TokenIds, parent: int | None = None, extra_keys: Sequence[object] = ()
    ) -> int:
        """See `ChunkHasher.hash_chunk`."""
        start = self.root if parent is None else parent
        return _cbor_hash(start, token_ints(tokens), extra_keys)


class BuiltinHasher(ChunkHasher):
    """Python's own hash of (parent, tokens, extra keys), for data that 0.5.6 stored without vLLM.

    It differs between Python builds and collides for parents that differ by 2**61 - 1, or are -1
    and -2. Extra keys other than numbers are refused: Python gives them another hash in every
    process.
    """

    name = "builtin"

    def chain(
        self, tokens: TokenIds, chunk_tokens: int, num_tokens: int, parent: int | None = None
    ) -> Iterator[int]:
        """See `ChunkHasher.chain`."""
        ids = token_list(tokens)
        chunk_hash = self.root if parent is None else parent
        for start in range(0, num_tokens, chunk_tokens):
            block = tuple(ids[start : min(start + chunk_tokens, num_tokens)])
            chunk_hash = hash((chunk_hash, block, ()))
            yield chunk_hash

    def hash_chunk(
        self, tokens: TokenIds, parent: int | None = None, extra_keys: Sequence[object] = ()
    ) -> int:
        """See `ChunkHasher.hash_chunk`."""
        for key in extra_keys:
            if not isinstance(key, int):
                raise ValueError(
                    f"The extra key {key!r} has another builtin hash in every process; use "
                    f"pre_caching_hash_algorithm={Sha256Hasher.name}"
                )
        start = self.root if parent is None else parent
        return hash((start, tuple(token_list(tokens)), tuple(extra_keys)))


_HASHERS: dict[str, ChunkHasher] = {
    "sha256": Sha256Hasher(),
    "sha256_cbor": CborSha256Hasher(),
    # 0.5.6 folds both to the same 64 bits.
    "sha256_cbor_64bit": CborSha256Hasher(),
    "builtin": BuiltinHasher(),
}


def get_chunk_hasher(name: str) -> ChunkHasher:
    """Return the algorithm called `name`.

    Raises:
        ConfigError: There is none of that name; lists those there are.
    """
    try:
        return _HASHERS[name]
    except KeyError:
        raise ConfigError(
            f"pre_caching_hash_algorithm={name!r} is unknown; use one of {', '.join(_HASHERS)}"
        ) from None


def digest_bytes(chunk_hash: int) -> bytes:
    """Return a chunk hash as bytes, for wires whose integers stop at 64 bits.

    Returns:
        16 bytes, big endian; 17 bytes, two's complement, for a negative hash.

    Raises:
        ValueError: `chunk_hash` does not fit.
    """
    try:
        if chunk_hash < 0:
            return chunk_hash.to_bytes(_DIGEST_BYTES + 1, "big", signed=True)
        return chunk_hash.to_bytes(_DIGEST_BYTES, "big")
    except OverflowError:
        raise ValueError(f"{chunk_hash} is no chunk hash: it needs more than 128 bits") from None


def hash_from_digest(digest: bytes) -> int:
    """Return the chunk hash that `digest_bytes` turned into `digest`.

    Raises:
        ValueError: It has neither 16 nor 17 bytes.
    """
    if len(digest) not in (_DIGEST_BYTES, _DIGEST_BYTES + 1):
        raise ValueError(f"A chunk hash has {_DIGEST_BYTES} bytes on the wire, not {len(digest)}")
    return int.from_bytes(digest, "big", signed=len(digest) > _DIGEST_BYTES)


def _parent_digest(parent: int) -> bytes:
    if 0 <= parent < _DIGEST_BOUND:
        return parent.to_bytes(_DIGEST_BYTES, "big")
    # A parent that another algorithm made; it only has to stay distinct from every other one.
    num_bytes = parent.bit_length() // 8 + 1
    foreign = _FOREIGN_PARENT + parent.to_bytes(num_bytes, "big", signed=True)
    return hashlib.sha256(foreign).digest()[:_DIGEST_BYTES]


def _extra_keys_suffix(extra_keys: Sequence[object]) -> bytes:
    if not extra_keys:
        return b""
    encoded = cbor.encode(list(extra_keys))
    padding = bytes(-len(encoded) % TOKEN_BYTES)
    return encoded + padding + struct.pack("<q", len(encoded)) + b"\x01"


def _cbor_hash(parent: int, token_ids: Sequence[int], extra_keys: Sequence[object]) -> int:
    message = b"".join(
        (
            cbor.array_head(3),
            cbor.encode(parent),
            cbor.array_head(len(token_ids)),
            cbor.encode_numbers(token_ids),
            cbor.encode(list(extra_keys)),
        )
    )
    return int.from_bytes(hashlib.sha256(message).digest()[:_FOLDED_BYTES], "big")
