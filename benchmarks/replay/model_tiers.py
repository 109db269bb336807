"""The tiers of the plain-Python model: a pool of entries in LRU order, and a disk below it.

Written from the rules alone, as `model` is: every put goes to both tiers, a read from disk puts the
entry back into the pool, and what a tier lists leaves it coldest first.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from benchmarks.replay.settings import Settings

KV = "kv"
IMAGE = "image"
Entry = tuple[str, int]


class LruTier:
    """Entries by kind and prefix id, coldest first, and how much of the tier each takes.

    `kept` are entries that may not leave: those a request has pinned, those a store runs over.
    """

    def __init__(self, capacity: int, size_of_kind: dict[str, int]) -> None:
        self.capacity = capacity
        self.size_of_kind = size_of_kind
        self.free = capacity
        self.evictable = 0
        self.order: OrderedDict[Entry, int] = OrderedDict()
        self.kept: set[Entry] = set()
        self.other: LruTier | None = None
        self.evicted: list[tuple[Entry, bool]] = []  # and whether it was the last copy

    def __contains__(self, entry: Entry) -> bool:
        return entry in self.order

    def prefix(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """The leading entries that are here."""
        length = 0
        while length < len(entries) and entries[length] in self.order:
            length += 1
        return entries[:length]

    def use(self, entries: Sequence[Entry]) -> None:
        """Use those that are here, head youngest."""
        for entry in reversed(entries):
            if entry in self.order:
                self.order.move_to_end(entry)

    def keep(self, entries: Iterable[Entry]) -> list[Entry]:
        """Let entries stay; returns those that did not already."""
        new = [entry for entry in entries if entry not in self.kept]
        self.kept.update(new)
        self.evictable -= sum(self.order[entry] for entry in new)
        return new

    def let_go(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self.kept.remove(entry)
            self.evictable += self.order[entry]

    def reserve(self, kind: str, *, may_evict: bool = True) -> bool:
        """Take the room of one entry, evicting the coldest; False leaves the tier as it was."""
        size = self.size_of_kind[kind]
        if self.free + (self.evictable if may_evict else 0) < size:
            return False
        while self.free < size:
            victim = next(entry for entry in self.order if entry not in self.kept)
            freed = self.order.pop(victim)
            self.evicted.append((victim, self.other is None or victim not in self.other))
            self.free += freed
            self.evictable -= freed
        self.free -= size
        return True

    def give_back(self, entries: Iterable[Entry]) -> None:
        """Free room that was reserved for entries."""
        self.free += sum(self.size_of_kind[kind] for kind, _ in entries)

    def add(self, entries: Sequence[Entry], *, cold: bool = False) -> None:
        """List entries whose room is reserved: head youngest, or first out when cold."""
        for entry in reversed(entries):
            self.order[entry] = self.size_of_kind[entry[0]]
            self.evictable += self.order[entry]
            if cold:
                self.order.move_to_end(entry, last=False)


class Tiers:
    """The pool, and a disk tier that holds nothing where the settings name none."""

    def __init__(self, settings: Settings) -> None:
        self.pool = LruTier(settings.pool_blocks, {KV: 1, IMAGE: settings.image_blocks})
        self.has_disk = settings.disk_blocks is not None
        self.disk = LruTier(
            settings.disk_bytes,
            {KV: settings.block_file_bytes, IMAGE: settings.image_file_bytes},
        )
        self.pool.other, self.disk.other = self.disk, self.pool
        self.num_dropped = 0
        self.num_written = {KV: 0, IMAGE: 0}
        self.num_promoted = {KV: 0, IMAGE: 0}

    def __contains__(self, entry: Entry) -> bool:
        return entry in self.pool or entry in self.disk

    def use(self, entries: Sequence[Entry]) -> None:
        """Use entries in whichever tier holds them, head youngest in each."""
        self.pool.use(entries)
        self.disk.use(entries)

    def match(self, entries: Sequence[Entry]) -> tuple[Sequence[Entry], Sequence[Entry]]:
        """The leading entries that the pool holds, and those behind them that the disk holds."""
        in_pool = self.pool.prefix(entries)
        return in_pool, self.disk.prefix(entries[len(in_pool) :])

    def write(self, entries: Sequence[Entry], *, cold: bool = False) -> None:
        """Put entries that the pool has just taken to disk too; the first without room ends it.

        What is there is used again, unless the put is cold; a cold put evicts nothing.
        """
        if not self.has_disk:
            return
        resident = [entry for entry in entries if entry in self.disk]
        kept_here = self.disk.keep(resident)
        taken: list[Entry] = []
        for entry in entries:
            if entry not in self.disk and not self.disk.reserve(entry[0], may_evict=not cold):
                self.num_dropped += 1
                break
            taken.append(entry)
        self.disk.let_go(kept_here)
        new = [entry for entry in taken if entry not in self.disk]
        self.disk.add(new, cold=cold)
        if not cold:
            self.disk.use(taken)
        for kind, _ in new:
            self.num_written[kind] += 1

    def read(self, entries: Sequence[Entry]) -> bool:
        """Read entries from disk into the pool; False where its memory ended before the last.

        Memory is taken for each of them first. What the pool still holds then is only used.
        """
        self.disk.use(entries)
        num_read = 0
        while num_read < len(entries) and self.pool.reserve(entries[num_read][0]):
            num_read += 1
        read = entries[:num_read]
        new = [entry for entry in read if entry not in self.pool]
        self.pool.give_back(entry for entry in read if entry in self.pool)
        self.pool.add(new)
        self.pool.use(read)
        for kind, _ in new:
            self.num_promoted[kind] += 1
        return num_read == len(entries)

    def take_evicted(self) -> list[tuple[str, Entry, bool]]:
        """What left since the last call: from "pool" or "disk", and whether as the last copy."""
        left = [("pool", *eviction) for eviction in self.pool.evicted]
        left += [("disk", *eviction) for eviction in self.disk.evicted]
        self.pool.evicted.clear()
        self.disk.evicted.clear()
        return left
