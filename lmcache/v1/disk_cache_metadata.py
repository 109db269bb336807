"""What an index of files knows about one stored chunk."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lmcache.v1.memory_format import MemoryFormat


@dataclass
class DiskCacheMetadata:
    """One chunk on disk; fields and positional order as in upstream 0.5.6.

    Attributes:
        path: Its file.
        size: Bytes of KV.
        shape: Shape of the KV.
        dtype: Element type.
        cached_positions: Token positions the KV was computed at, [num_tokens].
        fmt: Layout.
        pin_count: Pins held; a pinned chunk is not evicted.

    Threads: the owner's lock guards it.
    """

    path: str
    size: int
    shape: torch.Size | None = None
    dtype: torch.dtype | None = None
    cached_positions: torch.Tensor | None = None
    fmt: "MemoryFormat | None" = None
    pin_count: int = 0

    def pin(self) -> bool:
        """Take one pin and return True."""
        self.pin_count += 1
        return True

    def unpin(self) -> bool:
        """Return one pin and return True."""
        self.pin_count -= 1
        return True

    @property
    def is_pinned(self) -> bool:
        """Whether a pin is held."""
        return self.pin_count > 0

    @property
    def can_evict(self) -> bool:
        """Whether no pin is held."""
        return not self.is_pinned
