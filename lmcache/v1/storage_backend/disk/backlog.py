"""Files of an earlier run that the disk tier has not listed yet."""

from collections import deque
from collections.abc import Iterable

from lmcache.v1.storage_backend.disk.chunk_directory import FoundFile


class Backlog:
    """Files to be adopted. They count against the budget from the moment they are known.

        file's state   meaning                            who may leave it
        waiting        known by name and size             take, drop_oldest
        taken          its head is being read             settle
        settled        adopted or thrown away             nobody

    Args:
        newest_first: Whether the newest is adopted first, so that the oldest ends coldest; else the
            oldest is, for orders that know no cold end.

    Threads: the disk tier's lock guards every member.
    """

    def __init__(self, newest_first: bool) -> None:
        self._newest_first = newest_first
        self._waiting: deque[FoundFile] = deque()
        self._waiting_bytes = 0
        self.nbytes = 0  # of files that wait or are taken

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def droppable_bytes(self) -> int:
        """Bytes that `drop_oldest` can free."""
        return self._waiting_bytes

    def begin(self, files: Iterable[FoundFile], room_bytes: int) -> list[FoundFile]:
        """Take in the newest files that fit; returns the others, to be removed."""
        left_out: list[FoundFile] = []
        for file in sorted(files, key=lambda f: f.serial, reverse=True):
            if self.nbytes + file.size_bytes > room_bytes:
                left_out.append(file)
                continue
            self.nbytes += file.size_bytes
            self._waiting.append(file)
        self._waiting_bytes = self.nbytes
        if not self._newest_first:
            self._waiting.reverse()
        return left_out

    def take(self, max_files: int) -> list[FoundFile]:
        """Return the files to adopt next."""
        taken = [self._waiting.popleft() for _ in range(min(max_files, len(self._waiting)))]
        self._waiting_bytes -= sum(file.size_bytes for file in taken)
        return taken

    def drop_oldest(self) -> FoundFile:
        """Give up the oldest file that waits; IndexError when none does."""
        file = self._waiting.pop() if self._newest_first else self._waiting.popleft()
        self._waiting_bytes -= file.size_bytes
        self.nbytes -= file.size_bytes
        return file

    def settle(self, file: FoundFile) -> None:
        """Note that a taken file was adopted or thrown away."""
        self.nbytes -= file.size_bytes

    def abandon(self) -> None:
        """Forget the files that wait; they stay where they are."""
        self.nbytes -= self._waiting_bytes
        self._waiting_bytes = 0
        self._waiting.clear()
