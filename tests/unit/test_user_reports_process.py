"""Reported faults of start and end: exit, sizing, imports, the pool's first touch of memory.

Each docstring begins with the id of the report, or cites the decision.
"""

import os
import subprocess
import sys

import pytest
import torch
from builders import CHUNK_BYTES, make_config, make_metadata

from lmcache.v1.errors import HostMemoryError
from lmcache.v1.host_limits import HostLimit, check_pool_fits
from lmcache.v1.storage_backend.storage_manager import StorageManager

NEVER_CLOSED = """
import sys
sys.path.insert(0, "tests")
from builders import keys, make_config, make_metadata, put_all
from lmcache.v1.storage_backend.storage_manager import StorageManager
sm = StorageManager(make_config(), make_metadata())
events = sm.subscribe(lambda batch: None)
put_all(sm, keys(20))
sm.contains(keys(1, first=20)[0], pin=True)
print("end of main", flush=True)
"""
CLOSED_TWICE = NEVER_CLOSED + "sm.close()\nsm.close()\nprint('closed', flush=True)\n"
NO_NETWORK = """
import socket, sys
def refuse(*args, **kwargs):
    raise AssertionError("a socket was opened")
sys.path.insert(0, "tests")
import torch
before = set(sys.modules)
socket.socket = socket.create_connection = socket.getaddrinfo = socket.socketpair = refuse
import lmcache
from builders import keys, make_config, make_metadata, put_all
from lmcache.v1.storage_backend.storage_manager import StorageManager
sm = StorageManager(make_config(), make_metadata())
with sm.subscribe() as events:
    put_all(sm, keys(2))
    assert sm.touch(keys(3)).refreshed == 2
    assert len(events.take()) == 2
sm.close()
for module in ("numba", "numpy", "cupy", "triton", "requests", "aiohttp", "transformers"):
    assert module not in set(sys.modules) - before, module
assert not torch.cuda.is_initialized()
print("touched")
"""
ENGINE_WITHOUT_NETWORK = r"""
import os, re, socket, sys
sys.path.insert(0, "tests")
import torch
opened = []
def listen(event, args):
    if event.startswith("socket.") and not (args and is_local(event, args)):
        opened.append((event, args))
        raise AssertionError(f"a socket of the network was used: {event} {args}")
def is_local(event, args):
    if event == "socket.__new__":
        return args[1] == socket.AF_UNIX
    return isinstance(args[0], socket.socket) and args[0].family == socket.AF_UNIX
sys.addaudithook(listen)
from builders import make_config, make_metadata
from engine_builders import AtomConnector, AtomMetadata, Prompt, retrieve, store
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.lookup_client.factory import LookupClientFactory
connector, prompt = AtomConnector(), Prompt(1, 64)
metadata = AtomMetadata(make_metadata(engine_id="e"))
config = make_config(enable_kv_events=True)
engine = LMCacheEngineBuilder.get_or_create("x", config, metadata, connector, None, None)
engine.post_init()
server = LookupClientFactory.create_lookup_server(engine, metadata)
client = LookupClientFactory.create_lookup_client(config, metadata)
store(engine, prompt, connector)
assert client.lookup(prompt.tokens.tolist(), "r") == 64
assert retrieve(engine, prompt) == 64
engine.lookup_unpin("r")
# What native code opens raises no audit event, and is seen here.
links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
         if os.path.islink(f"/proc/self/fd/{fd}")]
mine = {found[1] for link in links if (found := re.fullmatch(r"socket:.(\d+).", link))}
assert mine, "the lookup service has unix sockets, which are not there"
for table in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
    with open(f"/proc/self/net/{table}") as rows:
        assert not mine & {row.split()[9] for row in list(rows)[1:]}, table
client.close()
server.close()
LMCacheEngineBuilder.destroy("x")
assert not opened, opened
print("served")
"""
ENVIRONMENT_LEFT_ALONE = """
import importlib, os, pkgutil, sys
sys.path.insert(0, "tests")
import torch
assert "PROMETHEUS_MULTIPROC_DIR" not in os.environ
before = dict(os.environ)
import lmcache
for module in pkgutil.walk_packages(lmcache.__path__, "lmcache."):
    importlib.import_module(module.name)
from builders import make_config, make_metadata
from engine_builders import AtomConnector, AtomMetadata, Prompt, store
from lmcache.v1.cache_engine import LMCacheEngineBuilder
connector, metadata = AtomConnector(), AtomMetadata(make_metadata(engine_id="e"))
engine = LMCacheEngineBuilder.get_or_create("x", make_config(), metadata, connector, None, None)
engine.post_init()
store(engine, Prompt(1, 64), connector)
LMCacheEngineBuilder.destroy("x")
assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())
print("unchanged")
"""
NO_NATIVE_CORE = """
import sys
sys.modules["lmcache._native"] = None
import lmcache
try:
    import lmcache.v1.storage_backend
except ImportError as error:
    print(error)
"""


