"""The lookup server: requests that cannot be used, engines that hang or fail, strangers."""

import signal
import subprocess
import sys
import threading

import msgspec
import pytest
import zmq
from builders import CHUNK_TOKENS, make_config, make_metadata, until
from engine_builders import assert_nothing_held

from lmcache.v1.errors import ConfigError
from lmcache.v1.lookup_client.lmcache_lookup_client import LMCacheLookupClient
from lmcache.v1.lookup_client.lookup_server import LMCacheLookupServer
from lmcache.v1.lookup_client.messages import LookupReply, LookupRequest

N = CHUNK_TOKENS
SHORT_MS = 150
LONG_MS = 30_000


class HangingEngine:
    """An engine whose lookups wait until the test lets them go."""

    def __init__(self):
        self.config = make_config()
        self.go_on = threading.Event()

    def lookup(self, *, hashes, offsets, lookup_id, pin, request_configs):
        self.go_on.wait(timeout=60)
        return sum(offsets)


def test_a_late_answer_is_not_taken_for_the_next_lookups(connect):
    engine = HangingEngine()
    with LMCacheLookupServer(engine, make_metadata(engine_id="e")):
        client = connect(timeout_ms=SHORT_MS)
        assert client.lookup([1] * 4 * N, "slow") == 0
        assert client.silent_ranks == [0]

        engine.go_on.set()
        client.config.lookup_timeout_ms = LONG_MS
        until(lambda: client.lookup([2] * N, "next") != 0)

        assert client.lookup_cache("next") == N
        assert client.lookup_cache("slow") == 0


class FailingEngine:
    """An engine whose first lookups raise."""

    def __init__(self, num_failures):
        self.config = make_config()
        self.left = num_failures

    def lookup(self, *, hashes, offsets, lookup_id, pin, request_configs):
        if self.left:
            self.left -= 1
            raise RuntimeError("the index is broken")
        return sum(offsets)


def test_an_engine_that_raises_costs_a_miss_and_the_server_goes_on(connect, caplog):
    with LMCacheLookupServer(FailingEngine(1), make_metadata(engine_id="e")) as server:
        client = connect()

        assert [client.lookup([1] * N, "r") for _ in range(2)] == [0, N]
        assert server.num_refused == 1
    assert "the index is broken" in caplog.text


def ask(path, *frames):
    """Send frames as a stranger; the reply's frames, or None when none comes soon."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"ipc://{path}")
        socket.send_multipart(frames)
        return socket.recv_multipart() if socket.poll(1000) else None


def request(**changes):
    fields = {
        "version": 1,
        "hashing": f"chunk_size={N}, pre_caching_hash_algorithm=sha256",
        "hashes": [bytes(16)],
        "offsets": [N],
        "lookup_id": "r",
        "request_configs": "",
    }
    return msgspec.msgpack.encode(LookupRequest(**{**fields, **changes}))


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        (b"\xc1", "MessagePack"),
        (msgspec.msgpack.encode(["too", "short"]), "Expected"),
        (request(version=9), "version 9"),
        (request(hashes=[b"short"]), "16 bytes"),
        (request(offsets=[N, N]), "1 hashes have 2 offsets"),
        (request(request_configs="{"), "Expecting"),
        (request(request_configs="[1]"), ""),
    ],
    ids=["no message", "too short", "version", "hash", "offsets", "json", "no options"],
)
def test_a_request_that_cannot_be_used_is_refused_with_words_and_pins_nothing(
    ranks, payload, error
):
    (engine,), _ = ranks(1, serving=())
    with LMCacheLookupServer(engine, engine.metadata) as server:
        number, reply = ask(server.path, b"12345678", payload)

        assert number == b"12345678"
        answer = msgspec.msgpack.decode(reply, type=LookupReply)
        assert answer.hit_tokens == 0
        assert error in answer.error and answer.error
        assert server.num_refused == 1
    assert_nothing_held(engine)


def test_a_stranger_without_a_number_gets_no_reply_and_the_next_client_gets_one(ranks):
    (engine,), _ = ranks(1, serving=())
    with LMCacheLookupServer(engine, engine.metadata) as server:
        assert ask(server.path, b"one frame") is None
        assert ask(server.path, b"", b"") == [b"", b""]
        assert server.num_refused == 1


def test_a_lookup_that_is_interrupted_does_not_spoil_the_next_one(connect):
    engine = HangingEngine()
    with LMCacheLookupServer(engine, make_metadata(engine_id="e")):
        client = connect(timeout_ms=LONG_MS)
        previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                client.lookup([1] * N, "interrupted")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)

        engine.go_on.set()
        assert client.lookup([2] * 3 * N, "next") == 3 * N


FORKED = """
import os, sys
from builders import make_config, make_metadata
from lmcache.v1.lookup_client.lmcache_lookup_client import LMCacheLookupClient
from lmcache.v1.lookup_client.lookup_server import LMCacheLookupServer
class Engine:
    config = make_config()
    def lookup(self, *, hashes, offsets, lookup_id, pin, request_configs):
        return sum(offsets)
server = LMCacheLookupServer(Engine(), make_metadata(engine_id="e"))
client = LMCacheLookupClient(make_config(lookup_timeout_ms=30_000), make_metadata(engine_id="e"))
assert client.lookup([1] * 32, "a") == 32
child = os.fork()
if child == 0:
    assert client.lookup([1] * 32, "b") == 0
    client.close()
    server.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert os.path.exists(server.path)
assert client.lookup([1] * 32, "c") == 32
client.close()
server.close()
print("done")
"""


def test_a_forked_child_finds_nothing_at_once_and_leaves_its_parents_service_alone(
    socket_directory, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", ":".join(path for path in sys.path if path))

    ran = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60)

    assert (ran.returncode, ran.stdout) == (0, "done\n"), ran.stderr


def test_a_file_in_the_place_of_a_socket_is_left_alone(ranks, tmp_path):
    (engine,), _ = ranks(1, serving=())
    path = tmp_path / "engine_e_service_lookup_lmcache_rpc_port_0"
    path.write_text("somebody's")

    with pytest.raises(ConfigError, match="no socket"):
        LMCacheLookupServer(engine, engine.metadata)

    assert path.read_text() == "somebody's"


@pytest.mark.parametrize("engine_id", ["a\0b", "a\ud800b"])
def test_an_engine_id_that_cannot_name_a_socket_is_refused(connect, engine_id):
    with pytest.raises(ConfigError, match="socket"):
        LMCacheLookupClient(make_config(), make_metadata(engine_id=engine_id))
