"""`LMCacheEngineConfig` as an object, its constructors, and the loader's order of sources."""

import copy
import dataclasses
import json
import logging
import pickle
import subprocess
import sys
import typing

import pytest

from lmcache.v1.config import LMCacheEngineConfig, load_engine_config_with_overrides
from lmcache.v1.config_base import validate_and_set_config_value
from lmcache.v1.config_schema import FIELDS
from lmcache.v1.errors import ConfigError


@pytest.fixture
def config():
    return LMCacheEngineConfig.from_defaults(lmcache_instance_id="one")


def write_yaml(directory, text):
    path = directory / "config.yaml"
    path.write_text(text)
    return str(path)


def test_every_field_is_an_attribute_of_the_declared_default(config):
    assert len(FIELDS) == 108
    for spec in FIELDS.values():
        if spec.name != "lmcache_instance_id":
            assert getattr(config, spec.name) == spec.default


def test_every_field_says_its_type():
    hints = typing.get_type_hints(LMCacheEngineConfig)

    assert all(hints[spec.name] == spec.annotation for spec in FIELDS.values())
    assert [field.name for field in dataclasses.fields(LMCacheEngineConfig)] == list(FIELDS)


def test_an_unknown_attribute_is_absent_and_a_known_one_can_be_assigned(config):
    assert not hasattr(config, "nope")

    config.max_local_cpu_size = 1.5
    config.use_gds = False

    assert (config.max_local_cpu_size, config.use_gds) == (1.5, False)


def test_equality_compares_settings():
    one = LMCacheEngineConfig.from_defaults(chunk_size=16, lmcache_instance_id="one")
    same = LMCacheEngineConfig.from_defaults(chunk_size=16, lmcache_instance_id="one")

    assert one == same
    same.cache_policy = "FIFO"
    assert one != same
    assert one != LMCacheEngineConfig.from_defaults(chunk_size=16, lmcache_instance_id="two")
    assert one != one.to_dict()


def test_made_up_instance_ids_differ_but_count_as_the_same_setting():
    one, other = LMCacheEngineConfig.from_defaults(), LMCacheEngineConfig.from_defaults()

    assert one.lmcache_instance_id != other.lmcache_instance_id
    assert one.lmcache_instance_id.startswith("lmcacheengineconfig_")
    assert one == other == LMCacheEngineConfig.from_dict(one.to_dict())


def test_a_copy_is_equal_and_detached(config):
    for duplicate in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert duplicate == config
        duplicate.chunk_size = 1
        assert config.chunk_size == 256


def test_dict_and_json_round_trip(config):
    config.extra_config = {"a": [1, {"b": None}]}

    assert LMCacheEngineConfig.from_dict(config.to_dict()) == config
    assert LMCacheEngineConfig.from_json(config.to_json()) == config
    assert json.loads(config.to_json())["chunk_size"] == 256


@pytest.mark.parametrize("text", ["{", "[]", '"x"'])
def test_json_that_is_no_object_is_an_error(text):
    with pytest.raises(ConfigError, match="JSON"):
        LMCacheEngineConfig.from_json(text)


def test_user_set_names_are_recorded(monkeypatch, tmp_path):
    monkeypatch.setenv("LMCACHE_CACHE_POLICY", "FIFO")
    path = write_yaml(tmp_path, "chunk_size: 16\n")

    loaded = load_engine_config_with_overrides(path, {"min_retrieve_tokens": 3})

    assert loaded._user_set_keys == {"cache_policy", "chunk_size", "min_retrieve_tokens"}
    assert LMCacheEngineConfig.from_defaults(local_cpu=True)._user_set_keys == {"local_cpu"}


def test_environment_wins_over_file_and_overrides_over_both(monkeypatch, tmp_path):
    path = write_yaml(tmp_path, "chunk_size: 1\nmin_retrieve_tokens: 1\ncache_policy: FIFO\n")
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "2")
    monkeypatch.setenv("LMCACHE_MIN_RETRIEVE_TOKENS", "2")

    loaded = load_engine_config_with_overrides(path, {"min_retrieve_tokens": "3"})

    assert (loaded.cache_policy, loaded.chunk_size, loaded.min_retrieve_tokens) == ("FIFO", 2, 3)


def test_the_loader_takes_the_file_named_in_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", write_yaml(tmp_path, "chunk_size: 8\n"))

    assert load_engine_config_with_overrides().chunk_size == 8


def test_the_loader_validates_only_what_all_sources_give_together(monkeypatch, tmp_path):
    path = write_yaml(tmp_path, "local_disk: /d\n")
    monkeypatch.setenv("LMCACHE_MAX_LOCAL_DISK_SIZE", "2")

    assert load_engine_config_with_overrides(path).max_local_disk_size == 2.0
    with pytest.raises(ConfigError, match="local_disk"):
        load_engine_config_with_overrides(path, {"max_local_disk_size": 0})


