"""The disk tier's residents as upstream's index shows them."""

from collections.abc import Iterator, Mapping

from lmcache.v1.cache_key import CacheEngineKey
from lmcache.v1.disk_cache_metadata import DiskCacheMetadata
from lmcache.v1.native import HotIndex
from lmcache.v1.storage_backend.disk.disk_chunk import DiskChunk


class DiskView(Mapping[CacheEngineKey, DiskCacheMetadata]):
    """What the tier holds, coldest first, to read. Metadata is a copy of the moment.

    Threads: each call is one native step; hold the tier's lock to go through items or values.
    """

    __slots__ = ("_index", "_path")

    def __init__(self, index: HotIndex, path: str) -> None:
        self._index = index
        self._path = path

    def __getitem__(self, key: CacheEngineKey) -> DiskCacheMetadata:
        chunk: DiskChunk | None = self._index.peek(key) if key in self._index else None
        if chunk is None:
            raise KeyError(key)
        return chunk.metadata_at(self._path)

    def __contains__(self, key: object) -> bool:
        return key in self._index

    def __iter__(self) -> Iterator[CacheEngineKey]:
        return iter(self._index.keys())

    def __len__(self) -> int:
        return len(self._index)
