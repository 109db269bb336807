"""One chunk of the disk tier: its key, its file, and the object it is written from."""

import functools
from typing import Any

import msgspec
import torch

from lmcache.v1.cache_key import CacheEngineKey, parse_cache_key
from lmcache.v1.disk_cache_metadata import DiskCacheMetadata
from lmcache.v1.memory_format import MemoryFormat
from lmcache.v1.memory_metadata import MemorySpec, size_of
from lmcache.v1.memory_object import MemoryObj
from lmcache.v1.native import Block, Pool, chunk_head_bytes
from lmcache.v1.storage_backend.disk.chunk_directory import digest_of, file_name

_MAX_LAYOUTS = 256


class DiskChunk(Block):
    """A chunk as the disk tier lists it, with native reference and pin counts.

        state    meaning                                             who may leave it
        new      not listed yet                                      DiskIndex.admit, adopt
        queued   listed; its bytes are `source`; it has no file      a round, a removal
        writing  listed; the writer makes its file from `source`     finish, a removal
        doomed   left the index while it was written                 finish
        on disk  listed; its file is whole; `source` is None         a removal
        gone     not listed; its file is removed or written over     nobody

    Readers hold a reference, lookups a pin; either keeps it from being evicted.

    Args:
        pool: Home of the counts of all chunks of one tier.
        key, key_bytes: The key, and its string form.
        spec: Shapes, dtypes and format of the chunk.
        name: Of its file.
        source: The object it will be written from; None for a file that is there.

    Attributes:
        layout: The spec, as the file's head holds it.
        nbytes, head_bytes, file_bytes: Of the chunk, of its file's head, and of the whole file; the
            budget counts the last.
        source: The object it is written from; queued, with a reference of ours.
        is_doomed: See above.
        ticket: Its place in the order of admissions.
        callbacks: To be called with the key once the file is whole.

    Threads: the disk tier's lock guards `source`, `is_doomed`, `ticket` and `callbacks`.
    """

    __slots__ = (
        "callbacks",
        "file_bytes",
        "head_bytes",
        "is_doomed",
        "key",
        "key_bytes",
        "layout",
        "name",
        "nbytes",
        "source",
        "ticket",
    )

    def __init__(
        self,
        pool: Pool,
        key: CacheEngineKey,
        key_bytes: bytes,
        spec: MemorySpec,
        name: str,
        source: MemoryObj | None = None,
    ) -> None:
        self.layout = layout = layout_of(spec)
        self.nbytes = nbytes = spec.size_bytes
        self.head_bytes = head_bytes = chunk_head_bytes(len(key_bytes), len(layout))
        self.file_bytes = file_bytes = head_bytes + nbytes
        super().__init__(pool, file_bytes, spec, None, None)
        self._logical_bytes = nbytes  # what events tell
        self.key = key
        self.key_bytes = key_bytes
        self.name = name
        self.source = source
        self.is_doomed = False
        self.ticket = 0
        self.callbacks: list[Any] = []

    @property
    def digest(self) -> str:
        """What stands for its key in file names."""
        return self.name.partition("-")[0]

    @property
    def spec(self) -> MemorySpec:
        """Shapes, dtypes and format."""
        spec: MemorySpec = self._spec
        return spec

    def get_size(self) -> int:
        """Return the bytes of the chunk."""
        return self.nbytes

    def get_dtypes(self) -> list[torch.dtype]:
        """Return the dtype of each group."""
        return list(self.spec.dtypes)

    def get_num_tokens(self) -> int:
        """Return the length of the token axis (bytes for binary formats)."""
        shape, axis = self.spec.shapes[0], self.spec.fmt.token_axis
        return shape[axis] if axis < len(shape) else shape[-1] if shape else 0

    def metadata_at(self, path: str) -> DiskCacheMetadata:
        """Return what upstream's index knows of a chunk, for a file in `path`."""
        return DiskCacheMetadata(
            f"{path}/{self.name}",
            self.spec.size_bytes,
            self.spec.shapes[0],
            self.spec.dtypes[0],
            None,
            self.spec.fmt,
            self.pin_count,
        )


def has_contents_of(chunk: DiskChunk, obj: MemoryObj) -> bool:
    """Whether chunk and object are of the same size and dtypes."""
    return chunk.nbytes == obj.get_size() and chunk.spec.dtypes == obj.get_layout()[1]


def chunk_of(pool: Pool, key: CacheEngineKey, obj: MemoryObj, serial: int) -> DiskChunk:
    """Return a new chunk to be written from `obj`, of which no reference is taken."""
    shapes, dtypes, fmt = obj.get_layout()
    if fmt is MemoryFormat.BINARY_BUFFER:  # bytes of its own; it is read back into the pool
        fmt = MemoryFormat.BINARY
    spec = _shared_spec(shapes, dtypes, fmt)
    text = key.to_string()
    return DiskChunk(pool, key, text.encode(), spec, file_name(text, serial), obj)


def chunk_from_file(pool: Pool, name: str, key_bytes: bytes, layout: bytes) -> DiskChunk:
    """Return the chunk of a file of an earlier run.

    Raises:
        ValueError: Its head was not written by us for a file of this name.
    """
    text = key_bytes.decode()
    if not name.startswith(digest_of(text)):
        raise ValueError(f"{name} is not the file of {text}")
    return DiskChunk(pool, parse_cache_key(text), key_bytes, spec_of(layout), name)


@functools.lru_cache(_MAX_LAYOUTS)
def _shared_spec(
    shapes: tuple[torch.Size, ...], dtypes: tuple[torch.dtype, ...], fmt: MemoryFormat
) -> MemorySpec:
    return MemorySpec(shapes, dtypes, fmt, size_of(shapes, dtypes))


@functools.lru_cache(_MAX_LAYOUTS)
def layout_of(spec: MemorySpec) -> bytes:
    """Return how a chunk is laid out, as a file's head holds it."""
    dtypes = [str(dtype).removeprefix("torch.") for dtype in spec.dtypes]
    shapes = [list(shape) for shape in spec.shapes]
    return msgspec.msgpack.encode((shapes, dtypes, spec.fmt.name))


@functools.lru_cache(_MAX_LAYOUTS)
def spec_of(layout: bytes) -> MemorySpec:
    """Return what `layout_of` was given.

    Raises:
        ValueError: It is no such layout, or names a dtype or format that is unknown here.
    """
    try:
        shapes, names, fmt_name = msgspec.msgpack.decode(
            layout, type=tuple[list[list[int]], list[str], str]
        )
        dtypes = tuple(_DTYPES[name] for name in names)
        return _shared_spec(
            tuple(torch.Size(shape) for shape in shapes), dtypes, MemoryFormat[fmt_name]
        )
    except (msgspec.DecodeError, KeyError) as error:
        raise ValueError(f"unknown layout {layout!r}: {error}") from error


_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
