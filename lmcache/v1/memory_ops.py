"""Copies between memory objects and the slots of a serving engine's cache, many in one native call.

A *slot* holds the items of one id (a token, a block of tokens, a recurrent state) in a number of
*segments* (say, K and V of each layer). `BlockLayout` says where the items lie; `gather` copies
slots into memory objects, `scatter` memory objects into slots.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from lmcache.v1 import native
from lmcache.v1.memory_object import MemoryObj

SlotIds: TypeAlias = "array[int] | torch.Tensor"  # int64: array("q"), or a tensor on the CPU


@dataclass(frozen=True, slots=True, eq=False)
class BlockLayout:
    """Where the items of a slot lie, segment by segment; strides are in bytes and may be negative.

    The item of slot `i` in a segment lies at base + i // slots_per_block * block_stride
    + i % slots_per_block * slot_stride. An object holds, without gaps: for each group of
    `parts_per_group` segments, for each of its slots in order, for each part of the group, the
    item. So 1 part is segment-major, as many parts as segments is block-major.

    Attributes:
        bases: Address of slot 0 in each segment; array("Q").
        item_bytes: Size of an item in each segment; array("Q").
        slot_strides: From slot to slot inside a block; array("q").
        block_strides: From block to block; array("q").
        slots_per_block: At least 1.
        num_slots: Ids are below it.
        parts_per_group: Divides the number of segments.
        tensors: Whose memory the addresses are; kept alive by the layout.

    Threads: immutable.
    """

    bases: "array[int]"
    item_bytes: "array[int]"
    slot_strides: "array[int]"
    block_strides: "array[int]"
    slots_per_block: int
    num_slots: int
    parts_per_group: int = 1
    tensors: tuple[torch.Tensor, ...] = field(default=(), repr=False)

    @classmethod
    def from_views(
        cls,
        views: Sequence[torch.Tensor],
        parts_per_group: int = 1,
        *,
        may_repeat: bool = False,
    ) -> "BlockLayout":
        """Describe paged tensors.

        Args:
            views: One a segment, [num_blocks, slots_per_block, ...], on the CPU; what is behind the
                second axis must be contiguous, the first two may have any stride.
            parts_per_group: Views that alternate in an object, slot by slot.
            may_repeat: A view may be given again, as by layers that share their KV. An object then
                holds its bytes twice, and what is scattered last stays.

        Raises:
            ValueError: No view, a view elsewhere than on the CPU, an item that is not contiguous,
                views of unequal block counts or sizes, or slots that share bytes, of one view or
                of two.
            TypeError: A view that is no tensor.
        """
        if not views:
            raise ValueError("a layout needs at least one view")
        for index, view in enumerate(views):
            _check_view(index, view, views[0])
        layout = cls(
            array("Q", [view.data_ptr() for view in views]),
            array("Q", [view[0, 0].nbytes for view in views]),
            array("q", [view.stride(1) * view.itemsize for view in views]),
            array("q", [view.stride(0) * view.itemsize for view in views]),
            views[0].shape[1],
            views[0].shape[0] * views[0].shape[1],
            parts_per_group,
            tuple(views),
        )
        apart = layout
        if may_repeat:
            distinct = {(view.data_ptr(), view.stride()): view for view in views}
            if len(distinct) < len(views):
                apart = cls.from_views(list(distinct.values()))
        overlap = native.find_overlap(*apart.addressing)
        if overlap:
            raise ValueError(f"{overlap}; every slot needs bytes of its own")
        return layout

    @classmethod
    def from_blocks(
        cls, segments: Sequence[torch.Tensor], block_major: bool = False
    ) -> "BlockLayout":
        """Describe opaque blocks: slot `i` is block `i` of every segment.

        Args:
            segments: [num_blocks, ...] each, on the CPU, every block contiguous.
            block_major: An object holds block after block; else segment after segment.

        Raises:
            ValueError, TypeError: As for `from_views`.
        """
        for index, segment in enumerate(segments):
            _check_segment(index, segment)
        views = [segment.unsqueeze(1) for segment in segments]
        return cls.from_views(views, len(views) if block_major else 1)

    @property
    def addressing(self) -> "tuple[_Array, _Array, _Array, _Array, int, int]":
        """Where the slots are, as the native calls take it."""
        return (
            self.bases,
            self.item_bytes,
            self.slot_strides,
            self.block_strides,
            self.slots_per_block,
            self.num_slots,
        )

    @property
    def item_bytes_total(self) -> int:
        """Bytes of one slot over all segments."""
        return sum(self.item_bytes)


def gather(
    memory_objs: Sequence[MemoryObj],
    slot_ids: SlotIds,
    counts: Iterable[int],
    layout: BlockLayout,
    num_threads: int = 1,
    skips: Iterable[int] | None = None,
) -> None:
    """Copy slots into memory objects, without the interpreter's lock.

    Args:
        memory_objs: Targets; each used to its full size.
        slot_ids: The ids of all objects, one object after the other: array("q") or int64, CPU.
        counts: How many ids each object has.
        layout: Where the slots are.
        num_threads: Threads that share a large batch.
        skips: How many leading ids of each object are left out: nobody looks at them, and their
            items are neither read nor written. None: no id of any object.

    Raises:
        ValueError: An object that is freed or not on the host, a size that does not fit its count,
            a skip beyond its count, an id out of range, objects that share bytes, or less than one
            thread. Nothing was copied.
        TypeError: Ids or a number of threads of another type.

    Threads: safe, as long as nobody writes to the slots or the objects meanwhile.
    """
    native.gather(
        *_arguments(memory_objs, slot_ids, counts, skips, layout), check_num_threads(num_threads)
    )


def scatter(
    memory_objs: Sequence[MemoryObj],
    slot_ids: SlotIds,
    counts: Iterable[int],
    layout: BlockLayout,
    num_threads: int = 1,
    skips: Iterable[int] | None = None,
) -> None:
    """Copy memory objects into slots: `gather` the other way round.

    Raises:
        ValueError: As for `gather`; also an id that is there twice. Nothing was copied.
        TypeError: Ids of another type.
    """
    native.scatter(
        *_arguments(memory_objs, slot_ids, counts, skips, layout), check_num_threads(num_threads)
    )


_Array: TypeAlias = "array[int]"
_NativeArguments: TypeAlias = tuple[
    _Array, _Array, _Array, _Array, SlotIds, _Array, _Array, _Array, _Array, int, int, int
]


def _arguments(
    memory_objs: Sequence[MemoryObj],
    slot_ids: SlotIds,
    counts: Iterable[int],
    skips: Iterable[int] | None,
    layout: BlockLayout,
) -> _NativeArguments:
    for index, memory_obj in enumerate(memory_objs):
        if not memory_obj.is_valid():
            raise ValueError(f"memory object {index} is freed; copy while holding a reference")
        if not memory_obj.is_on_host:
            raise ValueError(f"memory object {index} is not on the host; {_CPU_CORE_ONLY}")
    return (
        array("Q", [memory_obj.data_ptr for memory_obj in memory_objs]),
        array("Q", [memory_obj.get_size() for memory_obj in memory_objs]),
        array("Q", counts),
        array("Q", bytes(8 * len(memory_objs)) if skips is None else skips),
        _checked_ids(slot_ids),
        *layout.addressing,
        layout.parts_per_group,
    )


def _checked_ids(slot_ids: SlotIds) -> SlotIds:
    if isinstance(slot_ids, torch.Tensor):
        if not slot_ids.is_cpu:
            raise ValueError(f"slot ids are on {slot_ids.device}; {_CPU_CORE_ONLY}")
        if slot_ids.dtype is not torch.int64 or slot_ids.dim() != 1:
            raise TypeError(
                f"slot ids must be flat int64, not {slot_ids.dtype} of {slot_ids.dim()} axes"
            )
        return slot_ids.contiguous()
    if not isinstance(slot_ids, array) or slot_ids.typecode != "q":
        raise TypeError('slot ids must be an array("q") or an int64 tensor')
    return slot_ids


def check_num_threads(num_threads: object) -> int:
    """Return the number of threads that share a copy.

    Raises:
        TypeError: No int.
        ValueError: Less than 1.
    """
    if not isinstance(num_threads, int) or isinstance(num_threads, bool):
        raise TypeError(f"num_threads must be an int, not {num_threads!r}")
    if not 1 <= num_threads <= _MOST_THREADS:
        raise ValueError(f"num_threads must be from 1 to {_MOST_THREADS}, not {num_threads}")
    return num_threads


def _check_segment(index: int, segment: torch.Tensor) -> None:
    if not isinstance(segment, torch.Tensor):
        raise TypeError(f"segment {index} must be a tensor, not {type(segment).__name__}")
    if segment.dim() == 0:
        raise ValueError(f"segment {index} of shape () has no slots")


def _check_view(index: int, view: torch.Tensor, first: torch.Tensor) -> None:
    _check_segment(index, view)
    if not view.is_cpu:
        raise ValueError(f"segment {index} is on {view.device}; {_CPU_CORE_ONLY}")
    if view.dim() < 2 or 0 in view.shape:
        raise ValueError(f"segment {index} of shape {tuple(view.shape)} has no slots")
    if view.shape[:2] != first.shape[:2]:
        raise ValueError(
            f"segment {index} has {view.shape[0]} blocks of {view.shape[1]} slots, segment 0 "
            f"{first.shape[0]} of {first.shape[1]}; all segments need the same"
        )
    if not view[0, 0].is_contiguous():
        raise ValueError(
            f"segment {index} of shape {tuple(view.shape)} and strides {view.stride()}: "
            "an item must be contiguous; pass the pieces that are as parts"
        )


_MOST_THREADS = 1024
_CPU_CORE_ONLY = "this build has the CPU core only"
