"""Engines under mixed calls of eight threads, alone and as four processes of one world."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from builders import CHUNK_TOKENS, make_config, make_metadata
from engine_builders import AtomMetadata, Prompt
from engine_load import NUM_PROMPTS, PROMPT_CHUNKS, run_load

from lmcache.v1.lookup_client.factory import LookupClientFactory

TESTS = Path(__file__).parent.parent
WORLD_SIZE = 4


def test_eight_threads_of_mixed_calls_leave_every_byte_right_and_nothing_held():
    assert run_load(rounds=300) > 0


@pytest.mark.slow
def test_eight_threads_of_mixed_calls_for_a_minute():
    assert run_load(rounds=0, seconds=60) > 0


def run_world(tmp_path, monkeypatch, rounds, seconds):
    """Run four worker processes and ask all of them meanwhile; returns the hits that were found."""
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    path = os.pathsep.join(str(p) for p in (TESTS.parent, TESTS))
    workers = [
        subprocess.Popen(
            [sys.executable, str(TESTS / "concurrency" / "engine_load.py")]
            + [str(rank), str(WORLD_SIZE), str(rounds), str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            text=True,
        )
        for rank in range(WORLD_SIZE)
    ]
    try:
        for worker in workers:
            assert worker.stdout.readline() == "ready\n"
        for worker in workers:
            worker.stdin.write("go\n")
            worker.stdin.flush()
        hits = ask_while_busy(workers)
        for worker in workers:
            worker.communicate("stop\n")
        assert [worker.returncode for worker in workers] == [0] * WORLD_SIZE
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return hits


def ask_while_busy(workers):
    """Look prompts up in the whole world until every worker is done."""
    config = make_config(lookup_timeout_ms=60_000)
    metadata = AtomMetadata(make_metadata(engine_id="load", world_size=WORLD_SIZE))
    hits = []
    with LookupClientFactory.create_lookup_client(config, metadata) as client:
        for number in range(200):
            prompt = Prompt(number % NUM_PROMPTS, PROMPT_CHUNKS * CHUNK_TOKENS)
            hits.append(client.lookup(prompt.tokens, f"scheduler {number}"))
        assert client.silent_ranks == []
        for worker in workers:
            assert worker.stdout.readline() == "done\n"
    return hits


def test_four_processes_answer_lookups_while_they_are_loaded(tmp_path, monkeypatch):
    hits = run_world(tmp_path, monkeypatch, rounds=150, seconds=0)

    assert all(0 <= hit <= PROMPT_CHUNKS * CHUNK_TOKENS for hit in hits)
    assert all(hit % CHUNK_TOKENS == 0 for hit in hits)


@pytest.mark.slow
def test_four_processes_for_a_minute(tmp_path, monkeypatch):
    hits = run_world(tmp_path, monkeypatch, rounds=0, seconds=60)

    assert len(hits) == 200
