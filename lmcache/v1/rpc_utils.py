"""Where the sockets of an engine's services are."""

import hashlib
import os

from lmcache.v1.errors import ConfigError

# sockaddr_un holds 108 bytes, the last of them a zero.
IPC_SOCKET_PATH_MAX_LEN = 107
BASE_PATH_VARIABLE = "VLLM_RPC_BASE_PATH"
_DEFAULT_BASE_PATH = "/tmp/vllm_rpc"
_SERVICES = ("lookup", "offload", "lookup_worker", "lookup_scheduler")
_DIGEST_CHARACTERS = 16


def get_zmq_rpc_path_lmcache(
    engine_id: str,
    service_name: str = "lookup",
    rpc_port: int | str = 0,
    rank: int = 0,
    base_url: str | None = None,
) -> str:
    """Return the path of the unix socket of one service of one rank.

    Client and server derive the same path from the same arguments. A path that is too long for a
    unix socket becomes a digest of itself in the same directory.

    Args:
        engine_id: Of the engine, as in its metadata.
        service_name: "lookup", "offload", "lookup_worker" or "lookup_scheduler".
        rpc_port: A number, to which the rank is added; a text, to which it is appended.
        rank: Of the worker.
        base_url: Directory; else `VLLM_RPC_BASE_PATH`, else /tmp/vllm_rpc.

    Raises:
        ValueError: An unknown service.
        ConfigError: The directory alone is too long, or the id cannot be part of a path.

    Source: upstream 0.5.6 v1/rpc_utils.py, same paths, but for those it cannot shorten.
    """
    if service_name not in _SERVICES:
        raise ValueError(
            f"service_name={service_name!r} is unknown; use one of {', '.join(_SERVICES)}"
        )
    base = base_url or os.environ.get(BASE_PATH_VARIABLE) or _DEFAULT_BASE_PATH
    port = f"{rpc_port}{rank}" if isinstance(rpc_port, str) else str(rpc_port + rank)
    path = f"{base}/engine_{engine_id}_service_{service_name}_lmcache_rpc_port_{port}"
    if "\0" in path:
        raise ConfigError(f"the engine id {engine_id!r} cannot be part of a socket's path")
    if _num_bytes(path) <= IPC_SOCKET_PATH_MAX_LEN:
        return path
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:_DIGEST_CHARACTERS]
    short = f"{base}/lmcache_rpc_{digest}"
    if _num_bytes(short) > IPC_SOCKET_PATH_MAX_LEN:
        raise ConfigError(
            f"a socket in {base!r} would have a longer path than the {IPC_SOCKET_PATH_MAX_LEN} "
            f"bytes that a unix socket may have; set {BASE_PATH_VARIABLE} to a shorter directory"
        )
    return short


def _num_bytes(path: str) -> int:
    try:
        return len(os.fsencode(path))
    except UnicodeEncodeError as error:
        raise ConfigError(f"{path!r} cannot be the path of a socket: {error}") from None
