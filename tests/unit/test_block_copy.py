"""gather and scatter against a plain Python copy of the same description, and what they refuse."""

import random
from array import array

import pytest
import torch

from lmcache.v1 import native

GUARD = 0xA5
SPARE_BYTES = 192


class Arena:
    """Slots and objects in two guarded byte strings, and where everything lies in them."""

    def __init__(self, seed, num_slots, slots_per_block, item_bytes, order, counts):
        rng = random.Random(seed)
        self.slots_per_block, self.item_bytes = slots_per_block, item_bytes
        self.parts_per_group = {"segment": 1, "block": len(item_bytes), "pairs": 2}[order]
        self.num_slots, self.counts = num_slots, counts
        self.skips = [0] * len(counts)
        num_blocks = -(-num_slots // slots_per_block)
        self.starts, self.slot_strides, self.block_strides = [], [], []
        at = 0
        for nbytes in item_bytes:
            step = nbytes + rng.choice([0, 0, 1, 24])
            block = step * slots_per_block + rng.choice([0, 0, 3, 40])
            at += rng.choice([0, 1, 16, 64])
            backwards = rng.random() < 0.3
            self.starts.append(at + block * (num_blocks - 1) if backwards else at)
            self.slot_strides.append(step)
            self.block_strides.append(-block if backwards else block)
            at += block * num_blocks
        self.device = bytearray(rng.randbytes(at + SPARE_BYTES))
        self.sizes = [count * sum(item_bytes) for count in counts]
        self.object_starts, at = [], 0
        for size in self.sizes:
            at += rng.choice([0, 1, 32, 64])
            self.object_starts.append(at)
            at += size
        self.objects = bytearray([GUARD]) * (at + SPARE_BYTES)

    def items(self, ids):
        """(start in objects, start on the device, bytes) of every item that is not left out."""
        step, first = self.parts_per_group, 0
        for at, count, skip in zip(self.object_starts, self.counts, self.skips, strict=True):
            own, first = ids[first : first + count], first + count
            for group in range(0, len(self.item_bytes), step):
                for position, slot in enumerate(own):
                    for i in range(group, group + step):
                        block, inner = divmod(slot, self.slots_per_block)
                        start = self.starts[i] + block * self.block_strides[i]
                        if position >= skip:
                            inner_bytes = inner * self.slot_strides[i]
                            yield at, start + inner_bytes, self.item_bytes[i]
                        at += self.item_bytes[i]

    def arguments(self, ids):
        base = address_of(self.device)
        objects = address_of(self.objects)
        return {
            "addresses": array("Q", [objects + at for at in self.object_starts]),
            "sizes": array("Q", self.sizes),
            "counts": array("Q", self.counts),
            "skips": array("Q", self.skips),
            "ids": array("q", ids),
            "bases": array("Q", [base + at for at in self.starts]),
            "item_bytes": array("Q", self.item_bytes),
            "slot_strides": array("q", self.slot_strides),
            "block_strides": array("q", self.block_strides),
            "slots_per_block": self.slots_per_block,
            "num_slots": self.num_slots,
            "parts_per_group": self.parts_per_group,
        }

    def skip_some(self, rng, ids):
        """Leave leading ids of each object out; `ids` with nonsense in their place."""
        self.skips = [rng.choice([0, 1, count // 2, count]) for count in self.counts]
        self.skips = [min(pair) for pair in zip(self.skips, self.counts, strict=True)]
        odd, first = list(ids), 0
        for count, skip in zip(self.counts, self.skips, strict=True):
            for i in range(first, first + skip):
                odd[i] = rng.choice([-(2**63), 2**63 - 1, -1, ids[-1]])
            first += count
        return odd

    def expected(self, ids, into_objects):
        device, objects = bytearray(self.device), bytearray(self.objects)
        for in_object, on_device, nbytes in self.items(ids):
            if into_objects:
                objects[in_object : in_object + nbytes] = device[on_device : on_device + nbytes]
            else:
                device[on_device : on_device + nbytes] = objects[in_object : in_object + nbytes]
        return device, objects


def address_of(data):
    return torch.frombuffer(data, dtype=torch.uint8).data_ptr()


def random_ids(rng, num_slots, count):
    """Runs of consecutive ids in any order, each id once."""
    ids, left = [], list(range(num_slots))
    while len(ids) < count:
        start = rng.randrange(len(left))
        length = rng.choice([1, 2, 5, 33])
        run = left[start : start + length][: count - len(ids)]
        del left[start : start + len(run)]
        ids += run[::-1] if rng.random() < 0.2 else run
    return ids


def random_arena(seed, order):
    rng = random.Random(seed)
    num_parts = 2 * rng.randint(1, 3)
    sizes = [rng.choice([0, 1, 7, 16, 63, 64, 65, 130, 256, 1000]) for _ in range(num_parts)]
    counts = [rng.choice([0, 1, 3, 16, 70]) for _ in range(rng.randint(0, 4))]
    num_slots = sum(counts) + rng.randint(1, 40)
    slots_per_block = rng.choice([1, 1, 4, 16, 1000])
    arena = Arena(seed, num_slots, slots_per_block, sizes, order, counts)
    return arena, random_ids(rng, num_slots, sum(counts)), rng


@pytest.mark.parametrize("order", ["segment", "block", "pairs"])
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("skipping", [False, True])
def test_gather_gives_what_a_plain_copy_gives(order, num_threads, skipping):
    for seed in range(60):
        arena, ids, rng = random_arena(seed, order)
        ids = arena.skip_some(rng, ids) if skipping else ids
        device, objects = arena.expected(ids, into_objects=True)

        native.gather(**arena.arguments(ids), num_threads=num_threads)

        assert arena.objects == objects, f"seed {seed}"
        assert arena.device == device, f"seed {seed}"


@pytest.mark.parametrize("order", ["segment", "block", "pairs"])
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("skipping", [False, True])
def test_scatter_gives_what_a_plain_copy_gives(order, num_threads, skipping):
    for seed in range(60):
        arena, ids, rng = random_arena(seed, order)
        arena.objects[:] = rng.randbytes(len(arena.objects))
        ids = arena.skip_some(rng, ids) if skipping else ids
        device, objects = arena.expected(ids, into_objects=False)

        native.scatter(**arena.arguments(ids), num_threads=num_threads)

        assert arena.device == device, f"seed {seed}"
        assert arena.objects == objects, f"seed {seed}"


@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize(
    ("count", "slots_per_block", "item_bytes"),
    [
        (4096, 16, [1024, 1024, 999, 1]),
        (4096, 1, [4096]),
        (12, 1, [1 << 20, 100]),
        (4096, 16, [130] * 32),
    ],
)
def test_batches_too_large_for_the_cache_come_through_streaming_stores(
    num_threads, count, slots_per_block, item_bytes
):
    arena = Arena(5, count + 9, slots_per_block, item_bytes, "segment", [count // 2, count // 2])
    assert sum(arena.sizes) >= 8 << 20
    ids = random_ids(random.Random(7), arena.num_slots, count)
    before = bytes(arena.device)
    device, objects = arena.expected(ids, into_objects=True)

    native.gather(**arena.arguments(ids), num_threads=num_threads)
    assert arena.objects == objects
    assert arena.device == device

    for _, start, nbytes in arena.items(ids):
        arena.device[start : start + nbytes] = bytes(nbytes)
    native.scatter(**arena.arguments(ids), num_threads=num_threads)
    assert arena.device == before


def small_arena():
    return Arena(1, 20, 4, [64, 64], "segment", [3, 2]), [4, 5, 6, 9, 1]


BIG = 2**63 - 1
REFUSED = {
    "an id beyond the last slot": ("ids", [4, 5, 6, 9, 20], r"ids\[4\] is 20.*num_slots, 20"),
    "a negative id": ("ids", [4, -2, 6, 9, 1], r"ids\[1\] is -2"),
    "the smallest id": (
        "ids",
        [4, -(2**63), 6, 9, 1],
        r"ids\[1\] is -9223372036854775808: it must",
    ),
    "a skip beyond the count": ("skips", [3, 3], r"skips\[1\] is 3: the object has only 2 ids"),
    "fewer skips": ("skips", [0], "addresses and skips must be equally long, not 2 and 1"),
    "the largest id": ("ids", [BIG, 5, 6, 9, 1], r"ids\[0\] is"),
    "a run that leaves the slots": ("num_slots", 6, r"ids\[2\] is 6"),
    "too many ids": ("ids", [4, 5, 6, 9, 1, 2], "name 5 ids, but 6"),
    "too few ids": ("ids", [4, 5, 6, 9], r"counts\[1\]"),
    "counts that overflow": ("counts", [3, 2**64 - 1], r"counts\[1\]"),
    "a size that is not the ids'": ("sizes", [384, 255], r"sizes\[1\] is 255, but 2 ids of 128"),
    "fewer sizes": ("sizes", [384], "addresses and sizes must be equally long, not 2 and 1"),
    "fewer counts": ("counts", [3], "addresses and counts"),
    "fewer item sizes": ("item_bytes", [64], "bases and item_bytes"),
    "fewer slot strides": ("slot_strides", [64], "bases and slot_strides"),
    "fewer block strides": ("block_strides", [64], "bases and block_strides"),
    "a null object": ("addresses", [0, 0], r"addresses\[0\] is null"),
    "an object beyond the end": ("addresses", [2**64 - 100, 1], r"sizes\[0\].*address space"),
    "a null segment": ("bases", [0, 0], r"bases\[0\] is null"),
    "a segment beyond the end": ("bases", [2**64 - 64, 1], "segment 0.*address space"),
    "strides that overflow": ("block_strides", [BIG, BIG], "segment 0.*address space"),
    "strides below address 0": ("block_strides", [-(2**61), 512], "segment 0.*address space"),
    "item sizes that overflow": ("item_bytes", [2**63, 2**63], "64 bits|overlap"),
    "no slot in a block": ("slots_per_block", 0, "slots_per_block"),
    "a block beyond int64": ("slots_per_block", 2**63, "slots_per_block must be below"),
    "no part": ("parts_per_group", 0, "parts_per_group is 0"),
    "parts that do not divide": ("parts_per_group", 3, "must divide the 2 segments"),
    "a number of slots beyond int64": ("num_slots", 2**63, "num_slots"),
}


@pytest.mark.parametrize("copy", [native.gather, native.scatter])
@pytest.mark.parametrize(("name", "value", "message"), REFUSED.values(), ids=REFUSED)
def test_a_refused_batch_moves_nothing(copy, name, value, message):
    arena, ids = small_arena()
    arguments = arena.arguments(ids)
    if isinstance(value, list):
        value = array(arguments[name].typecode, value)
    before = bytes(arena.device), bytes(arena.objects)

    with pytest.raises(ValueError, match=message):
        copy(**{**arguments, name: value})

    assert (arena.device, arena.objects) == before


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([4, 5, 6, 5, 1], r"ids\[3\] is 5, as ids\[1\]"),
        ([4, 5, 6, 3, 4], r"ids\[4\] is 4, as ids\[0\]"),
        ([4, 4, 6, 7, 8], r"ids\[1\] is 4, as ids\[0\]"),
    ],
)
def test_scatter_refuses_to_write_a_slot_twice(ids, message):
    arena, _ = small_arena()
    before = bytes(arena.device)

    with pytest.raises(ValueError, match=message):
        native.scatter(**arena.arguments(ids))

    assert arena.device == before


def test_scatter_refuses_slots_that_overlap():
    arena, ids = small_arena()
    with pytest.raises(ValueError, match="segment 1.*shorter than its 64 bytes"):
        native.scatter(**{**arena.arguments(ids), "slot_strides": array("q", [64, -63])})


def test_gather_reads_a_slot_as_often_as_asked():
    arena, ids = small_arena()
    ids[3] = ids[0]
    _, objects = arena.expected(ids, into_objects=True)

    native.gather(**arena.arguments(ids))

    assert arena.objects == objects


def test_a_skipped_id_may_be_that_of_a_slot_written_by_another():
    arena, ids = small_arena()
    arena.skips = [0, 1]
    ids[3] = ids[0]
    device, _ = arena.expected(ids, into_objects=False)

    native.scatter(**arena.arguments(ids))

    assert arena.device == device


def test_scatter_takes_a_stray_minus_one_for_the_error_it_is():
    arena, ids = small_arena()
    ids[2] = -1
    with pytest.raises(ValueError, match=r"ids\[2\] is -1: it must be at least 0"):
        native.scatter(**arena.arguments(ids))


def test_gather_refuses_objects_that_share_bytes():
    arena, ids = small_arena()
    arguments = arena.arguments(ids)
    first = arguments["addresses"][0]
    with pytest.raises(ValueError, match="objects 0 and 1 share bytes"):
        native.gather(**{**arguments, "addresses": array("Q", [first + 255, first])})
    assert arena.objects == bytes([GUARD]) * len(arena.objects)


@pytest.mark.parametrize("copy", [native.gather, native.scatter])
def test_streams_are_refused_by_the_cpu_core(copy):
    arena, ids = small_arena()
    with pytest.raises(ValueError, match="the CPU core has no streams"):
        copy(**arena.arguments(ids), stream=1)


@pytest.mark.parametrize("copy", [native.gather, native.scatter])
@pytest.mark.parametrize("name", ["addresses", "ids", "bases", "block_strides"])
def test_arrays_of_another_type_are_not_converted(copy, name):
    arena, ids = small_arena()
    arguments = arena.arguments(ids)
    with pytest.raises(TypeError):
        copy(**{**arguments, name: list(arguments[name])})
    with pytest.raises(TypeError):
        copy(**{**arguments, name: array("i", [1, 2])})


@pytest.mark.parametrize("copy", [native.gather, native.scatter])
def test_no_objects_and_no_ids_are_no_work(copy):
    words, integers = array("Q"), array("q")
    copy(words, words, words, words, integers, words, words, integers, integers, 1, 0, 1)
    none = array("Q", [0])
    copy(none, none, none, none, integers, none,
         array("Q", [8]), array("q", [8]), array("q", [8]), 1, 0, 1)  # fmt: skip


def test_streams_are_refused_by_copy_batch_too():
    words = array("Q", [])
    with pytest.raises(ValueError, match="the CPU core has no streams"):
        native.copy_batch(words, words, words, stream=1)
