"""The lookup server of a worker."""

import json
import os
import socket
import stat
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Protocol

import msgspec
import zmq

from lmcache.logging import init_logger
from lmcache.v1.chunk_hash import hash_from_digest
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.errors import ConfigError
from lmcache.v1.lookup_client.messages import (
    PING,
    PROTOCOL_VERSION,
    LookupReply,
    LookupRequest,
    address_of,
    hashing_of,
)
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.rpc_utils import BASE_PATH_VARIABLE

logger = init_logger(__name__)

_JOIN_SECONDS = 10.0
_STOP = b"stop"


class LookupEngine(Protocol):
    """What a server needs of its engine."""

    @property
    def config(self) -> LMCacheEngineConfig:
        """The engine's settings."""
        ...

    def lookup(
        self,
        *,
        hashes: Sequence[int | bytes],
        offsets: Sequence[int],
        lookup_id: str,
        pin: bool,
        request_configs: Mapping[str, object] | None,
    ) -> int:
        """Return the tokens of the cached prefix."""
        ...


class LMCacheLookupServer:
    """Answers the lookups of one engine on a daemon thread, and pins what it finds.

        state   meaning                            who may leave it
        open    the thread answers                 close
        closed  the socket and its path are gone   nobody

    A request that cannot be read or answered gets a reply that says so; the thread goes on.

    Args:
        lmcache_engine: Ready to look up.
        metadata: Engine id and worker id: the name of the socket.

    Raises:
        ConfigError: The socket cannot be made; says where and what to change.

    Threads: `close` from any thread.
    """

    def __init__(self, lmcache_engine: LookupEngine, metadata: LMCacheMetadata) -> None:
        self.lmcache_engine = lmcache_engine
        self._hashing = hashing_of(lmcache_engine.config)
        self.path = address_of(metadata, metadata.worker_id).path
        self.num_refused = 0
        self._pid = os.getpid()
        self._close_lock = threading.Lock()  # guards _is_closed
        self._is_closed = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._socket = self._bound_socket()
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._file_id = _file_id(self.path)
        self._stopper = self._context.socket(zmq.PAIR)
        self._stop_asked = self._context.socket(zmq.PAIR)
        self._stop_asked.bind("inproc://stop")
        self._stopper.connect("inproc://stop")
        self._thread = threading.Thread(
            target=self._serve, name="lmcache-lookup-server", daemon=True
        )
        self._thread.start()

    def _bound_socket(self) -> "zmq.Socket[bytes]":
        directory = os.path.dirname(self.path)
        try:
            os.makedirs(directory, exist_ok=True)
            if os.path.exists(self.path) and not stat.S_ISSOCK(os.stat(self.path).st_mode):
                raise FileExistsError("there is a file of that name that is no socket")
            if _is_served(self.path):
                logger.warning(
                    "another lookup server answers at %s already and is cut off now: two engines "
                    "have the same engine_id and worker id",
                    self.path,
                )
            made = self._context.socket(zmq.ROUTER)
            made.setsockopt(zmq.LINGER, 0)
            made.bind(f"ipc://{self.path}")
        except (OSError, zmq.ZMQError) as error:
            raise ConfigError(
                f"the lookup server cannot listen at {self.path}: {error}; set "
                f"{BASE_PATH_VARIABLE} to a directory where this user may make sockets"
            ) from error
        return made

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stop_asked, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stop_asked in ready:
                return
            try:
                self._answer(self._socket.recv_multipart(zmq.NOBLOCK))
            except zmq.ContextTerminated:
                return
            except Exception:  # the thread must outlive a fault of one request
                logger.exception("the lookup server could not answer a request")

    def _answer(self, frames: list[bytes]) -> None:
        if len(frames) != 3:  # no client of ours: there is nothing to number a reply with
            self.num_refused += 1
            return
        identity, number, payload = frames
        reply = PING if payload == PING else msgspec.msgpack.encode(self._reply_to(payload))
        # A ROUTER drops what is for a client that is gone, or that does not read.
        self._socket.send_multipart([identity, number, reply])

    def _reply_to(self, payload: bytes) -> LookupReply:
        try:
            return LookupReply(self._hit_tokens(payload), "")
        except (ValueError, TypeError) as error:  # msgspec's and json's errors are ValueErrors
            self.num_refused += 1
            return LookupReply(0, str(error))
        except Exception as error:  # a fault of the engine costs a miss
            self.num_refused += 1
            logger.exception("a lookup failed")
            return LookupReply(0, f"the engine failed: {error!r}")

    def _hit_tokens(self, payload: bytes) -> int:
        request = msgspec.msgpack.decode(payload, type=LookupRequest)
        if request.version != PROTOCOL_VERSION:
            raise ValueError(
                f"the client speaks version {request.version} of the lookup protocol and this "
                f"server version {PROTOCOL_VERSION}; install the same release in both processes"
            )
        if request.hashing != self._hashing:
            raise ValueError(
                f"the client was set up with {request.hashing} and this server with "
                f"{self._hashing}; give both processes the same LMCACHE_* settings"
            )
        configs = json.loads(request.request_configs) if request.request_configs else None
        return self.lmcache_engine.lookup(
            hashes=[hash_from_digest(digest) for digest in request.hashes],
            offsets=request.offsets,
            lookup_id=request.lookup_id,
            pin=True,
            request_configs=configs,
        )

    def close(self) -> None:
        """Stop answering and give the path up. Twice is a no-op, as is a forked child's call."""
        if os.getpid() != self._pid:  # the thread and the path are the parent's
            return
        with self._close_lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._stopper.send(_STOP)
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)
        if self._thread.is_alive():
            logger.warning("the lookup server's thread is still busy; its socket is left to it")
            return
        self._context.destroy(linger=0)
        if _file_id(self.path) == self._file_id:  # else it is a later server's by now
            os.unlink(self.path)

    def __enter__(self) -> "LMCacheLookupServer":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _file_id(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _is_served(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
        return True
