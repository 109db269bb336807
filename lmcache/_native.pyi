from typing import Any

"""
Native core of lmcache: keys, pools, the hot index, eviction orders, batched copies, chunk files.
"""

from collections.abc import Sequence


class KeyCore:
    def __hash__(self) -> int:
        """Return hash(self)."""

    def __lt__(self, value: object) -> bool:
        """Return self<value."""

    def __le__(self, value: object) -> bool:
        """Return self<=value."""

    def __eq__(self, value: object) -> bool:
        """Return self==value."""

    def __ne__(self, value: object) -> bool:
        """Return self!=value."""

    def __gt__(self, value: object) -> bool:
        """Return self>value."""

    def __ge__(self, value: object) -> bool:
        """Return self>=value."""

    def __init__(self, context: tuple[Any, ...], chunk_hash: object, layer_id: int = -1, request_configs: object | None = None) -> None: ...

    @property
    def context(self) -> Any: ...

    @property
    def chunk_hash(self) -> Any: ...

    @property
    def _layer_id(self) -> int: ...

    @property
    def _request_configs(self) -> Any: ...

def make_keys(cls: object, context: object, chunk_hashes: Sequence[Any], request_configs: object | None) -> list[Any]:
    """Make one key per chunk hash, all with one context."""

def leave_native_regions(timeout_seconds: float) -> None:
    """At exit: let no thread be without the interpreter's lock any more."""

def call_each(items: list[Any], method: str) -> None:
    """
    Empty the list, calling a method of each item that is not None; last first.
    """

class Pool:
    """The bytes of one pool and the counts of what lives in it."""

    def __init__(self, capacity_bytes: int, align_bytes: int = 4096) -> None: ...

    def allocate(self, cls: object, spec: object | None, nbytes: int, count: int, parent: object | None) -> Any:
        """
        Take free bytes as `count` instances of `cls`, or return None and take nothing.
        """

    def grow(self, nbytes: int) -> None: ...

    def wake_waiting(self) -> None:
        """Make every waiting allocation look again."""

    def gauges(self) -> dict[str, int]: ...

    @property
    def version(self) -> int: ...

    def wait_for_release(self, version: int, timeout_seconds: float) -> bool:
        """
        Wait, without the interpreter's lock, until something is released after `version`.
        """

    def check_integrity(self) -> list[str]: ...

class Block:
    """Reference and pin counts of one memory object."""

    def __init__(self, pool: Pool, nbytes: int, spec: object | None, parent: object | None, raw: object | None, refs: int = 1, pins: int = 0) -> None: ...

    def ref_count_up(self) -> None: ...

    def ref_count_down(self) -> None: ...

    def invalidate(self) -> None: ...

    def get_ref_count(self) -> int: ...

    def pin(self) -> bool: ...

    def unpin(self) -> bool: ...

    @property
    def pin_count(self) -> int: ...

    @property
    def is_pinned(self) -> bool: ...

    @property
    def can_evict(self) -> bool: ...

    @property
    def _pool(self) -> Pool: ...

    @property
    def _cached(self) -> bool: ...

    @property
    def _freed(self) -> bool: ...

    @property
    def _offset(self) -> int: ...

    @property
    def _size_bytes(self) -> int: ...

    @property
    def _logical_bytes(self) -> int: ...

    @_logical_bytes.setter
    def _logical_bytes(self, arg: int, /) -> None: ...

    @property
    def _spec(self) -> Any: ...

    @_spec.setter
    def _spec(self, arg: object | None, /) -> None: ...

    @property
    def _metadata(self) -> Any: ...

    @_metadata.setter
    def _metadata(self, arg: object | None, /) -> None: ...

    @property
    def _parent(self) -> Any: ...

    @_parent.setter
    def _parent(self, arg: object | None, /) -> None: ...

    @property
    def _raw(self) -> Any: ...

    @_raw.setter
    def _raw(self, arg: object | None, /) -> None: ...

class EventReader:
    """One subscriber's end of its ring."""

    def take(self, max_events: int = 18446744073709551615) -> list[Any]: ...

    def wait_if_empty(self) -> bool: ...

    def unsubscribe(self) -> None: ...

    @property
    def is_closed(self) -> bool: ...

    @property
    def num_pending(self) -> int: ...

    @property
    def num_lost(self) -> int: ...

    @property
    def oldest_monotonic_s(self) -> Any: ...

