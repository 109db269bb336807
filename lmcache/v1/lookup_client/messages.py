"""What lookup clients and servers say to one another, and their common settings.

A request is two frames: a number of 8 bytes, and a `LookupRequest` in MessagePack or nothing (a
ping). A reply repeats the number; its second frame is a `LookupReply`, or nothing to a ping. Hashes
travel as bytes: MessagePack's integers stop at 64 bits.
"""

from dataclasses import dataclass

import msgspec

from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.errors import ConfigError
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.rpc_utils import get_zmq_rpc_path_lmcache

PROTOCOL_VERSION = 1
NUMBER_BYTES = 8
PING = b""
_RPC_PORT = "lmcache_rpc_port"


class LookupRequest(msgspec.Struct, array_like=True, frozen=True):
    """How much of these chunks is cached?

    Attributes:
        version: Of the protocol.
        hashing: The client's `hashing_of`; a server with another one refuses.
        hashes: Chunk hashes as `digest_bytes` gives them, head first.
        offsets: Tokens of each chunk.
        lookup_id: Whose the pins are.
        request_configs: JSON text of the request's options, or empty.
    """

    version: int
    hashing: str
    hashes: list[bytes]
    offsets: list[int]
    lookup_id: str
    request_configs: str


class LookupReply(msgspec.Struct, array_like=True, frozen=True):
    """The answer.

    Attributes:
        hit_tokens: Tokens of the cached prefix.
        error: Why the request was refused; empty if it was not.
    """

    hit_tokens: int
    error: str


@dataclass(frozen=True, slots=True)
class RankAddress:
    """Where the lookup server of a rank listens."""

    rank: int
    path: str


def hashing_of(config: LMCacheEngineConfig) -> str:
    """Return in words what client and server must agree on for their hashes to mean the same."""
    return (
        f"chunk_size={config.chunk_size}, "
        f"pre_caching_hash_algorithm={config.pre_caching_hash_algorithm}"
    )


def address_of(metadata: LMCacheMetadata, rank: int) -> RankAddress:
    """Return the address of a rank of the metadata's engine.

    Raises:
        ConfigError: The metadata has no engine id, or the path is too long.
    """
    if metadata.engine_id is None:
        raise ConfigError("the lookup service needs metadata.engine_id, which names its sockets")
    extra = metadata.kv_connector_extra_config or {}
    port = extra.get(_RPC_PORT, 0)
    if isinstance(port, bool) or not isinstance(port, (int, str)):
        raise ConfigError(f"{_RPC_PORT}={port!r} must be a number or a text")
    return RankAddress(rank, get_zmq_rpc_path_lmcache(metadata.engine_id, "lookup", port, rank))
