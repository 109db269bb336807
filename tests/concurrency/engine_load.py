"""Mixed calls of many threads on one engine, every loaded byte checked.

As a program: `engine_load.py RANK WORLD_SIZE ROUNDS SECONDS` is one worker process of a world: it
serves lookups, prints "ready", runs the load, and prints "done" or fails.
"""

import random
import sys
import threading
import time

import torch
from builders import CHUNK_TOKENS, make_metadata
from engine_builders import (
    BLOCK_TOKENS,
    AtomConnector,
    AtomMetadata,
    Prompt,
    assert_nothing_held,
    keep_from,
    make_engine,
)
from gate import Gate

from lmcache.v1.cache_key import KeyFactory
from lmcache.v1.lookup_client.factory import LookupClientFactory
from lmcache.v1.storage_backend.cache_events import EventKind

NUM_THREADS = 8
NUM_PROMPTS = 12
NUM_CHUNKS = 40
PROMPT_CHUNKS = 6
BLOCKS_PER_THREAD = PROMPT_CHUNKS * CHUNK_TOKENS // BLOCK_TOKENS
IMAGE_BYTES = 3 * 4096

images = KeyFactory("image", 1, 0, torch.uint8)


class Load:
    """Threads that store, load, look up, clear, touch and put images, until they have had enough.

    What forgets pinned chunks on purpose (clear, no hot cache, freeze) never runs between a lookup
    and its load, so there what was found must be loaded, always. All else runs beside everything.

    Args:
        engine, connector: Shared by all threads; each has blocks of its own.
        rounds: Calls per thread; 0: until `seconds` are over.
    """

    def __init__(self, engine, connector, rounds, seconds=0.0):
        self.engine = engine
        self.connector = connector
        self.rounds = rounds
        self.end_s = time.monotonic() + seconds
        self.faults = []
        self.gate = Gate()  # what forgets pinned chunks on purpose has it alone
        self.num_loaded_tokens = 0
        self.num_pinned_tokens = 0
        self.lock = threading.Lock()

    def run(self):
        barrier = threading.Barrier(NUM_THREADS)
        threads = [
            threading.Thread(target=self._work, args=(number, barrier))
            for number in range(NUM_THREADS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.faults:
            raise AssertionError(f"{len(self.faults)} faults, the first: {self.faults[0]!r}")

    def _work(self, number, barrier):
        chance = random.Random(number)
        calls = [
            self._store,
            self._load_pinned,
            self._load_unpinned,
            self._look_up,
            self._state_image,
            self._touch,
        ]
        barrier.wait(timeout=60)
        done = 0
        try:
            while done < self.rounds or (not self.rounds and time.monotonic() < self.end_s):
                done += 1
                prompt = self._prompt(number, chance)
                if number == 0 and chance.random() < 0.02:
                    self._disturb(chance)
                chance.choice(calls)(number, chance, prompt)
        except BaseException as fault:
            self.faults.append(fault)

    def _prompt(self, number, chance):
        num_tokens = chance.randint(1, PROMPT_CHUNKS) * CHUNK_TOKENS
        return Prompt(chance.randrange(NUM_PROMPTS), num_tokens, number * BLOCKS_PER_THREAD)

    def _store(self, number, chance, prompt):
        prompt.compute(self.connector)
        num_tokens = len(prompt.tokens)
        first = chance.randrange(num_tokens // CHUNK_TOKENS) * CHUNK_TOKENS
        mask = keep_from(num_tokens, first)
        self.engine.store(prompt.tokens, mask=mask, block_ids=prompt.block_ids)

    def _load_pinned(self, number, chance, prompt):
        """What a lookup found is there until it is unpinned, whatever the others store."""
        lookup_id = f"{number}/{chance.random()}"
        with self.gate.shared():
            found = self.engine.lookup(prompt.tokens, lookup_id=lookup_id, pin=True)
            for _ in range(3):
                self._store(number, chance, self._prompt(number, chance))
            prompt.erase(self.connector)
            loaded = self._load(prompt)
            self.engine.lookup_unpin(lookup_id)
        assert loaded >= found, f"{found} tokens were pinned and {loaded} loaded"
        with self.lock:
            self.num_pinned_tokens += found

    def _load_unpinned(self, number, chance, prompt):
        """Whatever is there at the moment, also while it is being forgotten."""
        prompt.erase(self.connector)
        self._load(prompt)

    def _load(self, prompt):
        loaded = int(self.engine.retrieve(prompt.tokens, block_ids=prompt.block_ids).sum())
        assert prompt.is_intact(self.connector, loaded), f"wrong bytes in {loaded} tokens"
        with self.lock:
            self.num_loaded_tokens += loaded
        return loaded

    def _look_up(self, number, chance, prompt):
        lookup_id = f"{number}/waiting"
        for _ in range(chance.randint(1, 3)):
            self.engine.lookup(prompt.tokens, lookup_id=lookup_id, pin=True)
        self.engine.lookup_unpin(lookup_id)

    def _state_image(self, number, chance, prompt):
        manager, chunk_hash = self.engine.storage_manager, chance.randrange(1, 30)
        key = images.make(chunk_hash)
        found = manager.get(key)
        if found is not None:
            assert bool((found.raw_tensor == chunk_hash).all()), "wrong bytes in an image"
            found.ref_count_down()
            return
        made = manager.allocate(torch.Size([IMAGE_BYTES]), torch.uint8, busy_loop=False)
        if made is not None:
            made.raw_tensor.fill_(chunk_hash)
            manager.batched_put([key], [made])

    def _touch(self, number, chance, prompt):
        manager = self.engine.storage_manager
        manager.touch(images.make_many(range(1, 30)))
        if chance.random() < 0.1:
            with self.gate.alone():
                self.engine.clear(prompt.tokens)

    def _disturb(self, chance):
        disturbances = [
            self.engine.clear,
            lambda: self.engine.set_hot_cache(False),
            lambda: self.engine.freeze(True),
        ]
        with self.gate.alone():
            chance.choice(disturbances)()
            self.engine.set_hot_cache(True)
            self.engine.freeze(False)


def run_load(rounds, seconds=0.0, metadata=None, beside=None):
    """Run the load on an engine of its own, then check everything; returns tokens loaded."""
    connector = AtomConnector(num_blocks=NUM_THREADS * BLOCKS_PER_THREAD)
    engine = make_engine(connector, metadata, num_chunks=NUM_CHUNKS, enable_kv_events=True)
    try:
        with engine.storage_manager.subscribe(capacity=1 << 20) as events:
            load = Load(engine, connector, rounds, seconds)
            if beside is not None:
                beside(engine, load.run)
            else:
                load.run()
            check_events(engine, events)
        for lookup_id in engine.lookup_pins:
            engine.lookup_unpin(lookup_id)
        assert_nothing_held(engine)
        engine.get_kv_events()
    finally:
        engine.close()
    assert load.num_pinned_tokens > 0
    return load.num_loaded_tokens


def check_events(engine, events):
    """Events replayed from the beginning equal the residents."""
    residents = {}
    for event in events.take():
        if event.kind is EventKind.STORED:
            residents[event.key] = event.generation
        elif event.kind is EventKind.REMOVED:
            assert residents.pop(event.key) == event.generation
        else:
            raise AssertionError(f"unexpected {event}")
    assert set(residents) == set(engine.storage_manager.snapshot().residents)


def main(rank, world_size, rounds, seconds):
    metadata = AtomMetadata(make_metadata(engine_id="load", worker_id=rank, world_size=world_size))

    def serve(engine, load):
        with LookupClientFactory.create_lookup_server(engine, metadata):
            print("ready", flush=True)
            sys.stdin.readline()  # every rank serves before any rank is loaded
            load()
            print("done", flush=True)
            sys.stdin.readline()  # and until nobody asks any more

    run_load(rounds, seconds, metadata, serve)
    print("checked", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