class Ledger:
    """Residency of every local tier and the events about it."""

    def __init__(self, clock: object | None = None) -> None: ...

    def register_page(self, name: str) -> int: ...

    def stored(self, page: int, key: object, copy: object) -> None: ...

    def removed(self, page: int, key: object, copy: object, reason: int) -> bool: ...

    def replaced(self, page: int, key: object, old_copy: object, copy: object) -> None: ...

    def end_page(self, page: int, reason: int) -> None: ...

    def forget_page(self, page: int) -> None: ...

    def generation(self, page: int, key: object) -> int:
        """The event that stored the copy; 0 when absent."""

    def page_size(self, arg: int, /) -> int: ...

    def page_keys(self, page: int) -> list[Any]: ...

    def snapshot(self) -> tuple[Any, ...]:
        """(seq, [(tier, keys)]) of one moment."""

    def transition_counts(self) -> list[Any]:
        """(tier, stores, removals by reason) of every page, of one moment."""

    def subscribe(self, capacity: int, tiers: object | None, kinds: int, wake: object, event_class: object, kind_words: list[Any], reason_words: list[Any], incarnation: object) -> EventReader: ...

    def make_inert(self) -> None: ...

    def close(self) -> None: ...

    @property
    def seq(self) -> int: ...

    @property
    def is_closed(self) -> bool: ...

    @property
    def num_subscribers(self) -> int: ...

    @property
    def num_lost(self) -> int:
        """Events dropped so far, over all readers ever."""

class LockIsHeld(Exception):
    pass

def check_keys(keys: object) -> None:
    """TypeError naming the first of them that is no cache key."""

def check_pairs(keys: object, blocks: object) -> None:
    """
    TypeError or ValueError unless there is one live memory object per cache key.
    """

class HotIndex:
    """Key to memory object, with the order in which they leave."""

    def __init__(self, pool: Pool, policy: str, ledger: Ledger, page: int, lock: object) -> None: ...

    def attach(self, ledger: Ledger, page: int) -> None:
        """Report to another ledger from now on, beginning with what is resident."""

    def __len__(self) -> int: ...

    def __contains__(self, key: object) -> bool: ...

    def peek(self, key: object) -> Any:
        """The memory object or None; moves nothing."""

    def insert(self, key: object, block: object, cold: bool = False) -> bool:
        """
        Take a reference and list the block; False when the key is resident already.
        """

    def put(self, keys: tuple[Any, ...], blocks: tuple[Any, ...], cold: bool = False, holds_lock: bool = False) -> None:
        """List blocks, given head first, under the lock."""

    @property
    def takes_puts(self) -> bool: ...

    @takes_puts.setter
    def takes_puts(self, arg: bool, /) -> None: ...

    def positions_to_copy(self, keys: object, blocks: object) -> list[Any]: ...

    def remove(self, keys: tuple[Any, ...], reason: int, holds_lock: bool = False) -> list[Any]:
        """
        Drop the cache's references under the lock; the memory objects of those that were there.
        """

    def clear(self, only_evictable: bool, stop_puts: bool, reason: int, holds_lock: bool = False) -> list[Any]:
        """
        Remove what nobody holds, or everything, under the lock; the memory objects.
        """

    def get(self, key: object, holds_lock: bool = False) -> Any:
        """The memory object with a reference; a use."""

    def get_many(self, keys: object, holds_lock: bool = False, into: object | None = None) -> list[Any]: ...

    def touch(self, keys: object) -> bytes:
        """One byte per key: 0 absent, 1 moved, 2 resident but not moved."""

    def hit(self, keys: object) -> bytes:
        """As touch, for a lookup: MRU moves too."""

    def demote(self, keys: object) -> bytes:
        """To the end where victims are taken; answers like touch."""

    def prefix_length(self, keys: object) -> int: ...

    def pin_prefix(self, keys: object, into: object | None = None) -> list[Any]:
        """Pin the resident prefix; returns its memory objects."""

    def hold_prefix(self, keys: object, into: object | None = None) -> list[Any]:
        """The memory objects of the resident prefix, each with a reference."""

    def allocate(self, cls: object, spec: object | None, nbytes: int, count: int, parent: object | None, holds_lock: bool = False) -> Any:
        """`count` new blocks, evicting as little as needed; None evicts nothing."""

    def make_room(self, nbytes: int, holds_lock: bool = False) -> Any:
        """
        Evict the coldest until `nbytes` of theirs are gone; None evicts nothing.
        """

    @property
    def cached_bytes(self) -> int:
        """Bytes of what is listed."""

    @property
    def num_evicted(self) -> int: ...

    @property
    def num_evictions(self) -> int:
        """Times that room was made."""

    def would_fit(self, nbytes: int) -> bool: ...

    def first_victims(self, count: int) -> list[Any]: ...

    def keys(self) -> list[Any]: ...

    def gauges(self) -> dict[str, int]: ...

    def check_integrity(self) -> list[str]: ...

