"""What a lookup client asks its servers and takes for an answer, down to the frames."""

import os
import threading

import msgspec
import pytest
import zmq
from builders import CHUNK_TOKENS, make_metadata, until
from engine_builders import Prompt, assert_nothing_held, store
from fakes import FakeClock

from lmcache.v1.lookup_client.lmcache_lookup_client import MAX_ANSWERS
from lmcache.v1.lookup_client.lookup_server import LMCacheLookupServer
from lmcache.v1.lookup_client.messages import NUMBER_BYTES, LookupReply, address_of

N = CHUNK_TOKENS
SHORT_MS = 150


@pytest.fixture
def answer_with(socket_directory):
    """`answer_with(hits_of)`: a server that sends to request n what `hits_of(n)` lists.

    That is: pairs of (number, hit tokens), in order.
    """
    path = address_of(make_metadata(engine_id="e"), 0).path
    os.makedirs(os.path.dirname(path), exist_ok=True)
    done, threads = threading.Event(), []

    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.setsockopt(zmq.LINGER, 0)
        server.bind(f"ipc://{path}")

        def serve(hits_of):
            while not done.is_set():
                if not server.poll(20):
                    continue
                identity, number, _ = server.recv_multipart()
                for told, hit_tokens in hits_of(int.from_bytes(number, "big")):
                    reply = msgspec.msgpack.encode(LookupReply(hit_tokens, ""))
                    frames = [identity, told.to_bytes(NUMBER_BYTES, "big"), reply]
                    server.send_multipart(frames)

        def start(hits_of):
            threads.append(threading.Thread(target=serve, args=(hits_of,), daemon=True))
            threads[-1].start()

        yield start
        done.set()
        for thread in threads:
            thread.join(timeout=60)


def test_a_late_reply_to_an_older_request_is_not_taken_for_this_ones(answer_with, connect):
    answer_with(lambda number: [(number - 1, 4 * N), (number, number * N)])
    client = connect()

    assert client.lookup([1] * (4 * N), "first") == N
    assert client.lookup([1] * (4 * N), "second") == 2 * N


def test_what_was_asked_while_no_server_was_there_never_reaches_one(ranks, connect):
    (engine,), (connector,) = ranks(1, serving=())
    prompt, clock = Prompt(1, 2 * N), FakeClock()
    store(engine, prompt, connector)
    client = connect(timeout_ms=SHORT_MS, clock=clock)
    for number in range(3):
        assert client.lookup(prompt.tokens, f"early {number}") == 0

    client.config.lookup_timeout_ms = 30_000
    with LMCacheLookupServer(engine, engine.metadata):
        until(lambda: clock.advance(1) or client.lookup(prompt.tokens, "late") == 2 * N)
        assert set(engine.lookup_pins) == {"late"}
    engine.lookup_unpin("late")
    assert_nothing_held(engine)


def test_answers_are_kept_for_so_many_lookup_ids_and_the_oldest_are_forgotten(connect):
    client = connect()
    for number in range(MAX_ANSWERS + 2):
        client.lookup([], str(number))
        if number == 2:
            client.lookup([], "0")  # asked again: among the younger ones now

    kept = [client.lookup_cache(str(number)) for number in range(6)]

    assert kept == [0, -1, -1, 0, 0, 0]
    assert client.lookup_cache(str(MAX_ANSWERS + 1)) == 0
