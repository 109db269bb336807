"""Files of an earlier run that the disk tier has not listed yet."""

from collections import deque
from collections.abc import Iterable

from lmcache.v1.storage_backend.disk.chunk_directory import FoundFile


class Backlog:
    """Files to be adopted. They count against the budget from the moment they are known.

        file's state   meaning                              who may leave it
        unknown        the directory is not listed yet      begin
        waiting        known by name and size               take, drop_oldest, condemn_all
        taken          its head is being read               settle
        given up       taken, and not to be adopted; its    settle
                       room is somebody else's already
        deferred       its head could not be read for want  retry, drop_oldest
                       of something that comes back
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
        self._waiting: deque[FoundFile] = deque()  # newest first, or oldest first: as adopted
        self._taken: dict[FoundFile, None] = {}  # in the same order
        self._given_up: set[FoundFile] = set()
        self._deferred: list[FoundFile] = []
        self._condemned: set[str] = set()  # digests of keys
        self._is_listed = False
        self._all_condemned = False
        self.nbytes = 0  # of files that wait or are taken

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_settled(self) -> bool:
        """Whether every file of an earlier run is settled, or deferred."""
        return self._is_listed and not (self._waiting or self._taken or self._given_up)

    @property
    def may_bring_back(self) -> bool:
        """Whether a key that is removed now may have a file that would bring it back."""
        return not self.is_settled or bool(self._deferred)

    def begin(self, files: Iterable[FoundFile], room_bytes: int) -> list[FoundFile]:
        """Take in the newest files that fit; returns the others, to be removed."""
        self._is_listed = True
        if self._all_condemned:
            return list(files)
        left_out: list[FoundFile] = []
        newest: set[str] = set()  # keys whose latest file was met
        for file in sorted(files, key=lambda f: f.serial, reverse=True):
            is_useless = file.digest in self._condemned or file.digest in newest
            newest.add(file.digest)
            if is_useless or self.nbytes + file.size_bytes > room_bytes:
                left_out.append(file)
                continue
            self.nbytes += file.size_bytes
            self._waiting.append(file)
        if not self._newest_first:
            self._waiting.reverse()
        return left_out

    def take(self, max_files: int) -> list[FoundFile]:
        """Return the files to adopt next."""
        taken = [self._waiting.popleft() for _ in range(min(max_files, len(self._waiting)))]
        self._taken.update(dict.fromkeys(taken))
        return taken

    def drop_oldest(self) -> FoundFile | None:
        """Give up the oldest file; returns it when it must be removed now, not when it is settled.

        Raises:
            IndexError: There is none.
        """
        taken_is_oldest = not self._newest_first or not self._waiting
        if self._deferred:
            file = self._deferred.pop()
        elif self._taken and taken_is_oldest:
            file = next(reversed(self._taken) if self._newest_first else iter(self._taken))
            del self._taken[file]
            self._given_up.add(file)
        else:
            file = self._waiting.pop() if self._newest_first else self._waiting.popleft()
        self.nbytes -= file.size_bytes
        return None if file in self._given_up else file

    def defer(self, file: FoundFile) -> bool:
        """Put a taken file off until `retry`; False when it is settled instead: it was given up."""
        if file in self._given_up or file.digest in self._condemned:
            return False
        del self._taken[file]
        self._deferred.append(file)
        return True

    def retry(self) -> None:
        """Let deferred files wait again."""
        self._waiting.extend(self._deferred)
        self._deferred.clear()

    def settle(self, file: FoundFile) -> bool:
        """Note that a taken file is adopted or thrown away; False when it must not be adopted."""
        if file in self._given_up:
            self._given_up.discard(file)
            may_adopt = False
        else:
            del self._taken[file]
            self.nbytes -= file.size_bytes
            may_adopt = file.digest not in self._condemned
        if not self.may_bring_back:
            self._condemned.clear()
        return may_adopt

    def condemn(self, digest: str) -> None:
        """Note that a key was removed; its file, if there is one, is not adopted."""
        if self.may_bring_back:
            self._condemned.add(digest)

    def condemn_all(self) -> list[FoundFile]:
        """Note that everything was removed; returns the files that wait, to be removed."""
        self._all_condemned = not self._is_listed
        self._condemned.update(file.digest for file in self._taken)
        self.retry()
        waiting = list(self._waiting)
        self._forget_waiting()
        return waiting

    def abandon(self) -> list[FoundFile]:
        """Forget the files that wait; they stay where they are, but for those returned."""
        self.retry()
        useless = [file for file in self._waiting if file.digest in self._condemned]
        self._forget_waiting()
        return useless

    def _forget_waiting(self) -> None:
        self.nbytes -= sum(file.size_bytes for file in self._waiting)
        self._waiting.clear()
