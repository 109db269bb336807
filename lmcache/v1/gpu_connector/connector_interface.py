"""What the cache asks of a serving engine's KV cache."""

import abc
from collections.abc import Sequence
from typing import Any

import torch

from lmcache.v1.memory_object import MemoryObj


class GPUConnectorInterface(abc.ABC):
    """Copies between memory objects and a serving engine's KV cache ("GPU", wherever it is).

    References stay the caller's: a connector takes none, keeps none and drops none. When
    `from_gpu` returns, the object holds the bytes; when `to_gpu` returns, the object may be given
    up. The batched calls promise the same of all their objects. Every call may raise; what it was
    to write is then taken as not written. Keywords that the engine does not know are passed on
    unread, so each connector says which ones it needs, and ignores the others.
    """

    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Write the KV of the tokens `start` to `end` (excluded) of a request from the object."""
        self.batched_to_gpu([memory_obj], [start], [end], **kwargs)

    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Read the KV of the tokens `start` to `end` (excluded) of a request into the object."""
        self.batched_from_gpu([memory_obj], [start], [end], **kwargs)

    @abc.abstractmethod
    def batched_to_gpu(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        **kwargs: Any,
    ) -> None:
        """Do `to_gpu` for each object with the range at its position."""

    @abc.abstractmethod
    def batched_from_gpu(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        **kwargs: Any,
    ) -> None:
        """Do `from_gpu` for each object with the range at its position."""

    @abc.abstractmethod
    def get_shape(self, num_tokens: int) -> torch.Size:
        """Return the shape of an object for `num_tokens` tokens."""

    def initialize_kvcaches_ptr(self, **kwargs: Any) -> None:  # noqa: B027  # optional to override
        """Remember the `kvcaches` given, for calls that come without; nothing without them."""
