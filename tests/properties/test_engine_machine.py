"""The engine against plain lists: any sequence of calls leaves the same chunks, order and pins.

Prompts are words over a small alphabet, a letter a chunk, so that they share prefixes. All chunks
have one size: the order alone decides who leaves.
"""

import zlib

import pytest
import torch
from builders import CHUNK_TOKENS, order
from engine_builders import BLOCK_BYTES, BLOCK_TOKENS, AtomConnector, keep_from, make_engine
from fakes import FakeClock
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmcache.v1.storage_backend.cache_events import EventKind

NUM_CHUNKS = 5
BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS
MOST_LETTERS = 7

words = st.text("ab", min_size=1, max_size=MOST_LETTERS)
ids = st.sampled_from(["r1", "r2", "r3"])


def prefixes(word):
    """The chunks of a prompt, head first; each is named by the prompt that ends with it."""
    return [word[: end + 1] for end in range(len(word))]


def tokens_of(word):
    return [ord(letter) for letter in word for _ in range(CHUNK_TOKENS)]


def kv_of(chunk):
    """The bytes of a chunk, [blocks, bytes], which no other chunk has."""
    numbers = torch.Generator().manual_seed(zlib.crc32(chunk.encode()))
    return torch.randint(0, 256, (BLOCKS, BLOCK_BYTES), dtype=torch.uint8, generator=numbers)


class PlainEngine:
    """What must be true, written as plainly as can be.

    `order` lists resident chunks, coldest first. A copy has a number; a pin is on a copy, whose
    bytes stay taken after its chunk was removed.
    """

    def __init__(self):
        self.order = []
        self.copies = {}
        self.num_copies = 0
        self.pins = {}  # lookup id -> {chunk: number of the copy}

    def pinned(self):
        return {copy for pins in self.pins.values() for copy in pins.values()}

    def use(self, chunks):
        """Head first in, head youngest."""
        for chunk in reversed(chunks):
            self.order.remove(chunk)
            self.order.append(chunk)

    def drop(self, chunk):
        self.order.remove(chunk)
        del self.copies[chunk]

    def hit(self, word):
        found = []
        for chunk in prefixes(word):
            if chunk not in self.copies:
                break
            found.append(chunk)
        return found

    def make_room(self, protected, num_taken):
        """Whether one more chunk finds room beside `num_taken` new ones; evicts for it."""
        pinned = self.pinned()
        if len(set(self.copies.values()) | pinned) + num_taken < NUM_CHUNKS:
            return True
        for chunk in self.order:
            if chunk not in protected and self.copies[chunk] not in pinned:
                self.drop(chunk)
                return True
        return False

    def store(self, word, first, fails):
        kept, new = [], []
        for position, chunk in enumerate(prefixes(word)):
            if chunk in self.copies:
                kept.append(chunk)
            elif position >= first:
                leading = self.hit(word)
                if not self.make_room({*kept, *leading}, len(new)):
                    break
                kept.append(chunk)
                new.append(chunk)
        if fails and new:
            return
        for chunk in new:
            self.num_copies += 1
            self.copies[chunk] = self.num_copies
            self.order.append(chunk)
        self.use(kept)

    def lookup(self, word, lookup_id):
        found = self.hit(word)
        if lookup_id is not None and found:
            pins = self.pins.setdefault(lookup_id, {})
            self.use([chunk for chunk in found if chunk not in pins])
            pins.update({chunk: self.copies[chunk] for chunk in found})
        return found

    def clear(self):
        for chunk in list(self.order):
            if self.copies[chunk] not in self.pinned():
                self.drop(chunk)


