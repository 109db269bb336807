"""What the disk tier's writer has to do: chunks to write, files to remove."""

from dataclasses import dataclass

from lmcache.v1.memory_object import MemoryObj
from lmcache.v1.storage_backend.disk.disk_chunk import DiskChunk

_MAX_ROUND_CHUNKS = 64
_MAX_ROUND_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Trash:
    """A file to be removed, and its bytes."""

    name: str
    file_bytes: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment in the queue: what was admitted or thrown away before it."""

    ticket: int
    round_number: int


class WriteQueue:
    """Chunks in order of admission, and files that nothing lists any more.

    The writer works in rounds: it removes every file thrown away so far, then writes the first
    chunks. A chunk's room was made before it was admitted, so the files never exceed the budget.
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
        self._trash: list[Trash] = []
        self._last_ticket = 0
        self._rounds_begun = self._rounds_done = 0
        self._first_in_round: int | None = None  # ticket, while a round with chunks runs

    def __len__(self) -> int:
        return len(self._waiting) + len(self._writing)

    @property
    def has_work(self) -> bool:
        """Whether a round would find something to do."""
        return bool(self._waiting or self._trash)

    def takes(self, nbytes: int) -> bool:
        """Whether a chunk of `nbytes` may be added."""
        return not self.in_flight_bytes or self.in_flight_bytes + nbytes <= self.max_bytes

    def add(self, chunk: DiskChunk) -> None:
        """Queue a chunk; its source gets a reference of ours."""
        assert chunk.source is not None, "a new chunk is written from an object"
        chunk.source.ref_count_up()
        self._last_ticket += 1
        chunk.ticket = self._last_ticket
        self._waiting[chunk] = None
        self.in_flight_bytes += chunk.get_size()

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
        self._trash.append(Trash(name, file_bytes))

    def begin_round(self) -> tuple[list[Trash], list[DiskChunk]]:
        """Return the files to be removed, and the chunks to be written after that, in order."""
        trash, self._trash = self._trash, []
        chunks: list[DiskChunk] = []
        nbytes = 0
        for chunk in self._waiting:
            nbytes += chunk.get_size()
            if chunks and (nbytes > _MAX_ROUND_BYTES or len(chunks) == _MAX_ROUND_CHUNKS):
                break
            chunks.append(chunk)
        for chunk in chunks:
            del self._waiting[chunk]
            self._writing[chunk] = None
        self._first_in_round = chunks[0].ticket if chunks else None
        self._rounds_begun += 1
        return trash, chunks

    def finish(self, chunk: DiskChunk, is_whole: bool) -> list[MemoryObj]:
        """Note that the writer is done with a chunk; returns its source, to be released."""
        del self._writing[chunk]
        if chunk.is_doomed and is_whole:
            self.throw_away(chunk.name, chunk.file_bytes)
        return self._take_source(chunk)

    def end_round(self) -> None:
        """Note that everything `begin_round` gave is done."""
        self._rounds_done = self._rounds_begun
        self._first_in_round = None

    def abandon(self) -> list[MemoryObj]:
        """Forget what waits; returns the sources, to be released."""
        sources: list[MemoryObj] = []
        for chunk in self._waiting:
            sources += self._take_source(chunk)
        self._waiting.clear()
        self._trash.clear()
        return sources

    def mark(self) -> Mark:
        """Return this moment."""
        return Mark(self._last_ticket, self._rounds_begun + bool(self._trash))

    def is_done(self, mark: Mark) -> bool:
        """Whether everything before a moment is done, and the sources of it are released."""
        if self._rounds_done < mark.round_number:
            return False
        first = self._first_in_round  # also when all of it is written: its sources go at its end
        if first is None:
            first = next((chunk.ticket for chunk in self._waiting), None)
        return first is None or first > mark.ticket

    def _take_source(self, chunk: DiskChunk) -> list[MemoryObj]:
        source, chunk.source = chunk.source, None
        self.in_flight_bytes -= chunk.get_size()
        return [] if source is None else [source]

    def check_integrity(self) -> None:
        """Raise AssertionError when the bytes in flight do not add up."""
        in_flight = [*self._waiting, *self._writing]
        if any(chunk.source is None for chunk in in_flight):
            raise AssertionError("a chunk in flight has no source")
        if sum(chunk.get_size() for chunk in in_flight) != self.in_flight_bytes:
            raise AssertionError("the bytes in flight do not add up")
