"""Fixtures of the lookup service and of metrics."""

import pytest
from builders import make_config, make_metadata
from engine_builders import AtomConnector, AtomMetadata
from metric_fakes import forget_everything

from lmcache.v1.lookup_client.lmcache_lookup_client import LMCacheLookupClient
from lmcache.v1.lookup_client.lookup_server import LMCacheLookupServer
from lmcache.v1.stats_monitor import StatsMonitor

LONG_MS = 30_000  # long enough for a reply on the busiest machine


@pytest.fixture
def socket_directory(tmp_path, monkeypatch):
    """Sockets go to the test's own directory."""
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))


@pytest.fixture
def ranks(make_engine, socket_directory):
    """`ranks(world_size, serving=...)`: engines, connectors and servers of a world."""
    servers = []

    def make(world_size, serving=None, **settings):
        engines, connectors = [], []
        for rank in range(world_size):
            metadata = AtomMetadata(
                make_metadata(world_size=world_size, worker_id=rank, engine_id="e")
            )
            connectors.append(AtomConnector())
            engines.append(make_engine(connectors[-1], metadata=metadata, **settings))
            if serving is None or rank in serving:
                servers.append(LMCacheLookupServer(engines[-1], metadata))
        return engines, connectors

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def connect(socket_directory):
    """`connect(world_size, timeout_ms, clock=None, **settings)`: a client."""
    clients = []

    def make(world_size=1, timeout_ms=LONG_MS, clock=None, **settings):
        config = make_config(lookup_timeout_ms=timeout_ms, **settings)
        metadata = make_metadata(world_size=world_size, engine_id="e")
        clients.append(LMCacheLookupClient(config, metadata, clock))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def fresh_metrics():
    """The test sees metrics and monitors that only it made."""
    forget_everything()
    yield
    forget_everything()


@pytest.fixture
def monitor():
    """A monitor of no engine in particular."""
    return StatsMonitor()
