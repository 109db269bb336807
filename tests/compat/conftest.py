"""An engine as ATOM builds it."""

import pytest
from builders import CHUNK_TOKENS
from engine_builders import atom_metadata

from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat


@pytest.fixture
def sockets_of_this_test(tmp_path, monkeypatch):
    """Sockets go to the test's own directory."""
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))


@pytest.fixture
def built(connector, monkeypatch, sockets_of_this_test):
    """An engine built from the environment as ATOM builds it."""
    monkeypatch.setenv("LMCACHE_LOCAL_CPU", "True")
    monkeypatch.setenv("LMCACHE_MAX_LOCAL_CPU_SIZE", str(16 * 4096 / 2**30))
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", str(CHUNK_TOKENS))
    config = LMCacheEngineConfig.from_env()
    config.use_gds = False
    config.lookup_server_worker_ids = [0]
    engine = LMCacheEngineBuilder.get_or_create(
        "atom", config, atom_metadata(), connector, lambda tensor, src: None, lambda obj, src: obj
    )
    engine.fmt = MemoryFormat.KV_2LTD
    engine.post_init()
    yield engine
    LMCacheEngineBuilder.destroy("atom")
