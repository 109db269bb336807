"""Files of an earlier run that the disk tier has not listed yet."""

from collections import deque
from collections.abc import Iterable

from lmcache.v1.storage_backend.disk.chunk_directory import FoundFile


class Backlog:
    """Files to be adopted. They count against the budget from the moment they are known.

        file's state   meaning                              who may leave it
        unknown        the directory is not listed yet      begin
        waiting        known by name and size               take, drop_oldest
        taken          its head is being read               settle
        settled        adopted or thrown away               nobody

    A key that is removed before its file was adopted is remembered until the last file is settled:
    its file must not bring it back.

    Args:
        newest_first: Whether the newest is adopted first, so that the oldest ends coldest; else the
            oldest is, for orders that know no cold end.

    Threads: the disk tier's lock guards every member.
    """

    def __init__(self, newest_first: bool) -> None:
        self._newest_first = newest_first
        self._waiting: deque[FoundFile] = deque()
        self._waiting_bytes = 0
        self._taken: set[FoundFile] = set()
        self._condemned: set[str] = set()  # digests of keys
        self._is_listed = False
        self._all_condemned = False
        self.nbytes = 0  # of files that wait or are taken

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_settled(self) -> bool:
        """Whether every file of an earlier run is settled."""
        return self._is_listed and not self._waiting and not self._taken

    @property
    def droppable_bytes(self) -> int:
        """Bytes that `drop_oldest` can free."""
        return self._waiting_bytes

    def begin(self, files: Iterable[FoundFile], room_bytes: int) -> list[FoundFile]:
        """Take in the newest files that fit; returns the others, to be removed."""
        self._is_listed = True
        if self._all_condemned:
            return list(files)
        left_out: list[FoundFile] = []
        for file in sorted(files, key=lambda f: f.serial, reverse=True):
            is_condemned = file.digest in self._condemned
            if is_condemned or self.nbytes + file.size_bytes > room_bytes:
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
        self._taken.update(taken)
        return taken

    def drop_oldest(self) -> FoundFile:
        """Give up the oldest file that waits; IndexError when none does."""
        file = self._waiting.pop() if self._newest_first else self._waiting.popleft()
        self._waiting_bytes -= file.size_bytes
        self.nbytes -= file.size_bytes
        return file

    def settle(self, file: FoundFile) -> bool:
        """Note that a taken file is adopted or thrown away; False when it must not be adopted."""
        self._taken.discard(file)
        self.nbytes -= file.size_bytes
        may_adopt = file.digest not in self._condemned
        if self.is_settled:
            self._condemned.clear()
        return may_adopt

    def condemn(self, digest: str) -> None:
        """Note that a key was removed; its file, if there is one, is not adopted."""
        if not self.is_settled:
            self._condemned.add(digest)

    def condemn_all(self) -> list[FoundFile]:
        """Note that everything was removed; returns the files that wait, to be removed."""
        self._all_condemned = not self._is_listed
        self._condemned.update(file.digest for file in self._taken)
        waiting = list(self._waiting)
        self.abandon()
        return waiting

    def abandon(self) -> None:
        """Forget the files that wait; they stay where they are."""
        self.nbytes -= self._waiting_bytes
        self._waiting_bytes = 0
        self._waiting.clear()
