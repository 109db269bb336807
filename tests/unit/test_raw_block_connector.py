"""ATOM's kind of connector: order of the bytes, the keywords of its calls, and what it refuses."""

import pytest
import torch

from lmcache.v1.gpu_connector import BlockOrder, RawBlockConnector
from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import AdHocMemoryAllocator

BLOCK_TOKENS = 4
BLOCK_IDS = [3, 0, 5, 1]


@pytest.fixture
def segments():
    torch.manual_seed(1)
    return [torch.randint(0, 256, (6, nbytes), dtype=torch.uint8) for nbytes in (8, 3)]


def allocate(num_blocks, bytes_per_block=11):
    return AdHocMemoryAllocator().allocate(torch.Size([num_blocks * bytes_per_block]), torch.uint8)


def test_by_default_an_object_holds_segment_after_segment(segments):
    obj = allocate(2)
    RawBlockConnector(segments, BLOCK_TOKENS).from_gpu(obj, 4, 12, block_ids=BLOCK_IDS)
    assert torch.equal(obj.tensor, torch.cat([s[[0, 5]].flatten() for s in segments]))


def test_block_major_objects_hold_block_after_block(segments):
    obj = allocate(2)
    connector = RawBlockConnector(segments, BLOCK_TOKENS, BlockOrder.BLOCK_MAJOR)
    connector.from_gpu(obj, 4, 12, block_ids=BLOCK_IDS)
    assert torch.equal(obj.tensor, torch.cat([s[block] for block in (0, 5) for s in segments]))


def test_block_ids_may_be_a_tensor(segments):
    connector = RawBlockConnector(segments, BLOCK_TOKENS)
    obj, same = allocate(4), allocate(4)
    connector.from_gpu(obj, 0, 16, block_ids=torch.tensor(BLOCK_IDS, dtype=torch.int32))
    connector.from_gpu(same, 0, 16, block_ids=BLOCK_IDS)
    assert torch.equal(obj.tensor, same.tensor)


class WritesWhenWaitedFor:
    """An event whose producer writes the blocks no earlier than it is waited for."""

    def __init__(self, segment):
        self.segment = segment
        self.num_waits = 0

    def synchronize(self):
        self.num_waits += 1
        self.segment.fill_(9)


def test_the_producer_is_waited_for_before_blocks_are_read(segments):
    connector = RawBlockConnector(segments, BLOCK_TOKENS)
    event, obj = WritesWhenWaitedFor(segments[0]), allocate(4)

    connector.from_gpu(obj, 0, 16, block_ids=BLOCK_IDS, producer_event=event)

    assert bool((obj.tensor[:32] == 9).all())
    assert event.num_waits == 1


def test_a_batch_waits_once(segments):
    connector = RawBlockConnector(segments, BLOCK_TOKENS)
    event = WritesWhenWaitedFor(segments[0])
    connector.batched_from_gpu(
        [allocate(2), allocate(2)], [0, 8], [8, 16], block_ids=BLOCK_IDS, producer_event=event
    )
    assert event.num_waits == 1


def test_segments_of_any_dtype_are_opaque():
    segments = [torch.randn(6, 2, 5).to(torch.float8_e5m2), torch.randn(6, 3)]
    connector = RawBlockConnector(segments, 1)
    assert connector.bytes_per_block == 10 + 12
    obj = allocate(1, 22)
    connector.from_gpu(obj, 0, 1, block_ids=[4])
    expected = [s[4].flatten().view(torch.uint8) for s in segments]
    assert torch.equal(obj.tensor, torch.cat(expected))


def test_the_shape_is_bytes_of_whole_blocks(segments):
    connector = RawBlockConnector(segments, BLOCK_TOKENS)
    assert connector.get_shape(8) == torch.Size([22])
    assert connector.get_shape(9) == torch.Size([33])


@pytest.mark.parametrize("call", ["from_gpu", "to_gpu"])
@pytest.mark.parametrize(
    ("start", "end", "block_ids", "message"),
    [
        (0, 16, None, "pass block_ids="),
        (0, 16, BLOCK_IDS[:3], "tokens 0 to 16 need 4 block ids, 3 were given"),
        (2, 18, BLOCK_IDS + [2], "tokens 2 to 18 do not begin and end with a block of 4"),
        (0, 15, BLOCK_IDS, "do not begin and end"),
        (16, 0, BLOCK_IDS, "do not begin and end"),
        (-4, 12, BLOCK_IDS, "do not begin and end"),
        (0, 16, [3, 0, 6, 1], r"ids\[2\] is 6: .* below num_slots, 6"),
        (0, 16, [3, -5, 2, 1], r"ids\[1\] is -5"),
        (0, 12, BLOCK_IDS, r"sizes\[0\] is 44, but 3 ids of 11"),
    ],
)
def test_a_call_that_does_not_fit_is_refused(segments, call, start, end, block_ids, message):
    before = [segment.clone() for segment in segments]
    with pytest.raises(ValueError, match=message):
        getattr(RawBlockConnector(segments, BLOCK_TOKENS), call)(
            allocate(4), start, end, block_ids=block_ids
        )
    assert all(map(torch.equal, segments, before))


def test_a_block_is_not_written_twice(segments):
    connector = RawBlockConnector(segments, BLOCK_TOKENS)
    with pytest.raises(ValueError, match=r"ids\[2\] is 3, as ids\[0\]"):
        connector.to_gpu(allocate(4), 0, 16, block_ids=[3, 0, 3, 1])


def test_segments_that_cannot_be_used_are_refused(segments):
    for bad, tokens, message in (
        ([], 4, "at least one"),
        ([segments[0], segments[1][:5]], 4, "segment 1 has 5 blocks"),
        ([segments[0].to("meta")], 4, "CPU core only"),
        ([segments[0][:, ::2]], 4, "must be contiguous"),
        (segments, 0, "at least 1, not 0"),
        ([segments[0]] * 2, 4, "segments 0 and 1 share bytes"),
        ([segments[0][:0]], 4, "segment 0 .* has no slots"),
        ([torch.zeros(())], 4, "segment 0 of shape .* has no slots"),
    ):
        with pytest.raises(ValueError, match=message):
            RawBlockConnector(bad, tokens)
    with pytest.raises(ValueError, match="sideways"):
        RawBlockConnector(segments, 4, "sideways")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"segments": [None]}, "segment 0 must be a tensor, not NoneType"),
        ({"block_size_tokens": "4"}, "block_size_tokens must be a whole number, not '4'"),
        ({"num_threads": "2"}, "num_threads must be an int, not '2'"),
    ],
)
def test_arguments_of_another_type_are_named(segments, changes, message):
    with pytest.raises(TypeError, match=message):
        RawBlockConnector(**{"segments": segments, "block_size_tokens": 4, **changes})


def test_a_tail_inside_a_block_is_refused_with_both_causes(segments):
    with pytest.raises(ValueError, match="multiple of the block size, and leave save_unfull_chunk"):
        RawBlockConnector(segments, 4).from_gpu(allocate(1), 0, 3, block_ids=[1])


def test_segments_may_be_rows_of_larger_ones(segments):
    wide = torch.randint(0, 256, (6, 20), dtype=torch.uint8)
    connector = RawBlockConnector([wide[:, 5:13]], 1)
    obj = allocate(2, 8)
    connector.from_gpu(obj, 0, 2, block_ids=[5, 2])
    assert torch.equal(obj.tensor, wide[[5, 2], 5:13].flatten())
