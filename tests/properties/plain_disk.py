"""What a disk tier under LRU must do, on plain lists: which copies are there, in which order."""

import errno
from dataclasses import dataclass

from disk_builders import HEAD_BYTES


@dataclass
class Copy:
    """One copy of a key: the bytes of its chunk, the name of its file, and how that file is."""

    nbytes: int
    name: str = ""
    is_written: bool = False
    damage: str = ""

    @property
    def file_bytes(self):
        return self.nbytes + HEAD_BYTES


class PlainDisk:
    """`copies` lists the residents, coldest first. Pins are on copies, by the owner's name."""

    def __init__(self, capacity_bytes):
        self.capacity_bytes = capacity_bytes
        self.copies = {}
        self.pins = {}

    @property
    def used_bytes(self):
        return sum(copy.file_bytes for copy in self.copies.values())

    def _is_pinned(self, copy):
        return any(copy is pinned for pins in self.pins.values() for pinned in pins)

    def _to_young_end(self, key):
        self.copies[key] = self.copies.pop(key)

    def _to_cold_end(self, key):
        copy = self.copies.pop(key)
        self.copies = {key: copy, **self.copies}

    def use(self, some_keys):
        """Head first in, head youngest."""
        for key in reversed(some_keys):
            if key in self.copies:
                self._to_young_end(key)

    def demote(self, some_keys):
        for key in some_keys:
            if key in self.copies:
                self._to_cold_end(key)

    def remove(self, some_keys):
        for key in some_keys:
            self.copies.pop(key, None)

    def clear(self):
        self.copies = {k: copy for k, copy in self.copies.items() if self._is_pinned(copy)}

    def prefix(self, some_keys):
        found = []
        for key in some_keys:
            if key not in self.copies:
                break
            found.append(key)
        return found

    def pin(self, owner, some_keys):
        self.pins[owner] = [self.copies[key] for key in some_keys]
        self.use(some_keys)

    def _make_room(self, more_bytes, may_evict, protected):
        lacking = self.used_bytes + more_bytes - self.capacity_bytes
        if lacking <= 0:
            return True
        victims = [
            key
            for key, copy in self.copies.items()
            if key not in protected and not self._is_pinned(copy)
        ]
        if not may_evict or sum(self.copies[key].file_bytes for key in victims) < lacking:
            return False
        for key in victims:
            if lacking > 0:
                lacking -= self.copies.pop(key).file_bytes
        return True

    def put(self, sizes, is_cold, may_evict):
        """`sizes` maps keys, head first, to bytes. Returns the keys that got a new copy."""
        protected, listed, new = set(sizes) & set(self.copies), [], {}
        for key, nbytes in sizes.items():
            old = self.copies.get(key)
            if old is None or old.nbytes != nbytes:
                copy = Copy(nbytes)
                more = copy.file_bytes - (old.file_bytes if old else 0)
                taken = sum(made.file_bytes for made in new.values())
                taken -= sum(self.copies[k].file_bytes for k in new if k in self.copies)
                if not self._make_room(taken + more, may_evict, protected):
                    break
                new[key] = copy
            listed.append(key)
        for key in listed if is_cold else reversed(listed):
            if key in new:
                self.copies.pop(key, None)
                self.copies[key] = new[key]
                if is_cold:
                    self._to_cold_end(key)
            elif not is_cold:
                self._to_young_end(key)
        return list(new)

    def written(self, name, is_good):
        """The writer is done with a file."""
        for key, copy in list(self.copies.items()):
            if copy.name == name and is_good:
                copy.is_written = True
            elif copy.name == name:
                del self.copies[key]

    def read(self, key, fault):
        """Whether a key can be had below; what cannot be read is gone, or kept for later."""
        copy = self.copies.get(key)
        if copy is None or not copy.is_written:
            return copy is not None
        if fault == errno.EMFILE:
            return False
        if fault or copy.damage:
            del self.copies[key]
            return False
        return True

    def restart(self):
        """Everything in flight was written; what is found to be bad is gone."""
        self.pins.clear()
        kept = {
            key: copy
            for key, copy in self.copies.items()
            if copy.damage not in ("vanished", "truncated")
        }
        by_serial = sorted(kept, key=lambda key: kept[key].name.rpartition("-")[2])
        self.copies = {key: kept[key] for key in by_serial}
