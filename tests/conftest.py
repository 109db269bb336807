"""One fixture per concept."""

import os

import builders
import disk_builders
import engine_builders
import pytest
import torch

from lmcache.v1.storage_backend.storage_manager import StorageManager

# Tests fill small chunks; torch's own threads would only wait for each other on a busy host.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch):
    """Whatever `LMCACHE_*` the shell has set, a test sees none of it."""
    for name in list(os.environ):
        if name.startswith("LMCACHE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def metadata():
    """One worker whose chunks take 16 KiB."""
    return builders.make_metadata()


@pytest.fixture
def make_config():
    """`make_config(num_chunks=8, **settings)`."""
    return builders.make_config


@pytest.fixture
def keys():
    """`keys(count, first=1)`: keys with the chunk hashes first, first + 1, ..."""
    return builders.keys


@pytest.fixture
def put():
    """`put(sm, key, nbytes=..., placement=...)`: store one chunk filled with its hash."""
    return builders.put


@pytest.fixture
def make_manager(metadata):
    """`make_manager(policy, num_chunks, tiers={name: class}, **settings)`; checked and closed."""
    made = []

    def make(policy="LRU", num_chunks=8, tiers=None, **settings):
        config = builders.make_config(num_chunks, cache_policy=policy, **settings)
        sm = StorageManager(config, metadata)
        for name, tier_class in (tiers or {}).items():
            sm.storage_backends[name] = tier_class(local_cpu_backend=sm.local_cpu_backend)
        made.append(sm)
        return sm

    yield make
    for sm in made:
        sm.check_integrity()
        sm.close()


@pytest.fixture
def make_disk(make_manager, tmp_path):
    """`make_disk(num_files=16, **settings)`: a manager with a pool of 16 chunks and a disk tier."""

    def make(num_files=16, num_chunks=16, policy="LRU", extra_config=None, **settings):
        disk = disk_builders.disk_settings(tmp_path, num_files, **(extra_config or {}))
        return make_manager(policy, num_chunks, **{**disk, **settings})

    return make


@pytest.fixture
def manager(make_manager):
    """An LRU manager with a pool of eight chunks."""
    return make_manager()


@pytest.fixture
def connector():
    """A connector of ATOM's kind over 512 blocks of 4 tokens."""
    return engine_builders.AtomConnector()


@pytest.fixture
def make_engine(connector):
    """`make_engine(num_chunks=16, connector=..., **settings)`; checked and closed."""
    made = []

    def make(connector=connector, **settings):
        made.append(engine_builders.make_engine(connector, **settings))
        return made[-1]

    yield make
    for engine in made:
        engine.check_integrity()
        engine.close()


@pytest.fixture
def engine(make_engine):
    """An engine with a pool of 16 chunks of 16 tokens."""
    return make_engine()


def pytest_runtest_logreport(report):
    """In CI a check that did not run is a failure, those that need a GPU aside."""
    if report.skipped and "gpu" not in report.keywords and not hasattr(report, "wasxfail"):
        SKIPPED.append(report.nodeid)


def pytest_sessionfinish(session, exitstatus):
    """Fail a run that must not skip and did."""
    if SKIPPED and os.environ.get("TESTS_MUST_NOT_SKIP") and exitstatus == 0:
        print(f"\nskipped, and that is a failure here: {', '.join(SKIPPED)}")
        session.exitstatus = 1


SKIPPED = []
