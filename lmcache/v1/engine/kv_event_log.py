"""What `get_kv_events` returns: stored and removed chunks, in the order of the cache's events."""

import threading
from collections import OrderedDict
from collections.abc import Sequence

from lmcache.v1.cache_key import CacheEngineKey
from lmcache.v1.chunk_hash import digest_bytes
from lmcache.v1.kv_events import CacheRemoveEvent, CacheStoreEvent
from lmcache.v1.storage_backend.cache_events import CacheEvent, EventKind
from lmcache.v1.storage_backend.storage_manager import StorageManager
from lmcache.v1.token_database import Chunks
from lmcache.v1.token_ids import TokenIds, token_list

KVEvent = CacheStoreEvent | CacheRemoveEvent

MEDIUM = "cpu"
MAX_DESCRIBED = 65_536


class KVEventLog:
    """Turns cache events into what serving engines know: chunk hashes, tokens, parents.

        a chunk's state  meaning                                        who may leave it
        described        a store is about to list it                    drain: announced
        announced        a CacheStoreEvent told of it                   drain: a CacheRemoveEvent
        unknown          neither                                        describe

    A chunk is announced once it can be read, and again only after it was gone from every local
    tier. Only chunks that a store of this engine described are announced, and only announced ones
    are reported removed. Descriptions of chunks that were never listed are bounded: beyond
    `MAX_DESCRIBED` the oldest go, and those chunks are not announced.

    `_lock` guards every member; the ledger's own guard is taken inside.

    Args:
        storage_manager: Whose events are heard from now on.
        chunk_tokens: Tokens per chunk.
        fits_64_bits: Hashes are integers that every wire takes; else they are told as bytes.
    """

    def __init__(
        self, storage_manager: StorageManager, chunk_tokens: int, fits_64_bits: bool
    ) -> None:
        self._lock = threading.Lock()
        self._storage_manager = storage_manager
        self._chunk_tokens = chunk_tokens
        self._fits_64_bits = fits_64_bits
        # What a chunk is, and how many stores of it were not heard of yet.
        self._described: OrderedDict[CacheEngineKey, tuple[CacheStoreEvent, int]] = OrderedDict()
        self._announced: set[CacheEngineKey] = set()
        self._subscription = storage_manager.subscribe(kinds={EventKind.STORED, EventKind.REMOVED})

    def describe(
        self,
        keys: Sequence[CacheEngineKey],
        positions: Sequence[int],
        chunks: Chunks,
        tokens: TokenIds | None,
    ) -> None:
        """Say what chunks are, before they are put.

        Args:
            keys: Of the chunks.
            positions: Where each stands in `chunks`.
            tokens: [num_tokens] ids of the request; None where only hashes are known.
        """
        ids = [] if tokens is None else token_list(tokens)
        made = {
            key: CacheStoreEvent(
                block_hashes=[self._told(chunks.hashes[position])],
                parent_block_hash=self._told(chunks.hashes[position - 1]) if position else None,
                token_ids=ids[chunks.starts[position] : chunks.ends[position]],
                block_size=self._chunk_tokens,
                lora_id=None,
                medium=MEDIUM,
                lora_name=None,
            )
            for key, position in zip(keys, positions, strict=True)
        }
        with self._lock:
            for key, description in made.items():
                _, num_stores = self._described.get(key, (description, 0))
                self._described[key] = (description, num_stores + 1)
            while len(self._described) > MAX_DESCRIBED:
                self._described.popitem(last=False)

    def drain(self) -> list[KVEvent]:
        """Return what happened since the last call, oldest first."""
        told: list[KVEvent] = []
        with self._lock:
            true_until = -1  # events up to this one are in the snapshot that a loss made necessary
            for event in self._subscription.take():
                if event.kind is EventKind.LOST:
                    true_until = self._catch_up(told)
                elif event.seq > true_until:
                    self._hear(event, told)
        return told

    def _hear(self, event: CacheEvent, told: list[KVEvent]) -> None:
        if event.key is None:  # CLOSED
            return
        if event.kind is EventKind.STORED:
            self._announce(event.key, told)
        elif not event.still_in:
            self._retract(event.key, told)

    def _announce(self, key: CacheEngineKey, told: list[KVEvent]) -> None:
        if key not in self._described:
            return
        description, num_stores = self._described[key]
        if num_stores > 1:
            self._described[key] = (description, num_stores - 1)
        else:
            del self._described[key]
        if key not in self._announced:
            self._announced.add(key)
            told.append(description)

    def _retract(self, key: CacheEngineKey, told: list[KVEvent]) -> None:
        if key in self._announced:
            self._announced.remove(key)
            told.append(CacheRemoveEvent([self._told(key.chunk_hash)], MEDIUM))

    def _catch_up(self, told: list[KVEvent]) -> int:
        snapshot = self._storage_manager.snapshot()
        for key in [key for key in self._announced if key not in snapshot.residents]:
            self._retract(key, told)
        for key in [key for key in self._described if key in snapshot.residents]:
            self._announce(key, told)
        return snapshot.seq

    def _told(self, chunk_hash: int | bytes) -> int | bytes:
        if self._fits_64_bits or isinstance(chunk_hash, bytes):
            return chunk_hash
        return digest_bytes(chunk_hash)

    def close(self) -> None:
        """Hear nothing any more."""
        self._subscription.close()

    def check_integrity(self) -> None:
        """Raise AssertionError when a chunk that no tier holds counts as announced.

        Call it after `drain`, while nothing is stored or evicted.
        """
        residents = self._storage_manager.snapshot().residents
        gone = [key for key in self._announced if key not in residents]
        if gone:
            raise AssertionError(f"{len(gone)} announced chunks are gone, {gone[0]} for one")