def test_from_env_and_from_file_validate(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="local_disk"):
        LMCacheEngineConfig.from_file(write_yaml(tmp_path, "local_disk: /d\n"))

    monkeypatch.setenv("LMCACHE_LOCAL_DISK", "/d")
    with pytest.raises(ConfigError, match="local_disk"):
        LMCacheEngineConfig.from_env()


def test_update_from_env_changes_and_returns_the_same_object(monkeypatch, config):
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "32")

    assert config.update_config_from_env() is config
    assert config.chunk_size == 32


def test_a_file_that_is_no_mapping_is_an_error_that_names_it(tmp_path):
    path = write_yaml(tmp_path, "- chunk_size\n")

    with pytest.raises(ConfigError, match=path):
        LMCacheEngineConfig.from_file(path)


def test_a_bad_value_in_a_file_names_the_setting_and_the_file(tmp_path):
    path = write_yaml(tmp_path, "chunk_size: many\n")

    with pytest.raises(ConfigError, match=rf"chunk_size \(file {path}\)='many'"):
        LMCacheEngineConfig.from_file(path)


def test_an_empty_file_gives_the_defaults(tmp_path):
    assert LMCacheEngineConfig.from_file(write_yaml(tmp_path, "")).chunk_size == 256


def test_validate_turns_an_assigned_text_into_the_declared_type(config):
    config.chunk_size = "64"

    assert config.validate().chunk_size == 64


def test_a_legacy_backend_stands_for_its_tiers(caplog):
    loaded = LMCacheEngineConfig.from_legacy(
        backend="local_cpu_disk", chunk_size=16, max_local_cpu_size=9
    )

    assert (loaded.local_cpu, loaded.max_local_cpu_size, loaded.chunk_size) == (True, 2.0, 16)
    assert (loaded.local_disk, loaded.max_local_disk_size) == ("local/disk_test/local_disk/", 5.0)
    assert any("max_local_cpu_size=9 is ignored" in r.getMessage() for r in caplog.records)


def test_an_unknown_legacy_backend_is_refused():
    with pytest.raises(ConfigError, match="backend='tape' is unknown"):
        LMCacheEngineConfig.from_legacy(backend="tape")


@pytest.mark.parametrize(("use_mla", "ranks"), [(False, [0, 1, 2]), (True, [0])])
def test_lookup_servers_run_on_all_ranks_or_on_the_first_for_mla(config, use_mla, ranks):
    assert config.get_lookup_server_worker_ids(use_mla, 3) == ranks
    assert config.get_lmcache_worker_ids(use_mla, 3) == ranks


def test_chosen_lookup_ranks_must_exist(config):
    config.lookup_server_worker_ids = [0, 2]

    assert config.get_lookup_server_worker_ids(True, 3) == [0, 2]
    with pytest.raises(ConfigError, match="rank 2.*world size is 2"):
        config.get_lookup_server_worker_ids(False, 2)


def test_extra_values_have_a_default(config):
    assert config.get_extra_config_value("a", 5) == 5
    config.extra_config = {"a": 1}
    assert config.get_extra_config_value("a", 5) == 1


def test_the_log_line_shows_units_and_hides_passwords(config, caplog):
    config.remote_url = "redis://user:hunter2@host:1"
    config.extra_config = {"password": "hunter2", "username": "me"}
    caplog.set_level(logging.INFO, logger="lmcache")

    assert config.log_config() is config

    (record,) = caplog.records
    assert "5.0 GiB" in record.getMessage()
    assert "hunter2" not in record.getMessage()


def test_a_value_set_at_run_time_is_converted(config):
    assert validate_and_set_config_value(config, "chunk_size", "32") is True
    assert config.chunk_size == 32


@pytest.mark.parametrize(
    ("name", "value"),
    [("nope", 1), ("chunk_size", "x"), ("use_layerwise", True), ("extra_config", "[")],
)
def test_a_value_that_cannot_be_used_leaves_the_configuration_alone(config, name, value, caplog):
    before = config.to_dict()

    assert validate_and_set_config_value(config, name, value) is False
    assert config.to_dict() == before
    assert name in caplog.text


def test_without_override_a_value_of_the_user_is_kept(config):
    config._user_set_keys.add("chunk_size")

    assert validate_and_set_config_value(config, "chunk_size", 8, override=False) is True
    assert validate_and_set_config_value(config, "min_retrieve_tokens", 8, override=False) is True

    assert (config.chunk_size, config.min_retrieve_tokens) == (256, 8)


def test_without_override_extra_config_is_merged(config):
    config.extra_config = {"a": 1, "b": 1}

    validate_and_set_config_value(config, "extra_config", '{"b": 2, "c": 2}', override=False)
    assert config.extra_config == {"a": 1, "b": 2, "c": 2}
    validate_and_set_config_value(config, "extra_config", None, override=False)
    assert config.extra_config == {"a": 1, "b": 2, "c": 2}
    validate_and_set_config_value(config, "extra_config", {"d": 3})
    assert config.extra_config == {"d": 3}


def test_importing_the_settings_needs_no_torch():
    code = "import sys, lmcache.v1.config_base; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
