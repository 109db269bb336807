"""Where a rank's chunk files lie, and who owns the directory."""

import errno
import fcntl
import hashlib
import os
import re
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lmcache.logging import init_logger
from lmcache.v1.errors import ConfigError

logger = init_logger(__name__)

FORMAT_DIRECTORY = "lmcache-v1"
_MAX_READABLE_CHARACTERS = 80
_DIGEST_BYTES = 16
_FILE_SCHEME = "file://"
_SUFFIX = ".pt"
_CHUNK_NAME = re.compile(rf"[0-9a-f]{{{2 * _DIGEST_BYTES}}}-[0-9a-f]{{16}}{re.escape(_SUFFIX)}")
_TEMPORARY_SUFFIX = ".tmp"  # the core's, for files it has not finished


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file of an earlier run.

    Attributes:
        name: In the directory.
        size_bytes: Of the whole file.
    """

    name: str
    size_bytes: int

    @property
    def serial(self) -> int:
        """The number in its name: files of a larger one were put later."""
        return int(self.name.removesuffix(_SUFFIX).rpartition("-")[2], 16)

    @property
    def digest(self) -> str:
        """The digest of its key."""
        return self.name.partition("-")[0]


def split_paths(text: str) -> list[str]:
    """Return the directories of a `local_disk` setting, in order; `file://` is dropped.

    Raises:
        ConfigError: It names none.
    """
    paths = [part.strip().removeprefix(_FILE_SCHEME) for part in text.split(",")]
    paths = [path for path in paths if path]
    if not paths:
        raise ConfigError(f"local_disk={text!r} names no directory")
    return paths


def digest_of(key_text: str) -> str:
    """Return what stands for a key in file names."""
    return hashlib.blake2b(key_text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def file_name(key_text: str, serial: int) -> str:
    """Return the name of a chunk's file: the key's digest, and a number that is never reused.

    Without the number, removing the file of a copy that left could hit the file of the next one.
    """
    return f"{digest_of(key_text)}-{serial:016x}{_SUFFIX}"


class ChunkDirectory:
    """One directory that this object owns: `<root>/lmcache-v1/<model, world, rank>/<n>/`.

        state   meaning                                              who may leave it
        owned   we hold the lock on it; ours to write                release, the process's end
        free    anybody may claim it; `directory_fd` is closed       claim

    Nothing outside it is read or removed. The lock is the kernel's and goes with the process.

    Args:
        path: The directory.
        directory_fd: It, open and locked.

    Threads: immutable but for `release`, which belongs to the owner.
    """

    def __init__(self, path: Path, directory_fd: int) -> None:
        self.path = path
        self.directory_fd = directory_fd
        _OWNED.add(self)

    @classmethod
    def claim(cls, root: str, model_name: str, world_size: int, rank: int) -> "ChunkDirectory":
        """Own the first directory of a model's rank under `root` that nobody else owns.

        Raises:
            ConfigError: It cannot be made or written.
        """
        parent = Path(root) / FORMAT_DIRECTORY / _readable(model_name, world_size, rank)
        number = 0
        while True:
            path = parent / str(number)
            try:
                directory_fd = _try_lock(path)
                if directory_fd is not None:
                    return cls(path, directory_fd)
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                raise ConfigError(
                    f"local_disk={root!r}: cannot use {path}: {reason}; name a directory that this "
                    "process may write, or unset local_disk"
                ) from error
            number += 1

    def found_files(self) -> Iterator[FoundFile]:
        """Yield the chunk files of earlier runs, and remove what such a run left half written.

        Other files are left alone, with one log line.

        Raises:
            OSError: The directory cannot be listed.
        """
        strangers: list[str] = []
        with os.scandir(self.directory_fd) as entries:
            for entry in entries:
                is_ours = _CHUNK_NAME.fullmatch(entry.name.removesuffix(_TEMPORARY_SUFFIX))
                try:
                    if not is_ours or not entry.is_file(follow_symlinks=False):
                        strangers.append(entry.name)
                    elif entry.name.endswith(_TEMPORARY_SUFFIX):
                        os.unlink(entry.name, dir_fd=self.directory_fd)
                    else:
                        yield FoundFile(entry.name, entry.stat(follow_symlinks=False).st_size)
                except OSError:  # it went meanwhile, or cannot be had: nothing of ours
                    strangers.append(entry.name)
        if strangers:
            logger.warning(
                "%s holds %d files that are not ours (%s, ...); they are left alone and do not "
                "count against max_local_disk_size",
                self.path,
                len(strangers),
                strangers[0],
            )

    def release(self) -> None:
        """Give the directory up; its files stay. Twice is a no-op."""
        fd, self.directory_fd = self.directory_fd, -1
        if fd >= 0:
            fcntl.flock(fd, fcntl.LOCK_UN)  # the child of a fork may still have it open
            os.close(fd)

    def disown(self) -> None:
        """In the child of a fork: the directory stays its parent's."""
        fd, self.directory_fd = self.directory_fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.release()


def _readable(model_name: str, world_size: int, rank: int) -> str:
    """Return a directory name for a rank of a model; distinct ones never share it."""
    identity = f"{model_name}@{world_size}@{rank}"
    digest = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
    text = re.sub(r"[^A-Za-z0-9._-]+", "-", model_name).strip(".-")[-_MAX_READABLE_CHARACTERS:]
    return f"{text}@{world_size}@{rank}-{digest}"


def _try_lock(path: Path) -> int | None:
    """Return `path`, which is made, open and locked; None when somebody else owns it."""
    path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "it cannot be written", str(path))
    # The directory itself is locked: a file in it could be removed by whoever cleans up.
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


_OWNED: weakref.WeakSet[ChunkDirectory] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for directory in list(_OWNED):
        directory.disown()


os.register_at_fork(after_in_child=_after_fork_in_child)
