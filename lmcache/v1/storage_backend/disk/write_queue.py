"""What the disk tier's writer has to do: chunks to write, files to remove."""

import bisect
from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple

from lmcache.v1.memory_object import MemoryObj
from lmcache.v1.storage_backend.disk.disk_chunk import DiskChunk

_MAX_ROUND_CHUNKS = 64
_MAX_ROUND_BYTES = 512 << 20  # a few of the largest chunks for each thread


class Trash(NamedTuple):
    """A file that nothing lists any more.

    Attributes:
        name: In the directory.
        file_bytes: Its bytes.
        ticket: Its place among what was admitted and thrown away.
    """

    name: str
    file_bytes: int
    ticket: int


class Write(NamedTuple):
    """A chunk to be written, and the file of the same size to be written over, if there is one."""

    chunk: DiskChunk
    recycled: Trash | None


class WriteQueue:
    """Chunks in order of admission, and files that nothing lists any more.

    The writer works in rounds: it removes files, then writes the first chunks. A file that was
    thrown away is kept for a waiting chunk of its size, to be written over, as long as there is
    one: a file system takes several times as long to free blocks and to find new ones. A chunk's
    room was made before it was admitted, so the files never exceed the budget.
    A chunk that leaves the index while it waits is never written; see `DiskChunk` for its states.

    Args:
        max_bytes: Most bytes that chunks in flight may keep in memory; one alone may exceed it.

    Threads: the disk tier's lock guards every member.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.in_flight_bytes = 0
        self._waiting: dict[DiskChunk, None] = {}
        self._writing: dict[DiskChunk, None] = {}
        self._trash: dict[int, deque[Trash]] = {}  # by bytes of the file; in order of tickets
        self._last_ticket = 0
        self._first_in_round: int | None = None  # ticket, while a round runs
        self._stuck: list[Trash] = []  # could not be removed; tried again with the next round

    def __len__(self) -> int:
        return len(self._waiting) + len(self._writing)

    @property
    def has_work(self) -> bool:
        """Whether a round would find something to do."""
        return bool(self._waiting or self._trash)

    @property
    def stuck_bytes(self) -> int:
        """Bytes of files that could not be removed: they still take their room."""
        return sum(trash.file_bytes for trash in self._stuck)

    def note_stuck(self, trash: Iterable[Trash]) -> None:
        """Note that files could not be removed."""
        self._stuck += trash

    def takes(self, nbytes: int) -> bool:
        """Whether a chunk of `nbytes` may be added."""
        return not self.in_flight_bytes or self.in_flight_bytes + nbytes <= self.max_bytes

    def add(self, chunk: DiskChunk) -> None:
        """Queue a chunk; its source gets a reference of ours."""
        assert chunk.source is not None, "a new chunk is written from an object"
        chunk.source.ref_count_up()
        chunk.ticket = self._next_ticket()
        self._waiting[chunk] = None
        self.in_flight_bytes += chunk.nbytes

    def let_go(self, chunk: DiskChunk) -> list[MemoryObj]:
        """Note that a chunk left the index; returns the source to be released, if any."""
        if chunk in self._waiting:
            del self._waiting[chunk]
            return self._take_source(chunk)
        if chunk in self._writing:
            chunk.is_doomed = True
        else:
            self.throw_away(chunk.name, chunk.file_bytes)
        return []

    def throw_away(self, name: str, file_bytes: int) -> None:
        """Let the writer remove a file."""
        files = self._trash.setdefault(file_bytes, deque())
        files.append(Trash(name, file_bytes, self._next_ticket()))

    def begin_round(self) -> tuple[list[Trash], list[Write]]:
        """Return the files to be removed, and the chunks to be written after that, in order."""
        in_flight = (*self._waiting, *self._writing)
        self.in_flight_bytes = sum(chunk.nbytes for chunk in in_flight)  # interrupts may miscount
        writes: list[Write] = []
        for chunk in self._first_waiting():
            del self._waiting[chunk]
            self._writing[chunk] = None
            writes.append(Write(chunk, self._take_trash(chunk.file_bytes)))
        num_waiting = Counter(chunk.file_bytes for chunk in self._waiting)
        trash: list[Trash] = []
        for file_bytes, files in list(self._trash.items()):
            num_needless = len(files) - num_waiting[file_bytes]
            trash += [self._trash_of(file_bytes) for _ in range(num_needless)]
        stuck, self._stuck = self._stuck, []
        tickets = [item.ticket for item in trash]
        for chunk, recycled in writes:
            tickets.append(chunk.ticket if recycled is None else recycled.ticket)
            tickets.append(chunk.ticket)
        self._first_in_round = min(tickets, default=None)
        return trash + stuck, writes

    def finish(self, chunk: DiskChunk, is_whole: bool) -> list[MemoryObj]:
        """Note that the writer is done with a chunk; returns its source, to be released."""
        del self._writing[chunk]
        if chunk.is_doomed and is_whole:  # it was thrown away before, which drains wait for
            files = self._trash.setdefault(chunk.file_bytes, deque())
            item = Trash(chunk.name, chunk.file_bytes, chunk.ticket)
            bisect.insort(files, item, key=lambda trash: trash.ticket)
        return self._take_source(chunk)

    def end_round(self) -> None:
        """Note that everything `begin_round` gave is done, and its sources are released."""
        self._first_in_round = None

    def abandon(self) -> list[MemoryObj]:
        """Forget what waits; returns the sources, to be released."""
        sources: list[MemoryObj] = []
        for chunk in self._waiting:
            sources += self._take_source(chunk)
        self._waiting.clear()
        self._trash.clear()
        self._stuck.clear()
        return sources

    def mark(self) -> int:
        """Return this moment: the last ticket."""
        return self._last_ticket

    def is_done(self, mark: int) -> bool:
        """Whether everything admitted or thrown away before a moment is done."""
        if self._first_in_round is not None and self._first_in_round <= mark:
            return False
        first = next(iter(self._waiting), None)
        if first is not None and first.ticket <= mark:
            return False
        return all(files[0].ticket > mark for files in self._trash.values() if files)

    def _next_ticket(self) -> int:
        self._last_ticket += 1
        return self._last_ticket

    def _first_waiting(self) -> list[DiskChunk]:
        chunks: list[DiskChunk] = []
        nbytes = 0
        for chunk in self._waiting:
            nbytes += chunk.nbytes
            if chunks and (nbytes > _MAX_ROUND_BYTES or len(chunks) == _MAX_ROUND_CHUNKS):
                break
            chunks.append(chunk)
        return chunks

    def _take_trash(self, file_bytes: int) -> Trash | None:
        return self._trash_of(file_bytes) if self._trash.get(file_bytes) else None

    def _trash_of(self, file_bytes: int) -> Trash:
        files = self._trash[file_bytes]
        item = files.popleft()
        if not files:
            del self._trash[file_bytes]
        return item

    def _take_source(self, chunk: DiskChunk) -> list[MemoryObj]:
        source, chunk.source = chunk.source, None
        self.in_flight_bytes -= chunk.nbytes
        return [] if source is None else [source]

    def check_integrity(self) -> None:
        """Raise AssertionError when the bytes in flight do not add up."""
        in_flight = [*self._waiting, *self._writing]
        if any(chunk.source is None for chunk in in_flight):
            raise AssertionError("a chunk in flight has no source")
        if sum(chunk.nbytes for chunk in in_flight) != self.in_flight_bytes:
            raise AssertionError("the bytes in flight do not add up")
