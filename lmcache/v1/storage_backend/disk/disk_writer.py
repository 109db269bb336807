"""The one thread that writes and removes the files of a disk tier."""

import errno
import threading
from collections.abc import Sequence

from lmcache.logging import init_logger
from lmcache.v1.native import FILE_FOREIGN, FILE_GOOD, FILE_SKIPPED, ChunkFiles
from lmcache.v1.storage_backend.disk.chunk_directory import ChunkDirectory, FoundFile
from lmcache.v1.storage_backend.disk.disk_chunk import DiskChunk, chunk_from_file
from lmcache.v1.storage_backend.disk.disk_index import DiskIndex
from lmcache.v1.storage_backend.disk.faults import FaultLog, may_succeed_later
from lmcache.v1.storage_backend.disk.serials import Serials
from lmcache.v1.storage_backend.disk.steps import Round
from lmcache.v1.storage_backend.disk.write_queue import Trash, Write

logger = init_logger(__name__)


class DiskWriter:
    """Works off the rounds of one index.

        state    meaning                                                who may leave it
        running  a daemon thread lists, writes and removes files        the index's end, close
        ended    the directory is given up; nothing is written any more nobody

    The directory belongs to this thread: it is given up when the thread ends, never before, so that
    its next owner has it alone.

    Args:
        index: Where the work comes from.
        directory: Whose files they are.
        files: Does the I/O.
        faults: Where failures are noted.
        serials: Raised above those of an earlier run.
    """

    def __init__(
        self,
        index: DiskIndex,
        directory: ChunkDirectory,
        files: ChunkFiles,
        faults: FaultLog,
        serials: Serials,
    ) -> None:
        self._index = index
        self._directory = directory
        self._files = files
        self._faults = faults
        self._serials = serials
        self._has_told_not_direct = False
        self._thread = threading.Thread(target=self._run, name="lmcache-disk-writer", daemon=True)
        self._thread.start()

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the thread's end; False when it did not come in time."""
        if self.is_current:
            return False
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on the writer's thread: in a callback of a put."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        try:
            self._find_files()
            while (work := self._index.next_round()) is not None:
                self._do(work)
        except BaseException:  # nobody writes any more, so nobody must wait for it
            logger.exception("the disk tier ends: its writer failed")
        finally:
            self._index.end()
            self._directory.release()

    def _find_files(self) -> None:
        found: list[FoundFile] = []
        try:
            found.extend(self._directory.found_files())
        except OSError as error:  # what is there is unknown, and so is the room that is left
            self._faults.note("listing", "", error.errno or errno.EIO)
            logger.error("%s: nothing is stored there; recreate the backend", self._directory.path)
            self._index.begin_close()
        self._serials.raise_above(max((file.serial for file in found), default=0))
        self._index.begin_adoption(found)

    def _do(self, work: Round) -> None:
        over_bytes = self._index.note_stuck(self._remove(work.trash))
        left = self._write(work.writes, over_bytes)
        self._index.note_stuck(self._remove(left))
        self._adopt(work.found)
        self._index.end_round()

    def _remove(self, trash: Sequence[Trash]) -> list[Trash]:
        """Remove files; returns those that could not be."""
        try:
            failed = self._files.remove([item.name for item in trash])
        except Exception:  # a thread that ended would leave every later put in memory
            logger.exception("removing %d files of the disk tier failed", len(trash))
            return []
        for position, status in failed:
            self._faults.note("removing", trash[position].name, status)
        return [trash[position] for position, _ in failed]

    def _write(self, writes: Sequence[Write], over_bytes: int) -> list[Trash]:
        """Write chunks, but for `over_bytes` of the last; returns the files that may be left over.

        Left over may be a file that was to be written over, by a chunk that was not written.
        """
        num_written = len(writes)
        while over_bytes > 0 and num_written:
            num_written -= 1
            over_bytes -= writes[num_written].chunk.file_bytes
        statuses = [errno.ENOSPC] * len(writes)
        try:
            jobs = [_job(write) for write in writes[:num_written]]
            statuses[:num_written] = self._files.write(jobs)
        except Exception:  # as above
            statuses[:num_written] = [FILE_SKIPPED] * num_written
            logger.exception("writing %d chunks failed", len(writes))
        left: list[Trash] = []
        for write, status in zip(writes, statuses, strict=True):
            if status != FILE_GOOD:
                self._faults.note("writing", write.chunk.name, status)
                left += () if write.recycled is None else (write.recycled,)
        self._tell_not_direct()
        chunks = [write.chunk for write in writes]
        after = self._index.finish_writes(chunks, [status == FILE_GOOD for status in statuses])
        after.settle(BaseException)
        return left

    def _tell_not_direct(self) -> None:
        if self._files.num_not_direct and not self._has_told_not_direct:
            self._has_told_not_direct = True
            logger.warning(
                "%s: use_odirect is set, but some files go through the page cache: the file system "
                "has no O_DIRECT, or the chunk's bytes are no multiple of 4096",
                self._directory.path,
            )

    def _adopt(self, found: Sequence[FoundFile]) -> None:
        adopted: list[tuple[FoundFile, DiskChunk | None]] = []
        try:
            heads = self._files.read_heads([file.name for file in found])
        except Exception:  # as above
            logger.exception("adopting %d files failed", len(found))
            heads = [(FILE_SKIPPED, b"", b"", 0, 0)] * len(found)
        for file, (status, key, layout, _, _) in zip(found, heads, strict=True):
            if status != FILE_GOOD:
                self._faults.note("adopting", file.name, status)
            if may_succeed_later(status) and self._index.defer(file):
                continue
            is_good = status == FILE_GOOD
            adopted.append((file, self._chunk_of(file, key, layout) if is_good else None))
        self._index.adopt(adopted)

    def _chunk_of(self, file: FoundFile, key: bytes, layout: bytes) -> DiskChunk | None:
        try:
            chunk = chunk_from_file(self._index.pool, file.name, key, layout)
            if chunk.file_bytes == file.size_bytes:
                return chunk
        except ValueError:
            pass
        self._faults.note("adopting", file.name, FILE_FOREIGN)
        return None


def _job(write: Write) -> tuple[str, bytes, bytes, int, int, str]:
    chunk, recycled = write
    assert chunk.source is not None, "a chunk keeps its source until it was written"
    old_name = "" if recycled is None else recycled.name
    address = chunk.source.data_ptr
    return chunk.name, chunk.key_bytes, chunk.layout, address, chunk.nbytes, old_name
