"""Layouts whose slots share bytes are refused; every other one is taken."""

import random
from array import array

import pytest
import torch

from lmcache.v1 import native
from lmcache.v1.memory_ops import BlockLayout

MEMORY = torch.zeros(4096, dtype=torch.uint8)


def view(size, stride, offset=0):
    return MEMORY.as_strided(size, stride, offset)


OVERLAPPING = {
    "blocks over the slots of others": ([view((4, 4, 8), (8, 8, 1))], "slots of segment 0 overlap"),
    "slots of the second view": (
        [view((4, 4, 8), (32, 8, 1)), view((4, 4, 8), (32, 7, 1), 200)],
        "slots of segment 1 overlap",
    ),
    "every slot in one place": ([view((1, 4, 8), (8, 0, 1))], "slots of segment 0"),
    "every block in one place": ([view((4, 1, 8), (0, 8, 1))], "slots of segment 0"),
    "one view twice": ([view((4, 4, 8), (32, 8, 1))] * 2, "segments 0 and 1 share bytes"),
    "a view and its blocks backwards": (
        [view((4, 2, 8), (64, 8, 1)), view((4, 2, 8), (64, 8, 1), 4)],
        "segments 0 and 1",
    ),
    "the last byte of one and the first of another": (
        [view((2, 1, 8), (16, 8, 1)), view((2, 1, 8), (16, 8, 1), 31 - 16 - 8 + 16)],
        "segments 0 and 1",
    ),
    "views of other strides": (
        [view((4, 2, 8), (16, 8, 1), 64), view((4, 2, 4), (33, 4, 1))],
        "segments 0 and 1",
    ),
    "a third of three": (
        [view((2, 2, 8), (48, 8, 1), o) for o in (0, 16, 24)],
        "segments 1 and 2",
    ),
}


@pytest.mark.parametrize(("views", "message"), OVERLAPPING.values(), ids=OVERLAPPING)
def test_a_layout_whose_slots_share_bytes_is_refused(views, message):
    with pytest.raises(ValueError, match=message):
        BlockLayout.from_views(views)


def test_the_same_blocks_twice_are_refused():
    segment = torch.zeros(4, 8)
    with pytest.raises(ValueError, match="segments 0 and 1 share bytes"):
        BlockLayout.from_blocks([segment, segment])


APART = {
    "slots wider apart than blocks": [view((4, 4, 8), (8, 32, 1))],
    "blocks between the slots of others": [view((2, 3, 2), (6, 4, 1))],
    "two views that alternate": [view((4, 2, 8), (32, 8, 1)), view((4, 2, 8), (32, 8, 1), 16)],
    "heads between heads": [view((4, 2, 8), (32, 16, 1)), view((4, 2, 8), (32, 16, 1), 8)],
    "one block": [view((1, 4, 8), (0, 8, 1))],
    "one slot a block": [view((4, 1, 8), (8, 0, 1))],
    "other strides in the gaps": [view((4, 1, 8), (32, 8, 1)), view((4, 1, 8), (40, 8, 1), 8)],
}


@pytest.mark.parametrize("views", APART.values(), ids=APART)
def test_a_layout_whose_slots_are_apart_is_taken(views):
    assert BlockLayout.from_views(views).num_slots == views[0].shape[0] * views[0].shape[1]


def test_overlaps_are_found_exactly_whatever_the_strides():
    """Against every byte of every slot, counted."""
    rng = random.Random(5)
    found = 0
    for _ in range(3000):
        num_blocks, slots, segments = rng.randint(1, 4), rng.randint(1, 4), rng.randint(1, 3)
        bases = [1000 + rng.randint(0, 60) for _ in range(segments)]
        sizes = [rng.randint(0, 4) for _ in range(segments)]
        slot_strides = [rng.randint(-12, 12) for _ in range(segments)]
        block_strides = [rng.randint(-24, 24) for _ in range(segments)]
        if rng.random() < 0.5:
            slot_strides, block_strides = slot_strides[:1] * segments, block_strides[:1] * segments
        used = [
            base + block * over_blocks + slot * over_slots + byte
            for base, size, over_slots, over_blocks in zip(
                bases, sizes, slot_strides, block_strides, strict=True
            )
            for block in range(num_blocks)
            for slot in range(slots)
            for byte in range(size)
        ]

        said = native.find_overlap(
            array("Q", bases),
            array("Q", sizes),
            array("q", slot_strides),
            array("q", block_strides),
            slots,
            num_blocks * slots,
        )

        assert bool(said) == (len(set(used)) < len(used)), (bases, sizes, slot_strides)
        found += bool(said)
    assert 300 < found < 2700
