"""Opaque blocks of a serving engine that does not show its layout, as ATOM's."""

import enum
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from lmcache.utils import cdiv
from lmcache.v1.gpu_connector import utils
from lmcache.v1.gpu_connector.connector_interface import GPUConnectorInterface
from lmcache.v1.gpu_connector.ids import int64_ids, whole_number
from lmcache.v1.memory_object import MemoryObj
from lmcache.v1.memory_ops import BlockLayout, check_num_threads, gather, scatter


class ProducerEvent(Protocol):
    """What marks the end of the work that writes the blocks."""

    def synchronize(self) -> None:
        """Return when that work is done."""
        ...


class BlockOrder(enum.Enum):
    """How the blocks of several segments lie in an object."""

    SEGMENT_MAJOR = "segment_major"  # all blocks of a segment, then those of the next
    BLOCK_MAJOR = "block_major"  # all segments of a block, then those of the next


class RawBlockConnector(GPUConnectorInterface):
    """Copies whole blocks between segments and flat uint8 objects, and looks at no byte.

    Keywords of the calls:
        block_ids: Block `i` of the request holds its tokens i * block_size_tokens onwards; see
            `ids.int64_ids` for the types. At least as many as the last token needs.
        producer_event: Waited for before blocks are read.
        Others are ignored.

    Args:
        segments: [num_blocks, ...] each, any dtype, on the CPU, every block contiguous.
        block_size_tokens: Tokens of a block.
        order: Of the blocks in an object.
        num_threads: Threads that share a large copy.

    Raises:
        ValueError: No segment, a segment elsewhere or with another number of blocks, blocks that
            are not contiguous or share bytes, or a block size or number of threads below 1.
        TypeError: A segment that is no tensor, or a number that is none.

    Threads: concurrent calls are allowed.
    """

    def __init__(
        self,
        segments: Sequence[torch.Tensor],
        block_size_tokens: int,
        order: BlockOrder = BlockOrder.SEGMENT_MAJOR,
        num_threads: int = 1,
    ) -> None:
        if whole_number("block_size_tokens", block_size_tokens) < 1:
            raise ValueError(f"block_size_tokens must be at least 1, not {block_size_tokens}")
        self.block_size_tokens = block_size_tokens
        self.num_threads = check_num_threads(num_threads)
        self._layout = BlockLayout.from_blocks(
            segments, BlockOrder(order) is BlockOrder.BLOCK_MAJOR
        )

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all segments."""
        return self._layout.item_bytes_total

    def batched_to_gpu(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        **kwargs: Any,
    ) -> None:
        """Write objects into the blocks of their tokens.

        Raises:
            ValueError: No or too few block ids, a range that does not begin and end with a block,
                an object of another size, a freed object, a block outside the segments or there
                twice. Nothing was written.
            TypeError: Block ids that are not whole numbers.
        """
        blocks, counts = self._blocks_of(memory_objs, starts, ends, kwargs)
        scatter(memory_objs, blocks, counts, self._layout, self.num_threads)

    def batched_from_gpu(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        **kwargs: Any,
    ) -> None:
        """Read the blocks of ranges of tokens into objects, after `producer_event`.

        Raises:
            ValueError, TypeError: As for `batched_to_gpu`. Nothing was written.
        """
        blocks, counts = self._blocks_of(memory_objs, starts, ends, kwargs)
        event: ProducerEvent | None = kwargs.get("producer_event")
        if event is not None:
            event.synchronize()
        gather(memory_objs, blocks, counts, self._layout, self.num_threads)

    def get_shape(self, num_tokens: int) -> torch.Size:
        """Return [bytes] of the blocks that `num_tokens` tokens take."""
        return torch.Size((cdiv(num_tokens, self.block_size_tokens) * self.bytes_per_block,))

    def _blocks_of(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, list[int]]:
        if not len(memory_objs) == len(starts) == len(ends):
            raise ValueError(
                f"{len(memory_objs)} memory objects do not go with {len(starts)} starts and "
                f"{len(ends)} ends"
            )
        block_ids = kwargs.get("block_ids")
        if block_ids is None:
            raise ValueError("pass block_ids=, the blocks of the request from its first token on")
        ids = int64_ids("block_ids", block_ids)
        ranges = [
            self._block_range(start, end, len(ids)) for start, end in zip(starts, ends, strict=True)
        ]
        firsts, lasts = [first for first, _ in ranges], [last for _, last in ranges]
        return utils.take_ranges(ids, firsts, lasts), [last - first for first, last in ranges]

    def _block_range(self, start: int, end: int, num_blocks: int) -> tuple[int, int]:
        size = self.block_size_tokens
        if start % size or end % size or not 0 <= start <= end:
            raise ValueError(
                f"tokens {start} to {end} do not begin and end with a block of {size} tokens; "
                "make chunk_size a multiple of the block size, and leave save_unfull_chunk off: "
                "the last chunk of a prompt may end inside a block"
            )
        if end // size > num_blocks:
            raise ValueError(
                f"tokens {start} to {end} need {end // size} block ids, {num_blocks} were given"
            )
        return start // size, end // size