class EngineMachine(RuleBasedStateMachine):
    """Drives an engine and the model side by side."""

    def __init__(self):
        super().__init__()
        self.connector = AtomConnector(num_blocks=MOST_LETTERS * BLOCKS)
        self.engine = make_engine(self.connector, num_chunks=NUM_CHUNKS)
        self.manager = self.engine.storage_manager
        self.clock = FakeClock()
        self.manager.local_cpu_backend.pins.clock = self.clock
        self.model = PlainEngine()
        self.events = self.manager.subscribe()
        self.heard = {}  # chunk hash -> generation
        self.is_hot, self.is_frozen = True, False
        database = self.engine.token_database
        self.hash_of = {
            chunk: database.split(tokens_of(chunk)).hashes[-1] for chunk in all_chunks()
        }

    def teardown(self):
        for lookup_id in list(self.model.pins):
            self.engine.lookup_unpin(lookup_id)
        assert self.manager.local_cpu_backend.pins.num_pins == 0
        gauges = self.manager.local_cpu_backend.hot.index.gauges()
        assert gauges["num_blocks"] == len(self.manager.local_cpu_backend.hot_cache)
        self.engine.close()

    @property
    def block_ids(self):
        return list(range(MOST_LETTERS * BLOCKS))

    @rule(word=words, first=st.integers(0, MOST_LETTERS), fail_at=st.sampled_from([None, 0, 1]))
    def store(self, word, first, fail_at):
        first = min(first, len(word))
        for position, chunk in enumerate(prefixes(word)):
            self.connector.blocks[position * BLOCKS : (position + 1) * BLOCKS] = kv_of(chunk)
        self.connector.fail_at = fail_at
        mask = keep_from(len(word) * CHUNK_TOKENS, first * CHUNK_TOKENS)
        num_calls, failed = len(self.connector.calls), False
        try:
            self.engine.store(tokens_of(word), mask=mask, block_ids=self.block_ids)
        except RuntimeError:
            failed = True
        self.connector.fail_at = None
        if not self.is_hot or self.is_frozen:
            assert len(self.connector.calls) == num_calls
            return
        self.model.store(word, first, failed)

    @rule(word=words, first=st.integers(0, MOST_LETTERS), fails=st.booleans())
    def retrieve(self, word, first, fails):
        first = min(first, len(word))
        self.connector.blocks.fill_(0xEE)
        expected = []
        for chunk in prefixes(word)[first:]:
            if chunk not in self.model.copies:
                break
            expected.append(chunk)
        self.connector.fail_at = 0 if fails else None
        mask = keep_from(len(word) * CHUNK_TOKENS, first * CHUNK_TOKENS)
        try:
            loaded = self.engine.retrieve(tokens_of(word), mask=mask, block_ids=self.block_ids)
        except RuntimeError:
            assert fails and expected
        else:
            start, end = first * CHUNK_TOKENS, (first + len(expected)) * CHUNK_TOKENS
            assert loaded.nonzero().flatten().tolist() == list(range(start, end))
            for position, chunk in enumerate(expected, first):
                rows = self.connector.blocks[position * BLOCKS : (position + 1) * BLOCKS]
                assert torch.equal(rows, kv_of(chunk))
        self.connector.fail_at = None
        self.model.use(expected)

    @rule(word=words, lookup_id=st.none() | ids)
    def lookup(self, word, lookup_id):
        found = self.engine.lookup(tokens_of(word), lookup_id=lookup_id, pin=lookup_id is not None)
        assert found == len(self.model.lookup(word, lookup_id)) * CHUNK_TOKENS

    @rule(lookup_id=ids)
    def unpin(self, lookup_id):
        self.engine.lookup_unpin(lookup_id)
        self.model.pins.pop(lookup_id, None)

    @rule()
    def expire_pins(self):
        self.clock.advance(self.engine.pin_timeout_seconds)
        self.manager.local_cpu_backend.pins.expire()
        self.model.pins.clear()

    @rule(word=words)
    def clear_prompt(self, word):
        there = [chunk for chunk in prefixes(word) if chunk in self.model.copies]
        assert self.engine.clear(tokens_of(word)) == len(there)
        for chunk in there:
            self.model.drop(chunk)

    @rule()
    def clear_everything(self):
        self.engine.clear()
        if self.is_hot:
            self.model.clear()

    @rule()
    def toggle_freeze(self):
        self.is_frozen = not self.is_frozen
        self.engine.freeze(self.is_frozen)

    @precondition(lambda self: len(self.model.order) > 2 or not self.is_hot)
    @rule()
    def toggle_hot_cache(self):
        self.is_hot = not self.is_hot
        self.engine.set_hot_cache(self.is_hot)
        for chunk in list(self.model.order):
            self.model.drop(chunk)

    @invariant()
    def the_same_chunks_in_the_same_order(self):
        expected = [self.hash_of[chunk] for chunk in self.model.order]
        assert order(self.manager) == expected

    @invariant()
    def the_same_pins(self):
        held = {
            lookup_id: {key.chunk_hash for keys in tiers.values() for key in keys}
            for lookup_id, tiers in self.engine.lookup_pins.items()
        }
        assert held == {
            lookup_id: {self.hash_of[chunk] for chunk in pins}
            for lookup_id, pins in self.model.pins.items()
        }

    @invariant()
    def every_listed_chunk_is_readable_and_nothing_leaks(self):
        copies = set(self.model.copies.values()) | self.model.pinned()
        gauges = self.manager.local_cpu_backend.hot.index.gauges()
        assert gauges["num_blocks"] == len(copies)
        for obj in self.manager.local_cpu_backend.hot_cache.values():
            assert obj.is_valid() and obj.get_ref_count() == 1
        self.engine.check_integrity()

    @invariant()
    def events_equal_residents(self):
        for event in self.events.take():
            if event.kind is EventKind.STORED:
                self.heard[event.key.chunk_hash] = event.generation
            else:
                assert self.heard.pop(event.key.chunk_hash) == event.generation
        assert set(self.heard) == {self.hash_of[chunk] for chunk in self.model.order}


def all_chunks():
    chunks = [""]
    for chunk in chunks:
        if len(chunk) < MOST_LETTERS:
            chunks += [chunk + letter for letter in "ab"]
    return chunks[1:]


COMMON = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "print_blob": False,
}
TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(**COMMON, derandomize=True, max_examples=80, stateful_step_count=40)


class TestEngineNightly(EngineMachine.TestCase):
    settings = settings(
        **COMMON, max_examples=1_000, stateful_step_count=100, phases=[Phase.generate]
    )


TestEngineNightly = pytest.mark.slow(TestEngineNightly)
