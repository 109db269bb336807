"""What a chunk takes, by its number of tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from lmcache.v1.engine.parts import EngineMetadata
from lmcache.v1.memory_metadata import size_of


class ChunkSpec(NamedTuple):
    """Shape and dtype of each layer group of a chunk, and their bytes."""

    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    size_bytes: int


class ChunkSpecs:
    """Asks the metadata once per number of tokens; for one operation, as layers may change.

    Args:
        metadata: Of the engine.
    """

    def __init__(self, metadata: EngineMetadata) -> None:
        self._metadata = metadata
        self._known: dict[int, ChunkSpec] = {}

    def of(self, num_tokens: int) -> ChunkSpec:
        """Return what a chunk of `num_tokens` takes."""
        known = self._known.get(num_tokens)
        if known is None:
            shapes = self._metadata.get_shapes(num_tokens)
            dtypes = self._metadata.get_dtypes()
            known = self._known[num_tokens] = ChunkSpec(shapes, dtypes, size_of(shapes, dtypes))
        return known

    def sizes(self, starts: Sequence[int], ends: Sequence[int]) -> list[int]:
        """Return the bytes of the chunks at these token positions."""
        return [self.of(end - start).size_bytes for start, end in zip(starts, ends, strict=True)]
