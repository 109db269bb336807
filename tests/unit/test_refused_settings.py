"""Settings of features that this fork lacks are refused, each by its own name."""

import pytest
from builders import make_metadata

from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.errors import UnsupportedFeatureError
from lmcache.v1.storage_backend.storage_manager import StorageManager

REFUSED = [
    ("use_layerwise", True),
    ("enable_async_loading", True),
    ("enable_scheduler_bypass_lookup", True),
    ("enable_blending", True),
    ("enable_p2p", True),
    ("enable_pd", True),
    ("enable_controller", True),
    ("internal_api_server_enabled", True),
    ("local_cpu_use_hugepages", True),
    ("remote_serde", "kivi"),
    ("remote_serde", "cachegen"),
    ("remote_url", "lm://localhost:8000"),
    ("remote_url", "resp://localhost:6379"),
    ("maru_path", "/maru"),
    ("gds_path", "/gds"),
    ("extra_config", {"save_only_first_rank": True}),
]
NOT_THERE_YET = [
    {"remote_url": "redis://localhost:6379"},
    {"remote_storage_plugins": ["fs.primary"]},
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda value: str(value))
def test_a_feature_that_is_not_here_is_refused_by_name(name, value):
    said = "|".join(value) if isinstance(value, dict) else name
    with pytest.raises(UnsupportedFeatureError, match=said) as refused:
        LMCacheEngineConfig.from_defaults(**{name: value}).validate()
    assert "upstream" in str(refused.value)


@pytest.mark.parametrize("settings", NOT_THERE_YET, ids=lambda settings: next(iter(settings)))
def test_a_tier_that_is_not_there_yet_is_refused_at_start(make_config, settings):
    config = make_config(**settings)

    with pytest.raises(UnsupportedFeatureError, match=next(iter(settings))):
        StorageManager(config, make_metadata())
