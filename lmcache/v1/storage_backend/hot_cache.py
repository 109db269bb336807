"""The hot cache: key -> memory object under one lock, and every transition told to the ledger."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lmcache.v1.cache_key import CacheEngineKey
from lmcache.v1.memory_metadata import MemorySpec
from lmcache.v1.memory_object import MemoryObj, TensorMemoryObj
from lmcache.v1.native import HotIndex, LockIsHeld, Pool
from lmcache.v1.storage_backend.abstract_backend import Motion
from lmcache.v1.storage_backend.cache_events import RemovalReason
from lmcache.v1.storage_backend.cache_policy import honours_placement
from lmcache.v1.storage_backend.cache_policy.base_policy import BaseCachePolicy, Evictable
from lmcache.v1.storage_backend.residency_ledger import REASON_NUMBER, TierLedger


class HotCacheView(Mapping[CacheEngineKey, MemoryObj]):
    """What is resident, coldest first, to read. Each call is one native step."""

    __slots__ = ("_index",)

    def __init__(self, index: HotIndex) -> None:
        self._index = index

    def __getitem__(self, key: CacheEngineKey) -> MemoryObj:
        memory_obj: MemoryObj | None = self._index.peek(key) if key in self._index else None
        if memory_obj is None:
            raise KeyError(key)
        return memory_obj

    def __contains__(self, key: object) -> bool:
        return key in self._index

    def __iter__(self) -> Iterator[CacheEngineKey]:
        return iter(self._index.keys())

    def __len__(self) -> int:
        return len(self._index)


class HotCachePolicy(BaseCachePolicy[CacheEngineKey]):
    """The order of a hot cache, for callers that reach for it. Moves are made under its lock."""

    def __init__(self, index: HotIndex, name: str) -> None:
        self._moves: dict[Motion, Callable[[Sequence[CacheEngineKey]], bytes]] = {
            Motion.USE: index.touch,
            Motion.HIT: index.hit,
            Motion.DEMOTE: index.demote,
        }
        self._index = index
        self.name = name

    @property
    def honours_placement(self) -> bool:
        """Whether cold puts and demotions move anything."""
        return honours_placement(self.name)

    def init_mutable_mapping(self) -> dict[CacheEngineKey, Any]:
        """Return an empty dict; the hot cache keeps its own mapping."""
        return {}

    def move(self, keys: Sequence[CacheEngineKey], motion: Motion) -> bytes:
        """The one primitive behind touch, lookups and `update_on_hit`; see `move_in_order`."""
        return self._moves[motion](keys)

    def update_on_hit(self, key: CacheEngineKey, cache_dict: Mapping[CacheEngineKey, Any]) -> None:
        """Count a hit; an absent key is ignored."""
        self.move((key,), Motion.HIT)

    def update_on_put(self, key: CacheEngineKey) -> None:
        """Do nothing: the cache orders what it stores."""

    def update_on_force_evict(self, key: CacheEngineKey) -> None:
        """Do nothing: the cache forgets what it removes."""

    def get_evict_candidates(
        self, cache_dict: Mapping[CacheEngineKey, Evictable], num_candidates: int = 1
    ) -> list[CacheEngineKey]:
        """Name the keys that would leave next; nothing is removed."""
        keys: list[CacheEngineKey] = self._index.first_victims(num_candidates)
        return keys


class HotCache:
    """Resident memory objects of one pool, and the only code that adds or removes them.

        key's state   meaning                                       who may leave it
        absent        not listed                                    put
        resident      listed; the cache holds one reference         take_room, remove, clear, put of
                                                                    another size or dtype
        held          resident, with a pin or a reader's reference  as resident, but not take_room

    `lock` guards the index together with its page of the ledger. Every change takes it inside its
    one native step, in which no garbage collection starts and no thread loses the interpreter; only
    where somebody else holds it the caller waits for it in Python.

    Args:
        pool: Home of the objects that can be listed.
        policy_name: LRU, LFU, FIFO or MRU.
        page: Where transitions are reported.
    """

    def __init__(self, pool: Pool, policy_name: str, page: TierLedger) -> None:
        self.pool = pool
        self.lock = threading.Lock()
        self.index = HotIndex(pool, policy_name, page.ledger, page.number, self.lock)
        self.policy = HotCachePolicy(self.index, policy_name)
        self.view = HotCacheView(self.index)
        self._page = page

    def attach_ledger(self, page: TierLedger) -> None:
        """Report to `page` from now on, beginning with what is resident."""
        with self.lock:
            self._page.forget()
            self._page = page
            self.index.attach(page.ledger, page.number)

    # --- adding ----------------------------------------------------------------------------------
    def put(
        self, keys: tuple[CacheEngineKey, ...], memory_objs: tuple[MemoryObj, ...], is_cold: bool
    ) -> None:
        """List objects, given head first; the head ends youngest, cold ones leave tail first.

        Lists nothing while `takes_puts` is False. A resident key of the same size and dtype is used
        again (unless `is_cold`: then nothing moves); of another, it is replaced.

        Raises:
            ValueError: An object of another pool, released, or listed under another key; the pairs
                before it are listed.
        """
        try:
            self.index.put(keys, memory_objs, is_cold)
        except LockIsHeld:
            with self.lock:
                self.index.put(keys, memory_objs, is_cold, holds_lock=True)

    @property
    def takes_puts(self) -> bool:
        """Whether puts are listed."""
        takes: bool = self.index.takes_puts
        return takes

    @takes_puts.setter
    def takes_puts(self, enabled: bool) -> None:
        with self.lock:
            self.index.takes_puts = enabled

    def positions_to_copy(
        self, keys: Sequence[CacheEngineKey], memory_objs: Sequence[MemoryObj]
    ) -> list[int]:
        """Return which objects `put` cannot list: foreign, listed already, or given twice."""
        positions: list[int] = self.index.positions_to_copy(keys, memory_objs)
        return positions

    # --- reading ---------------------------------------------------------------------------------
    def get(self, key: CacheEngineKey) -> MemoryObj | None:
        """Return the object with a reference, or None; a use."""
        memory_obj: MemoryObj | None
        try:
            memory_obj = self.index.get(key)
        except LockIsHeld:
            with self.lock:
                memory_obj = self.index.get(key, holds_lock=True)
        return memory_obj

    def get_many(self, keys: Sequence[CacheEngineKey], into: list[MemoryObj | None]) -> None:
        """Append one object or None per key to `into`; one use each, head youngest."""
        try:
            self.index.get_many(keys, into=into)
        except LockIsHeld:
            with self.lock:
                self.index.get_many(keys, holds_lock=True, into=into)

    def peek(self, key: CacheEngineKey) -> MemoryObj | None:
        """Return the object with a reference, or None; moves nothing."""
        with self.lock:
            memory_obj: MemoryObj | None = self.index.peek(key)
            if memory_obj is not None:
                memory_obj.ref_count_up()
        return memory_obj

    def hold_prefix(self, keys: Sequence[CacheEngineKey], into: list[MemoryObj]) -> None:
        """Append the objects of the resident prefix, each with a reference; moves nothing."""
        self.index.hold_prefix(keys, into)

    # --- removing --------------------------------------------------------------------------------
    def take_room(
        self, spec: MemorySpec, count: int, parent: object
    ) -> list[TensorMemoryObj] | None:
        """Return `count` new objects, evicting as little as needed; None evicts nothing."""
        made: list[TensorMemoryObj] | None
        wanted = (TensorMemoryObj, spec, spec.size_bytes, count, parent)
        try:
            made = self.index.allocate(*wanted)
        except LockIsHeld:
            with self.lock:
                made = self.index.allocate(*wanted, holds_lock=True)
        return made

    @property
    def num_evicted(self) -> int:
        """Entries evicted so far to make room."""
        evicted: int = self.index.num_evicted
        return evicted

    @property
    def num_evictions(self) -> int:
        """Times so far that room was made, whatever number of entries it took."""
        evictions: int = self.index.num_evictions
        return evictions

    def evict_next(self) -> bool:
        """Evict the next victim, for pools without addresses; False when there is none."""
        victims = tuple(self.index.first_victims(1))
        return self.remove(victims, RemovalReason.CAPACITY) > 0

    def remove(self, keys: tuple[CacheEngineKey, ...], reason: RemovalReason) -> int:
        """Unlist keys, held ones too (readers keep their bytes); returns how many were there."""
        number = REASON_NUMBER[reason]
        try:
            gone = self.index.remove(keys, number)
        except LockIsHeld:
            with self.lock:
                gone = self.index.remove(keys, number, holds_lock=True)
        return len(gone)

    def remove_locked(self, key: CacheEngineKey) -> bool:
        """As `remove` of one key to make room; the caller holds `lock`."""
        number = REASON_NUMBER[RemovalReason.CAPACITY]
        return bool(self.index.remove((key,), number, holds_lock=True))

    def clear_evictable(self) -> list[MemoryObj]:
        """Unlist everything that nobody holds; returns the objects."""
        return self._clear(only_evictable=True, stop_puts=False)

    def switch_off(self) -> None:
        """Take no puts any more, and unlist everything, in one step."""
        self._clear(only_evictable=False, stop_puts=True)

    def _clear(self, only_evictable: bool, stop_puts: bool) -> list[MemoryObj]:
        wanted = (only_evictable, stop_puts, REASON_NUMBER[RemovalReason.CLEAR])
        gone: list[MemoryObj]
        try:
            gone = self.index.clear(*wanted)
        except LockIsHeld:
            with self.lock:
                gone = self.index.clear(*wanted, holds_lock=True)
        return gone

    def check_integrity(self) -> None:
        """Raise AssertionError naming every broken invariant of index, pool and ledger page."""
        with self.lock:
            faults: list[str] = self.index.check_integrity()
        if faults:
            raise AssertionError("; ".join(faults))
