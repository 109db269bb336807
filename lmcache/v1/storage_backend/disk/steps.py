"""What passes between the disk tier's index, its writer and its facade."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from lmcache.v1.cache_key import CacheEngineKey
from lmcache.v1.memory_object import MemoryObj, release_all
from lmcache.v1.storage_backend.abstract_backend import PutCallback
from lmcache.v1.storage_backend.disk.chunk_directory import FoundFile
from lmcache.v1.storage_backend.disk.disk_chunk import DiskChunk
from lmcache.v1.storage_backend.disk.write_queue import Trash, Write
from lmcache.v1.storage_backend.put_callbacks import call_back


@dataclass(frozen=True, slots=True)
class Round:
    """What the writer does next: the removals, then the writes, then a look at old files."""

    trash: list[Trash]
    writes: list[Write]
    found: list[FoundFile]


class Wanted(NamedTuple):
    """One object of a put; `chunk` is None where the key was resident when the put began."""

    key: CacheEngineKey
    obj: MemoryObj
    chunk: DiskChunk | None


class Dropped(enum.Enum):
    """Why a put was not taken."""

    QUEUE_FULL = "queue full"
    NO_ROOM = "no room"


@dataclass(slots=True)
class Aftermath:
    """What remains to be done once the lock is free, because it may run code that is not ours.

    Attributes:
        sources: Objects to be released.
        callbacks: To be called with the key.
        dropped: Why the rest of a put was not taken.
    """

    sources: list[MemoryObj] = field(default_factory=list)
    callbacks: list[tuple[PutCallback, CacheEngineKey]] = field(default_factory=list)
    dropped: Dropped | None = None

    def remember(self, callback: PutCallback, listed: Mapping[CacheEngineKey, DiskChunk]) -> None:
        """See that `callback` runs once for each key: now, or when its file is whole."""
        for key, chunk in listed.items():
            if chunk.source is None:
                self.callbacks.append((callback, key))
            else:
                chunk.callbacks.append(callback)

    def settle(self, caught: type[BaseException] = Exception) -> None:
        """Release and call back; what a callback raises is logged, and undoes nothing."""
        release_all(self.sources)
        for callback, key in self.callbacks:
            call_back(callback, key, caught)
