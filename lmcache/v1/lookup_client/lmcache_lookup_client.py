"""The lookup client of a scheduler; its server is in `lookup_server`."""

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import msgspec
import zmq

from lmcache.logging import init_logger
from lmcache.v1.chunk_hash import digest_bytes
from lmcache.v1.clock import Clock, SystemClock
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.lookup_client.abstract_client import NOT_LOOKED_UP, LookupClientInterface
from lmcache.v1.lookup_client.lookup_server import LMCacheLookupServer
from lmcache.v1.lookup_client.messages import (
    PROTOCOL_VERSION,
    LookupReply,
    LookupRequest,
    address_of,
    hashing_of,
)
from lmcache.v1.lookup_client.rank_link import RankLink
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.token_database import ChunkedTokenDatabase
from lmcache.v1.token_ids import TokenIds

logger = init_logger(__name__)

MAX_ANSWERS = 65_536

__all__ = ["LMCacheLookupClient", "LMCacheLookupServer"]


class LMCacheLookupClient(LookupClientInterface):
    """Hashes a prompt and asks the server of every rank that has one; the least answer counts.

    A lookup takes at most `lookup_timeout_ms` beyond hashing. A server that let one wait in vain is
    not waited for again until it answers a ping.

    `_lock` guards the sockets and is held while waiting for replies; a lookup that waits for
    another one counts that into its bound. `_answers_lock` guards the last answers, which are kept
    for `MAX_ANSWERS` lookup ids; beyond, the oldest are forgotten. In a forked child it finds
    nothing: sockets do not survive a fork.

    Args:
        config: Chunk size, hash algorithm, time-out, ranks with a server; a hit of fewer than
            `min_retrieve_tokens` tokens is answered as none.
        metadata: Engine id and world size.
        clock: For the bounds.

    Raises:
        ConfigError: The metadata has no engine id, or a rank that is asked does not exist.
    """

    def __init__(
        self, config: LMCacheEngineConfig, metadata: LMCacheMetadata, clock: Clock | None = None
    ) -> None:
        self.config = config
        self.token_database = ChunkedTokenDatabase(config, metadata)
        self._clock: Clock = clock or SystemClock()
        self._hashing = hashing_of(config)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._answers_lock = threading.Lock()
        self._answers: OrderedDict[str, int] = OrderedDict()
        self._number = 0
        self._said: set[str] = set()
        self._is_closed = False
        ranks = config.get_lookup_server_worker_ids(metadata.use_mla, metadata.world_size)
        addresses = [address_of(metadata, rank) for rank in ranks]
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._links = [RankLink(self._context, address) for address in addresses]

    def lookup(
        self,
        token_ids: TokenIds,
        lookup_id: str,
        request_configs: Mapping[str, object] | None = None,
    ) -> int:
        """See `LookupClientInterface.lookup`; never None."""
        if not isinstance(lookup_id, str):
            raise TypeError(f"lookup_id must be a str, not {lookup_id!r}")
        chunks = self.token_database.split(token_ids)
        hit_tokens = 0
        if chunks.hashes:
            request = LookupRequest(
                version=PROTOCOL_VERSION,
                hashing=self._hashing,
                hashes=[h if isinstance(h, bytes) else digest_bytes(h) for h in chunks.hashes],
                offsets=[e - s for s, e in zip(chunks.starts, chunks.ends, strict=True)],
                lookup_id=lookup_id,
                request_configs=_as_json(request_configs),
            )
            hit_tokens = self._least_answer(msgspec.msgpack.encode(request))
        if hit_tokens < self.config.min_retrieve_tokens:
            hit_tokens = 0
        with self._answers_lock:
            self._answers[lookup_id] = hit_tokens
            self._answers.move_to_end(lookup_id)
            while len(self._answers) > MAX_ANSWERS:
                self._answers.popitem(last=False)
        return hit_tokens

    def _least_answer(self, payload: bytes) -> int:
        replies = self._ask(payload)
        if replies is None:
            return 0
        for reply in replies:
            if reply.error:
                self._say_once(f"a lookup was refused and finds nothing: {reply.error}")
        return min((0 if reply.error else reply.hit_tokens for reply in replies), default=0)

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.error("%s", text)

    def _ask(self, payload: bytes) -> list[LookupReply] | None:
        """Return one reply a rank, or None when there is one that cannot be waited for."""
        if os.getpid() != self._pid:
            self._say_once("a lookup client was used in a forked process and finds nothing there")
            return None
        timeout_s = self.config.lookup_timeout_ms / 1000
        deadline_s = self._clock.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            return None
        try:
            replies = None if self._is_closed else self._ask_locked(payload, deadline_s)
        except BaseException:
            for link in self._links:
                link.reset()
            raise
        finally:
            self._lock.release()
        return replies

    def _ask_locked(self, payload: bytes, deadline_s: float) -> list[LookupReply] | None:
        for link in self._links:
            if not link.is_trusted:
                link.look_again(self._clock.monotonic())
        if not all(link.is_trusted for link in self._links):
            return None
        self._number += 1
        if not all(self._send_locked(link, payload, deadline_s) for link in self._links):
            return None
        replies = self._collect_locked(payload, deadline_s)
        for link in self._links:
            if link not in replies:
                link.mark_silent(self.config.lookup_timeout_ms)
        if len(replies) < len(self._links):
            return None
        return [_decoded(replies[link]) for link in self._links]

    def _send_locked(self, link: RankLink, payload: bytes, deadline_s: float) -> bool:
        link.forget_losses()
        if link.send(self._number, payload, self._left_seconds(deadline_s)):
            return True
        link.mark_silent(self.config.lookup_timeout_ms)
        return False

    def _collect_locked(self, payload: bytes, deadline_s: float) -> dict[RankLink, bytes]:
        replies: dict[RankLink, bytes] = {}
        poller = zmq.Poller()
        for link in self._links:
            poller.register(link.socket, zmq.POLLIN)
            poller.register(link.losses, zmq.POLLIN)
        while len(replies) < len(self._links):
            ready = dict(poller.poll(int(self._left_seconds(deadline_s) * 1000)))
            if not ready:
                break
            for link in self._links:
                reply = link.receive(self._number) if link.socket in ready else None
                if reply is not None:
                    replies[link] = reply
                    poller.unregister(link.socket)
                    poller.unregister(link.losses)
                elif link.losses in ready and link not in replies:
                    # The server went, perhaps with the request; asking its successor is harmless.
                    self._send_locked(link, payload, deadline_s)
        return replies

    def _left_seconds(self, deadline_s: float) -> float:
        return max(0.0, deadline_s - self._clock.monotonic())

    def lookup_cache(self, lookup_id: str) -> int:
        """See `LookupClientInterface.lookup_cache`; never None."""
        return self._answers.get(lookup_id, NOT_LOOKED_UP)

    def clear_lookup_status(self, lookup_id: str) -> None:
        """See `LookupClientInterface.clear_lookup_status`."""
        with self._answers_lock:
            self._answers.pop(lookup_id, None)

    def supports_producer_reuse(self) -> bool:
        """Return True."""
        return True

    @property
    def silent_ranks(self) -> Sequence[int]:
        """Ranks whose server did not answer the last lookup that waited for it."""
        return [link.address.rank for link in self._links if not link.is_trusted]

    def close(self) -> None:
        """Close the sockets; lookups then find nothing. In a forked child: nothing."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for link in self._links:
                link.close()
        self._context.destroy(linger=0)


def _as_json(request_configs: Mapping[str, object] | None) -> str:
    if not request_configs:
        return ""
    try:
        return json.dumps(dict(request_configs))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"request_configs cannot be sent to the lookup servers: {error}; use texts, numbers, "
            "booleans, lists and dicts of these"
        ) from None


def _decoded(data: bytes) -> LookupReply:
    try:
        return msgspec.msgpack.decode(data, type=LookupReply)
    except msgspec.DecodeError as error:
        return LookupReply(0, f"the server's reply cannot be read: {error}")
