"""What can go wrong with a chunk file, in words, and how often it did."""

import errno
import os
import threading

from lmcache.logging import init_logger
from lmcache.v1.native import FILE_ALTERED, FILE_FOREIGN, FILE_SHORT, FILE_SKIPPED

logger = init_logger(__name__)

_WORDS = {
    FILE_SHORT: "its length is not what its head says",
    FILE_ALTERED: "its checksum does not fit",
    FILE_FOREIGN: "it is of another format, version or key",
    FILE_SKIPPED: "the process is ending",
}
_REMEDIES = {
    errno.ENOSPC: "free space there, or lower max_local_disk_size",
    errno.EDQUOT: "raise the quota, or lower max_local_disk_size",
    errno.ENOENT: "if the directory was removed, restart, or recreate the backend",
}
_NO_FAULT_OF_THE_FILE = frozenset(
    {FILE_SKIPPED, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN}
)


def words_for(status: int) -> str:
    """Return what a status of the core means, and what to do about it."""
    words = _WORDS.get(status) or os.strerror(status)
    return f"{words}; {_REMEDIES[status]}" if status in _REMEDIES else words


def is_bad_file(status: int) -> bool:
    """Whether reading failed because of the file: it will not get better."""
    return status in (FILE_SHORT, FILE_ALTERED, FILE_FOREIGN)


def may_succeed_later(status: int) -> bool:
    """Whether reading failed for want of something that comes back."""
    return status in _NO_FAULT_OF_THE_FILE


class FaultLog:
    """Logs each kind of fault once, and counts.

    Threads: safe from any thread; `_lock`, a leaf, guards the counts and what was reported.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._reported: set[tuple[str, int]] = set()
        self.num_bad_files = 0
        self.num_failed_reads = 0

    def note(self, what: str, name: str, status: int) -> None:
        """Count and report that `what` was done to a file and failed."""
        with self._lock:
            self.num_bad_files += is_bad_file(status)
            self.num_failed_reads += what == "reading"
            is_new = (what, status) not in self._reported
            self._reported.add((what, status))
        if is_new:
            logger.error(
                "%s %s/%s failed, which costs a miss: %s; logged once per kind",
                what,
                self._directory,
                name,
                words_for(status),
            )