class HandleOrder:
    """An eviction order over integer handles."""

    def __init__(self, policy: str) -> None: ...

    def __len__(self) -> int: ...

    def insert(self, cold: bool = False) -> int: ...

    def remove(self, handle: int) -> None: ...

    def use(self, handle: int) -> bool: ...

    def hit(self, handle: int) -> bool: ...

    def demote(self, handle: int) -> bool: ...

    def first_victims(self, count: int) -> list[int]: ...

    def check_integrity(self) -> list[str]: ...

class AddressRanges:
    """Best-fit address arithmetic with coalescing."""

    def __init__(self, capacity_bytes: int, align_bytes: int) -> None: ...

    def allocate(self, nbytes: int) -> Any:
        """(offset, size), or None when no range is large enough."""

    def free(self, offset: int) -> bool: ...

    def size_at(self, offset: int) -> int: ...

    def grow(self, nbytes: int) -> None: ...

    def aligned(self, nbytes: int) -> int: ...

    @property
    def capacity_bytes(self) -> int: ...

    @property
    def free_bytes(self) -> int: ...

    def check_integrity(self) -> list[str]: ...

def copy_batch(targets: object, sources: object, sizes: object, num_threads: int = 1, *, stream: int = 0) -> None:
    """
    Copy sizes[i] bytes from sources[i] to targets[i] (uint64 arrays of addresses) without the interpreter's lock. Pieces must not overlap.
    """

class HostPages:
    """Page-aligned zeroed host memory with the buffer protocol."""

    def __init__(self, size_bytes: int) -> None: ...

    @property
    def address(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...

def pack_int64(numbers: object) -> bytes:
    """
    The numbers as little-endian int64; ValueError names the position of one that is none.
    """

def gather(addresses: object, sizes: object, counts: object, skips: object, ids: object, bases: object, item_bytes: object, slot_strides: object, block_strides: object, slots_per_block: int, num_slots: int, parts_per_group: int, num_threads: int = 1, *, stream: int = 0) -> None:
    """
    Copy slots into memory objects without the interpreter's lock.

    Objects: addresses, sizes (bytes), counts (ids) and skips (leading ids of the object whose items are neither read nor written, and which are not looked at) are uint64 arrays, ids one int64 array for all. Segments: bases and item_bytes are uint64, slot_strides and block_strides int64 arrays in bytes; the item of slot i lies at base + i // slots_per_block * block_stride + i % slots_per_block * slot_stride. An object holds, for each group of parts_per_group segments, for each of its ids, the parts' items. A ValueError names what does not fit; then nothing was copied.
    """

def scatter(addresses: object, sizes: object, counts: object, skips: object, ids: object, bases: object, item_bytes: object, slot_strides: object, block_strides: object, slots_per_block: int, num_slots: int, parts_per_group: int, num_threads: int = 1, *, stream: int = 0) -> None:
    """
    Copy memory objects into slots: gather's arguments, the other way round. No id that is looked at may be there twice.
    """

def find_overlap(bases: object, item_bytes: object, slot_strides: object, block_strides: object, slots_per_block: int, num_slots: int) -> str:
    """
    Say which segments of gather's have slots that share bytes; an empty text if none do.
    """

FILE_GOOD: int = 0

FILE_SHORT: int = -1

FILE_ALTERED: int = -2

FILE_FOREIGN: int = -3

FILE_SKIPPED: int = -4

def chunk_head_bytes(key_bytes: int, layout_bytes: int) -> int:
    """Bytes of the head of a chunk file with such a key and layout."""

def checksum(bytes: bytes) -> tuple[Any, ...]:
    """The two sums of a chunk file's checksum."""

class ChunkFiles:
    """The chunk files of one directory."""

    def __init__(self, directory_fd: int, direct: bool, num_threads: int) -> None: ...

    def write(self, jobs: list[Any]) -> list[Any]:
        """
        Write (name, key, layout, address, nbytes, recycled) each; one status per job: 0 or an errno. Files appear whole, in the order given. `recycled` names a file to be written over, which is gone if the chunk is good, or is "". Without the interpreter's lock.
        """

    def read(self, jobs: list[Any]) -> list[Any]:
        """
        Read (name, key, head_bytes, address, nbytes) each; one status per job: FILE_*, or an errno. Without the interpreter's lock.
        """

    def read_heads(self, names: Sequence[str]) -> list[Any]:
        """(status, key, layout, head_bytes, nbytes) per name."""

    def remove(self, names: Sequence[str]) -> list[tuple[int, int]]:
        """
        Remove files; (position, errno) of those that could not be. One that is not there is no failure.
        """

    @property
    def num_not_direct(self) -> int:
        """
        Files that went through the page cache although `direct` was asked for.
        """
