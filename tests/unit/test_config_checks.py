"""What `validate` and the constructors refuse, and that the message says what to do."""

import logging

import pytest

from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.config_schema import (
    CACHE_POLICY_NAMES,
    FIELDS,
    HASH_ALGORITHM_NAMES,
    UNSUPPORTED_EXTRA_KEYS,
    UNSUPPORTED_REMOTE_SCHEMES,
)
from lmcache.v1.errors import ConfigError, UnsupportedFeatureError

ASKS_FOR_IT = {
    "external_lookup_client": "chunkhash://x",
    "gds_path": "/gds",
    "hit_miss_ratio": 0.5,
    "maru_path": "maru://x",
    "mp_host": "localhost",
    "priority_limit": 1,
    "remote_config_url": "http://x",
    "runtime_plugin_locations": ["/plugins"],
}
LACKING = [spec for spec in FIELDS.values() if spec.rules.feature]


@pytest.mark.parametrize("spec", LACKING, ids=lambda spec: spec.name)
def test_switching_on_a_lacking_feature_is_refused_with_one_clear_error(spec):
    value = ASKS_FOR_IT.get(spec.name, True)

    with pytest.raises(UnsupportedFeatureError) as caught:
        LMCacheEngineConfig.from_defaults(**{spec.name: value})

    message = str(caught.value)
    assert f"{spec.name}={value!r}" in message
    assert spec.rules.feature in message
    assert "upstream LMCache does" in message


@pytest.mark.parametrize("spec", LACKING, ids=lambda spec: spec.name)
def test_leaving_a_lacking_feature_off_is_accepted(spec):
    config = LMCacheEngineConfig.from_defaults(**{spec.name: spec.default})

    assert config.validate() is config


@pytest.mark.parametrize("spec", LACKING, ids=lambda spec: spec.name)
def test_a_lacking_feature_assigned_later_is_refused_by_validate(spec):
    config = LMCacheEngineConfig.from_defaults()
    setattr(config, spec.name, ASKS_FOR_IT.get(spec.name, True))

    with pytest.raises(UnsupportedFeatureError, match=spec.name):
        config.validate()


@pytest.mark.parametrize("key", UNSUPPORTED_EXTRA_KEYS)
def test_an_extra_key_of_a_lacking_feature_is_refused(key):
    with pytest.raises(UnsupportedFeatureError, match=f"extra_config.*{key}"):
        LMCacheEngineConfig.from_defaults(extra_config={key: True})

    LMCacheEngineConfig.from_defaults(extra_config={key: False}).validate()


@pytest.mark.parametrize("scheme", UNSUPPORTED_REMOTE_SCHEMES)
def test_a_remote_store_that_is_lacking_is_refused(scheme):
    with pytest.raises(UnsupportedFeatureError, match=f"remote_url='{scheme}://h:1'"):
        LMCacheEngineConfig.from_defaults(remote_url=f"{scheme}://h:1")


@pytest.mark.parametrize("url", ["fs://h:1/d", "redis://h:1", "rediss://h:1", "valkey://h:1"])
def test_a_remote_store_we_have_is_accepted(url):
    assert LMCacheEngineConfig.from_defaults(remote_url=url).validate().remote_url == url


def test_a_remote_url_without_scheme_is_an_error():
    with pytest.raises(ConfigError, match="remote_url='localhost:6379' has no scheme"):
        LMCacheEngineConfig.from_defaults(remote_url="localhost:6379")


@pytest.mark.parametrize("serde", ["kivi", "cachegen"])
def test_a_lossy_serializer_is_refused(serde):
    with pytest.raises(UnsupportedFeatureError, match=f"remote_serde='{serde}'"):
        LMCacheEngineConfig.from_defaults(remote_serde=serde)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chunk_size", 0),
        ("chunk_size", -16),
        ("max_local_cpu_size", -1),
        ("max_local_cpu_size", float("inf")),
        ("reserve_local_cpu_size", -0.5),
        ("max_local_disk_size", -2),
        ("blocking_timeout_secs", -1),
        ("lookup_timeout_ms", 0),
        ("min_retrieve_tokens", -1),
        ("pin_timeout_sec", 0),
        ("pin_check_interval_sec", -1),
        ("lookup_server_worker_ids", [0, -1]),
    ],
)
def test_a_number_out_of_range_is_refused_with_its_name_and_value(name, value):
    with pytest.raises(ConfigError, match=name) as caught:
        LMCacheEngineConfig.from_defaults(**{name: value})

    shown = {repr(value)} if isinstance(value, list) else {repr(value), repr(float(value))}
    assert any(f"{text} must be" in str(caught.value) for text in shown)


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("cache_policy", "LRV", CACHE_POLICY_NAMES),
        ("pre_caching_hash_algorithm", "md5", HASH_ALGORITHM_NAMES),
        ("remote_serde", "zip", ("naive",)),
        ("local_disk_path_sharding", "by_name", ("by_gpu",)),
        ("numa_mode", "always", ("auto", "manual")),
    ],
)
def test_an_unknown_word_is_refused_with_the_known_ones(name, value, remedy):
    with pytest.raises(ConfigError, match=f"{name}='{value}' is unknown") as caught:
        LMCacheEngineConfig.from_defaults(**{name: value})

    assert all(word in str(caught.value) for word in remedy)


@pytest.mark.parametrize("policy", ["LRU", "lru", "Lfu", "fifo", "MRU"])
def test_a_cache_policy_may_be_in_any_case(policy):
    assert LMCacheEngineConfig.from_defaults(cache_policy=policy).validate().cache_policy == policy


def test_a_disk_without_a_budget_is_refused_with_both_names(tmp_path):
    config = LMCacheEngineConfig.from_defaults(local_disk=str(tmp_path))

    with pytest.raises(ConfigError, match=r"local_disk=.*set max_local_disk_size"):
        config.validate()


def test_a_disk_budget_without_a_directory_is_refused():
    config = LMCacheEngineConfig.from_defaults(max_local_disk_size=2)

    with pytest.raises(ConfigError, match=r"max_local_disk_size=2.0.*set local_disk"):
        config.validate()


@pytest.mark.parametrize(
    "lower_tier",
    [{"local_disk": "/d", "max_local_disk_size": 1}, {"remote_url": "redis://h:1"}],
    ids=["disk", "remote"],
)
def test_a_lower_tier_without_a_cpu_pool_is_refused(lower_tier):
    config = LMCacheEngineConfig.from_defaults(max_local_cpu_size=0, **lower_tier)

    with pytest.raises(ConfigError, match=r"max_local_cpu_size=0.*above 0"):
        config.validate()


@pytest.mark.parametrize(
    ("name", "value"),
    [("enable_lazy_memory_allocator", True), ("use_gpu_connector_v3", True), ("numa_mode", "auto")],
)
def test_a_setting_without_effect_here_warns(name, value, caplog):
    LMCacheEngineConfig.from_defaults(**{name: value}).validate()

    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert f"{name}={value!r} is ignored" in warnings[0]
