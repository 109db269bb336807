"""What ATOM's scheduler and workers do with the lookup transport, A6 of the contract."""

import os
import signal
import subprocess
import sys
import threading

from builders import CHUNK_TOKENS, CPU, make_metadata
from engine_builders import AtomMetadata, Prompt, assert_nothing_held, atom_metadata, store

from lmcache.v1.lookup_client.factory import LookupClientFactory

N = CHUNK_TOKENS


def test_a6_the_scheduler_hears_what_the_worker_has_and_its_lookup_pins(built, connector):
    prompt = Prompt(1, 4 * N)
    store(built, prompt, connector)
    client = LookupClientFactory.create_lookup_client(built.config, atom_metadata())
    server = LookupClientFactory.create_lookup_server(built, atom_metadata())
    with client, server:
        assert client.lookup(prompt.tokens.tolist(), lookup_id="12") == 4 * N
        assert client.lookup([1] * N, lookup_id="13") == 0
        assert list(built.lookup_pins) == ["12"]
        assert client.lookup_cache("12") == 4 * N
        client.clear_lookup_status("12")
        client.clear_lookup_status("never seen")
        assert (client.lookup_cache("12"), client.lookup_cache("13")) == (-1, 0)
    built.lookup_unpin("12")
    assert_nothing_held(built)


def test_a6_a_lookup_repeated_after_an_unpin_pins_again(built, connector):
    """A6: lookups are remembered by the scheduler for some steps, and repeated to re-pin."""
    prompt = Prompt(1, 4 * N)
    store(built, prompt, connector)
    client = LookupClientFactory.create_lookup_client(built.config, atom_metadata())
    server = LookupClientFactory.create_lookup_server(built, atom_metadata())
    with client, server:
        assert client.lookup(prompt.tokens.tolist(), lookup_id="12") == 4 * N
        built.lookup_unpin("12")
        assert_nothing_held(built)

        assert client.lookup(prompt.tokens.tolist(), lookup_id="12") == 4 * N

    assert {tier: len(keys) for tier, keys in built.lookup_pins["12"].items()} == {CPU: 4}
    for seed in range(2, 8):
        store(built, Prompt(seed, 4 * N, first_block=64), connector)
    assert built.lookup(prompt.tokens) == 4 * N
    built.lookup_unpin("12")
    assert_nothing_held(built)


def test_a6_a_rank_that_is_left_out_gets_no_server(built):
    assert (
        LookupClientFactory.create_lookup_server(
            built, AtomMetadata(make_metadata(worker_id=1, world_size=2, engine_id="e"))
        )
        is None
    )


def test_a6_a_server_that_was_never_there_gives_no_hits_within_the_bound(built):
    built.config.lookup_timeout_ms = 200
    with LookupClientFactory.create_lookup_client(built.config, atom_metadata()) as client:
        thread = threading.Thread(target=client.lookup, args=([1] * N, "1"))
        thread.start()
        thread.join(timeout=30)

        assert not thread.is_alive()
        assert client.lookup_cache("1") == 0


SERVER_PROCESS = """
import sys
import torch
from engine_builders import AtomConnector, AtomMetadata, Prompt, make_engine, store
from builders import make_metadata
from lmcache.v1.lookup_client.factory import LookupClientFactory
connector = AtomConnector()
metadata = AtomMetadata(make_metadata(engine_id="atom-offload-dp0"))
engine = make_engine(connector, metadata)
store(engine, Prompt(1, 64), connector)
server = LookupClientFactory.create_lookup_server(engine, metadata)
print("ready", flush=True)
sys.stdin.read()
"""


def test_a6_a_server_whose_process_was_killed_gives_no_hits_within_the_bound(built, tmp_path):
    built.config.lookup_timeout_ms = 2000
    tests = os.path.dirname(os.path.dirname(__file__))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(tests), tests])}
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER_PROCESS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        with LookupClientFactory.create_lookup_client(built.config, atom_metadata()) as client:
            tokens = Prompt(1, 64).tokens.tolist()
            assert client.lookup(tokens, "1") == 64
            process.send_signal(signal.SIGKILL)
            process.wait(timeout=30)

            assert client.lookup(tokens, "1") == 0
            # Were each one waited for, these would take far longer than a test may.
            for number in range(1000):
                assert client.lookup(tokens, str(number)) == 0
    finally:
        process.kill()
        process.communicate()
