"""Unknown and older names: reported with a near match, never silently lost (H27)."""

import logging

import pytest

from lmcache.v1.config import LMCacheEngineConfig, load_engine_config_with_overrides
from lmcache.v1.config_schema import ALIASES
from lmcache.v1.errors import ConfigError, UnsupportedFeatureError

OTHER_VARIABLES = (
    "LMCACHE_LOG_LEVEL",
    "LMCACHE_CONFIG_FILE",
    "LMCACHE_TRACK_USAGE",
    "LMCACHE_EC_PIN_TIMEOUT_SEC",
    "LMCACHE_MP_TRANSFER_MODE",
    "LMCACHE_BUILD_JOBS",
    "LMCACHE_DEVICE_BACKEND",
    "LMCACHE_GPU",
    "LMCACHE_USE_EXPERIMENTAL",
)

VALUES_BY_OLDER_NAME = {
    "enable_xpyd": False,
    "nixl_role": "sender",
    "nixl_peer_host": "h",
    "nixl_peer_init_port": [7],
    "nixl_peer_alloc_port": [7, 8],
    "nixl_proxy_host": "h",
    "nixl_proxy_port": 7,
    "controller_url": "h:7",
    "lmcache_worker_port": [7],
    "plugin_locations": [],
    "external_backends": ["a", "b"],
}


def warnings_in(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_misspelt_variable_warns_with_its_near_match(monkeypatch, caplog):
    monkeypatch.setenv("LMCACHE_MAX_LOCAL_CPU_SZIE", "1")

    config = LMCacheEngineConfig.from_env()

    (warning,) = warnings_in(caplog)
    assert "LMCACHE_MAX_LOCAL_CPU_SZIE" in warning
    assert "did you mean LMCACHE_MAX_LOCAL_CPU_SIZE?" in warning
    assert config.max_local_cpu_size == 5.0


def test_an_unlike_variable_warns_without_a_guess(monkeypatch, caplog):
    monkeypatch.setenv("LMCACHE_QQQQ", "1")

    LMCacheEngineConfig.from_env()

    (warning,) = warnings_in(caplog)
    assert "LMCACHE_QQQQ" in warning
    assert "did you mean" not in warning


@pytest.mark.parametrize("variable", OTHER_VARIABLES)
def test_variables_that_are_no_settings_do_not_warn(variable, monkeypatch, caplog):
    monkeypatch.setenv(variable, "1")

    LMCacheEngineConfig.from_env()

    assert warnings_in(caplog) == []


def test_a_misspelt_key_warns_and_is_dropped(caplog):
    config = LMCacheEngineConfig.from_dict({"chunk_sise": 16})

    (warning,) = warnings_in(caplog)
    assert "chunk_sise" in warning
    assert "did you mean chunk_size?" in warning
    assert config.chunk_size == 256


def test_a_misspelt_keyword_is_refused():
    with pytest.raises(
        ConfigError, match=r"chunk_sise is not a setting; did you mean chunk_size\?"
    ):
        LMCacheEngineConfig.from_defaults(chunk_sise=16)


def test_a_misspelt_override_warns_and_is_dropped(caplog):
    load_engine_config_with_overrides(overrides={"chunk_sise": 16})

    assert any("chunk_sise (overrides)" in text for text in warnings_in(caplog))


def test_every_older_name_is_known():
    assert ALIASES.keys() == VALUES_BY_OLDER_NAME.keys()


@pytest.mark.parametrize(("alias", "value"), VALUES_BY_OLDER_NAME.items())
def test_an_older_name_sets_the_current_setting(alias, value, caplog):
    name = ALIASES[alias]

    config = LMCacheEngineConfig.from_dict({alias: value})

    assert getattr(config, name) == value
    assert config._user_set_keys == {name}
    assert f"{alias} (dictionary) is an older name; use {name}" in warnings_in(caplog)[0]


def test_an_older_variable_is_named_in_its_own_error(monkeypatch):
    monkeypatch.setenv("LMCACHE_NIXL_PROXY_PORT", "x")

    with pytest.raises(ConfigError, match="^LMCACHE_NIXL_PROXY_PORT='x'"):
        LMCacheEngineConfig.from_env()


def test_a_setting_under_two_names_is_an_error():
    with pytest.raises(ConfigError, match="storage_plugins is set twice"):
        LMCacheEngineConfig.from_dict({"storage_plugins": "a", "external_backends": "b"})


@pytest.mark.parametrize("given", [{"ec": {"chunk_size": 16}}, {"ec_chunk_size": 16}])
def test_an_encoder_cache_in_a_file_is_refused(given):
    with pytest.raises(UnsupportedFeatureError, match="encoder cache"):
        LMCacheEngineConfig.from_dict(given)
