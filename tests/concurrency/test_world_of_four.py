"""Four ranks in four processes: one scheduler asks them all, each keeps its own shard's bytes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from builders import CHUNK_TOKENS, make_config, make_metadata
from engine_builders import Prompt

from lmcache.v1.lookup_client.factory import LookupClientFactory

TESTS = Path(__file__).parent.parent
WORLD_SIZE = 4
NUM_CHUNKS = 6
KINDS = {"raw": CHUNK_TOKENS, "paged": 256}  # tokens per chunk of each kind of KV


class World:
    """The worker processes and the scheduler's client."""

    def __init__(self, kind):
        self.chunk_tokens = KINDS[kind]
        path = os.pathsep.join(str(p) for p in (TESTS.parent, TESTS))
        program = str(TESTS / "concurrency" / "world_worker.py")
        self.workers = [
            subprocess.Popen(
                [sys.executable, program, kind, str(rank), str(WORLD_SIZE), str(NUM_CHUNKS)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path},
                text=True,
            )
            for rank in range(WORLD_SIZE)
        ]
        config = make_config(lookup_timeout_ms=60_000, chunk_size=self.chunk_tokens)
        metadata = make_metadata(world_size=WORLD_SIZE, engine_id="world")
        self.client = LookupClientFactory.create_lookup_client(config, metadata)
        for worker in self.workers:
            assert self._answer(worker) == "ready"

    def _answer(self, worker):
        return json.loads(worker.stdout.readline())

    def ask(self, rank, call, *arguments):
        worker = self.workers[rank]
        worker.stdin.write(json.dumps([call, *arguments]) + "\n")
        worker.stdin.flush()
        return self._answer(worker)

    def ask_all(self, call, *arguments):
        return [self.ask(rank, call, *arguments) for rank in range(WORLD_SIZE)]

    def close(self):
        self.client.close()
        for worker in self.workers:
            worker.kill()
            worker.communicate()


@pytest.fixture
def world(request, tmp_path, monkeypatch):
    """A world of the kind of KV that the test is parametrized with."""
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    made = World(request.param)
    yield made
    made.close()


@pytest.mark.parametrize("world", KINDS, indirect=True)
def test_every_rank_loads_its_own_bytes_of_what_the_scheduler_found(world):
    n = world.chunk_tokens
    tokens = Prompt(1, 4 * n).tokens.tolist()
    world.ask_all("store", tokens[: 2 * n])
    world.ask_all("store", tokens, 2 * n)

    assert world.client.lookup(tokens, "r") == 4 * n
    assert world.ask_all("load", tokens) == [[4 * n, True, True]] * WORLD_SIZE
    world.ask_all("unpin", "r")
    world.ask_all("finish")


@pytest.mark.parametrize("world", KINDS, indirect=True)
def test_ranks_that_lost_different_parts_agree_on_the_least(world):
    n = world.chunk_tokens
    tokens = Prompt(1, 4 * n).tokens.tolist()
    world.ask_all("store", tokens)
    # Room for four more makes rank 2 lose the tail; rank 1 forgets the prompt and stores a half.
    world.ask(2, "store", Prompt(2, 3 * n).tokens.tolist())
    world.ask(1, "forget", tokens)
    world.ask(1, "store", tokens[: 2 * n])

    assert world.client.lookup(tokens, "r") == 2 * n
    loads = world.ask_all("load", tokens)
    assert all(is_right and is_untouched for _, is_right, is_untouched in loads)
    assert [num_tokens for num_tokens, _, _ in loads] == [4 * n, 2 * n, 3 * n, 4 * n]
    world.ask_all("unpin", "r")
    world.ask_all("finish")


@pytest.mark.parametrize("world", ["raw"], indirect=True)
def test_a_killed_rank_makes_lookups_misses_and_harms_no_other(world):
    n = world.chunk_tokens
    tokens = Prompt(1, 4 * n).tokens.tolist()
    world.ask_all("store", tokens)
    assert world.client.lookup(tokens, "before") == 4 * n
    world.client.config.lookup_timeout_ms = 500

    world.workers[3].kill()
    world.workers[3].wait()

    assert [world.client.lookup(tokens, str(i)) for i in range(20)] == [0] * 20
    assert world.client.silent_ranks == [3]
    for rank in range(3):
        assert world.ask(rank, "load", tokens) == [4 * n, True, True]
        for lookup_id in ("before", *map(str, range(20))):
            world.ask(rank, "unpin", lookup_id)
        world.ask(rank, "finish")