def run_python(program, timeout_seconds=60):
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
    )


@pytest.mark.parametrize(
    ("program", "last_words"), [(NEVER_CLOSED, "end of main"), (CLOSED_TWICE, "closed")]
)
def test_a_process_ends_whether_or_not_its_manager_was_closed(program, last_words):
    """H28: threads that were no daemons kept the process alive."""
    started = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    printed = [started.stdout.readline().strip()]
    while printed[-1] not in (last_words, ""):
        printed.append(started.stdout.readline().strip())
    try:
        _, errors = started.communicate(timeout=5)
    finally:
        started.kill()

    assert printed[-1] == last_words, errors
    assert started.returncode == 0, errors


def test_pools_that_the_host_cannot_hold_together_are_refused_with_both_sizes():
    """H29: "50 GB" became 50 GB times the ranks, and the process was killed without a word."""
    host = HostLimit(64 * 2**30, "a test host")

    with pytest.raises(HostMemoryError) as refused:
        check_pool_fits(10, local_world_size=8, read_limit=lambda: host)

    for part in ("10 GiB per rank x 8 ranks", "80 GiB", "64.0 GiB", "below 8.0 GiB"):
        assert part in str(refused.value)
    check_pool_fits(8, local_world_size=8, read_limit=lambda: host)


def test_a_backend_whose_pools_exceed_the_host_is_not_built():
    """H29: the check is made where the pool is made."""
    with pytest.raises(HostMemoryError, match="x 1000000 ranks"):
        StorageManager(make_config(max_local_cpu_size=1), make_metadata(local_world_size=1_000_000))


def test_touch_needs_no_network_no_device_and_no_optional_package():
    """H31: the import died on machines without the exact GPU stack."""
    done = run_python(NO_NETWORK)

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "touched"


def test_an_engine_that_serves_uses_no_socket_of_the_network(tmp_path, monkeypatch):
    """Decision "telemetry by default: none": nothing is sent anywhere by itself."""
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))

    done = run_python(ENGINE_WITHOUT_NETWORK)

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "served"


def test_the_environment_of_the_process_is_left_alone(monkeypatch):
    """Decision "PROMETHEUS_MULTIPROC_DIR is set: the environment is left alone"."""
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)

    done = run_python(ENVIRONMENT_LEFT_ALONE)

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "unchanged"


def test_a_missing_native_core_is_named_with_the_remedy():
    """H31: the real reason was swallowed."""
    done = run_python(NO_NATIVE_CORE)

    assert done.returncode == 0, done.stderr
    assert "lmcache._native" in done.stdout
    assert "pip install" in done.stdout


def test_a_large_pool_is_made_without_touching_its_pages_or_a_device(make_manager):
    """H32: start-up pinned the whole pool at once, and grabbed a device for it."""
    before_kib = _resident_kib()

    sm = make_manager(num_chunks=2**30 // CHUNK_BYTES)

    assert _resident_kib() - before_kib < 2**18  # a quarter of the pool's 1 GiB
    assert not sm.local_cpu_backend.memory_allocator.pinned.is_pinned
    assert not torch.cuda.is_initialized()


def _resident_kib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
