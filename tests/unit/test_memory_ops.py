"""gather and scatter of memory objects: what they take, and what they refuse."""

from array import array

import pytest
import torch

from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import AdHocMemoryAllocator
from lmcache.v1.memory_format import MemoryFormat
from lmcache.v1.memory_ops import BlockLayout, gather, scatter


def allocate(nbytes):
    return AdHocMemoryAllocator().allocate(
        torch.Size([nbytes]), torch.uint8, MemoryFormat.BINARY_BUFFER
    )


def blocks_and_layout(block_major=False):
    segments = [torch.randint(0, 255, (6, 5, 8), dtype=torch.uint8) for _ in range(3)]
    return segments, BlockLayout.from_blocks(segments, block_major)


@pytest.mark.parametrize("as_ids", [lambda i: array("q", i), torch.tensor])
@pytest.mark.parametrize("block_major", [False, True])
def test_memory_objects_are_gathered_and_scattered(as_ids, block_major):
    segments, layout = blocks_and_layout(block_major)
    objs = [allocate(2 * 120), allocate(120)]

    gather(objs, as_ids([4, 1, 5]), [2, 1], layout)

    stacked = torch.stack([segment[[4, 1]] for segment in segments], dim=1 if block_major else 0)
    assert torch.equal(objs[0].raw_tensor, stacked.flatten())
    before = [segment.clone() for segment in segments]
    for segment in segments:
        segment[[1, 5]] = 0
    scatter(objs, as_ids([99, 1, 5]), [2, 1], layout, skips=[1, 0])
    assert all(map(torch.equal, segments, before))
    assert layout.item_bytes_total == 120


def test_a_strided_tensor_of_ids_is_read_in_its_order():
    segments, layout = blocks_and_layout()
    obj = allocate(2 * 120)

    gather([obj], torch.tensor([4, 0, 1, 0])[::2], [2], layout)

    assert torch.equal(obj.raw_tensor[:80], segments[0][[4, 1]].flatten())


@pytest.mark.parametrize("copy", [gather, scatter])
def test_freed_objects_are_refused(copy):
    _, layout = blocks_and_layout()
    objs = [allocate(120), allocate(120)]
    objs[1].ref_count_down()

    with pytest.raises(ValueError, match="memory object 1 is freed"):
        copy(objs, array("q", [0, 1]), [1, 1], layout)


@pytest.mark.parametrize("copy", [gather, scatter])
def test_objects_and_ids_that_are_not_on_the_host_are_refused(copy):
    _, layout = blocks_and_layout()
    elsewhere = AdHocMemoryAllocator("meta").allocate(torch.Size([120]), torch.uint8)

    with pytest.raises(ValueError, match="memory object 0 is not on the host.*CPU core only"):
        copy([elsewhere], array("q", [0]), [1], layout)
    with pytest.raises(ValueError, match="ids are on meta.*CPU core only"):
        copy([allocate(120)], torch.empty(1, dtype=torch.int64, device="meta"), [1], layout)


@pytest.mark.parametrize("ids", [[0], array("i", [0]), torch.zeros(1), torch.zeros(1, 1).long()])
def test_ids_of_another_type_are_refused(ids):
    _, layout = blocks_and_layout()
    with pytest.raises(TypeError, match="slot ids"):
        gather([allocate(120)], ids, [1], layout)


def test_views_that_cannot_be_segments_are_refused():
    good = torch.zeros(4, 2, 3, 8)
    for views, message in (
        ([], "at least one"),
        ([good, good.to("meta")], "segment 1 is on meta.*CPU core only"),
        ([good[:0]], "no slots"),
        ([good[0, 0, 0]], "no slots"),
        ([good, good[:3]], "segment 1 has 3 blocks of 2 slots, segment 0 4 of 2"),
        ([good.transpose(2, 3)], "must be contiguous"),
        ([torch.zeros(())], "has no slots"),
    ):
        with pytest.raises(ValueError, match=message):
            BlockLayout.from_views(views)


@pytest.mark.parametrize("num_threads", ["2", True, 1.0, None])
@pytest.mark.parametrize("copy", [gather, scatter])
def test_a_number_of_threads_that_is_no_int_is_named(copy, num_threads):
    _, layout = blocks_and_layout()
    with pytest.raises(TypeError, match="num_threads must be an int, not "):
        copy([allocate(120)], array("q", [0]), [1], layout, num_threads)


@pytest.mark.parametrize("num_threads", [0, -1, 2**40])
def test_a_number_of_threads_that_cannot_be_is_named(num_threads):
    _, layout = blocks_and_layout()
    with pytest.raises(ValueError, match="num_threads must be from 1 to 1024, not "):
        gather([allocate(120)], array("q", [0]), [1], layout, num_threads)
