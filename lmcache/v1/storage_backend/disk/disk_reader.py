"""Reading chunks from disk into memory objects."""

from collections.abc import Sequence

from lmcache.v1.memory_object import MemoryObj, release_all
from lmcache.v1.native import FILE_GOOD, ChunkFiles
from lmcache.v1.storage_backend.abstract_backend import AllocatorBackendInterface
from lmcache.v1.storage_backend.disk.disk_chunk import DiskChunk
from lmcache.v1.storage_backend.disk.disk_index import DiskIndex
from lmcache.v1.storage_backend.disk.faults import FaultLog, may_succeed_later


class DiskReader:
    """Reads batches of chunks into memory of the CPU pool.

    Args:
        index: Told of chunks whose file is of no use.
        files: Does the I/O.
        faults: Where failures are noted.
        pool_bytes: Of the pool that is read into.

    Threads: safe from any thread; holds no lock over I/O.
    """

    def __init__(
        self, index: DiskIndex, files: ChunkFiles, faults: FaultLog, pool_bytes: int
    ) -> None:
        self._index = index
        self._files = files
        self._faults = faults
        self._pool_bytes = pool_bytes

    def read(
        self,
        chunks: Sequence[DiskChunk],
        memory: AllocatorBackendInterface,
        into: list[MemoryObj | None],
    ) -> None:
        """Append one object with a reference, or None, per chunk; the caller holds the chunks.

        Where memory ends, what follows is not read. Every object given holds the bytes that were
        written for its key.
        """
        objs: list[MemoryObj] = []
        try:
            self._allocate(chunks, memory, objs)
            statuses = self._files.read(
                [
                    (c.name, c.key_bytes, c.head_bytes, obj.data_ptr, c.nbytes)
                    for c, obj in zip(chunks, objs, strict=False)
                ]
            )
        except BaseException:
            release_all(objs)
            raise
        into += objs
        into += [None] * (len(chunks) - len(objs))
        first = len(into) - len(chunks)
        for position, status in enumerate(statuses):
            if status != FILE_GOOD:
                into[first + position] = None
                objs[position].ref_count_down()
                self._note_failure(chunks[position], status)

    def _note_failure(self, chunk: DiskChunk, status: int) -> None:
        # One that was removed while we read is no fault.
        if may_succeed_later(status) or self._index.remove_chunk(chunk):
            self._faults.note("reading", chunk.name, status)

    def _allocate(
        self, chunks: Sequence[DiskChunk], memory: AllocatorBackendInterface, objs: list[MemoryObj]
    ) -> None:
        """Append an object for each chunk, head first, until memory ends."""
        spec = chunks[0].spec
        is_alike = all(chunk.spec is spec for chunk in chunks)  # specs are shared
        if is_alike and len(chunks) * spec.size_bytes <= self._pool_bytes:
            made = memory.batched_allocate(
                list(spec.shapes), list(spec.dtypes), len(chunks), spec.fmt, busy_loop=False
            )
            if made is not None:
                objs += made
                return
        for chunk in chunks:
            spec = chunk.spec
            obj = memory.allocate(list(spec.shapes), list(spec.dtypes), spec.fmt, busy_loop=False)
            if obj is None:
                return
            objs.append(obj)
