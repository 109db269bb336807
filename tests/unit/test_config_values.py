"""Conversion: one rule for every kind of value, and errors that name the variable and the value."""

import pytest

from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.config_schema import FIELDS
from lmcache.v1.errors import ConfigError, UnsupportedFeatureError

BOOLEAN_FIELDS = [spec for spec in FIELDS.values() if spec.annotation is bool]
SPELLINGS = {
    "true": True,
    "TRUE": True,
    "1": True,
    "yes": True,
    "Yes": True,
    "on": True,
    " true ": True,
    '"true"': True,
    "false": False,
    "False": False,
    "0": False,
    "no": False,
    "NO": False,
    "off": False,
    " off\n": False,
    "'off'": False,
}
NO_BOOLEANS = ("", " ", "garbage", "2", "enabled", "truee", "None", "y", "t")


@pytest.fixture(autouse=True)
def no_settings_in_environment(monkeypatch):
    for spec in FIELDS.values():
        monkeypatch.delenv(spec.env_name, raising=False)


@pytest.mark.parametrize("spec", BOOLEAN_FIELDS, ids=lambda spec: spec.name)
@pytest.mark.parametrize(("text", "value"), SPELLINGS.items(), ids=map(repr, SPELLINGS))
def test_every_boolean_variable_takes_every_spelling(spec, text, value, monkeypatch):
    monkeypatch.setenv(spec.env_name, text)

    if spec.rules.feature and value not in spec.rules.inert:
        with pytest.raises(UnsupportedFeatureError, match=spec.env_name):
            LMCacheEngineConfig.from_env()
    else:
        assert getattr(LMCacheEngineConfig.from_env(), spec.name) is value


@pytest.mark.parametrize("spec", BOOLEAN_FIELDS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("text", NO_BOOLEANS, ids=repr)
def test_what_is_no_boolean_is_an_error_that_names_the_variable(spec, text, monkeypatch):
    monkeypatch.setenv(spec.env_name, text)

    with pytest.raises(ConfigError, match=f"^{spec.env_name}=.*is not a boolean") as caught:
        LMCacheEngineConfig.from_env()

    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    "spec",
    [spec for spec in FIELDS.values() if spec.annotation in (int, float, int | float)],
    ids=lambda spec: spec.name,
)
@pytest.mark.parametrize("text", ["", "five", "5 GB", "5GiB", "0x10", "nan", "None"], ids=repr)
def test_what_is_no_number_is_an_error_that_names_the_variable(spec, text, monkeypatch):
    monkeypatch.setenv(spec.env_name, text)

    with pytest.raises(ConfigError, match=f"^{spec.env_name}=.*is not a .*number") as caught:
        LMCacheEngineConfig.from_env()

    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("raw", [True, 2.5, "2.5", [1], None], ids=repr)
def test_a_whole_number_is_not_rounded_or_guessed(raw):
    with pytest.raises(ConfigError, match="chunk_size="):
        LMCacheEngineConfig.from_defaults(chunk_size=raw)


@pytest.mark.parametrize("raw", [64, 64.0, "64", " 64 "], ids=repr)
def test_a_whole_number_is_taken_in_any_form(raw):
    config = LMCacheEngineConfig.from_defaults(chunk_size=raw)

    assert config.chunk_size == 64
    assert isinstance(config.chunk_size, int)


@pytest.mark.parametrize(("raw", "value"), [("10", 10), (10, 10), ("0.25", 0.25), (0.25, 0.25)])
def test_a_time_out_may_be_a_fraction_of_a_second(raw, value):
    config = LMCacheEngineConfig.from_defaults(blocking_timeout_secs=raw)

    assert config.blocking_timeout_secs == value
    assert type(config.blocking_timeout_secs) is type(value)


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        ("/a", "/a"),
        ("file:///mnt/a/", "/mnt/a/"),
        ("file:///a/, file:///b/", "/a/,/b/"),
        (["/a", "file:///b"], "/a,/b"),
        ("", None),
        (None, None),
        (" , ", None),
    ],
)
def test_disk_directories_lose_their_prefix(raw, value):
    assert LMCacheEngineConfig.from_defaults(local_disk=raw).local_disk == value


@pytest.mark.parametrize(
    ("raw", "value"), [("0,2", [0, 2]), ("1", [1]), (3, [3]), ([0, "1"], [0, 1]), ("", None)]
)
def test_a_list_of_numbers_is_comma_separated(raw, value):
    config = LMCacheEngineConfig.from_defaults(lookup_server_worker_ids=raw)

    assert config.lookup_server_worker_ids == value


def test_a_list_item_that_is_no_number_is_an_error():
    with pytest.raises(ConfigError, match=r"lookup_server_worker_ids='0,x' is not a list"):
        LMCacheEngineConfig.from_defaults(lookup_server_worker_ids="0,x")


def test_extra_config_is_a_mapping_or_its_json(monkeypatch):
    monkeypatch.setenv("LMCACHE_EXTRA_CONFIG", '{"disk_io_threads": 2}')

    assert LMCacheEngineConfig.from_env().extra_config == {"disk_io_threads": 2}


@pytest.mark.parametrize("text", ["{", "[1]", "7", "plain"])
def test_extra_config_that_is_no_json_object_is_an_error(text, monkeypatch):
    monkeypatch.setenv("LMCACHE_EXTRA_CONFIG", text)

    with pytest.raises(ConfigError, match="LMCACHE_EXTRA_CONFIG"):
        LMCacheEngineConfig.from_env()


def test_a_quoted_text_is_unquoted(monkeypatch):
    monkeypatch.setenv("LMCACHE_STORE_LOCATION", r'"Local\tCPU"')
    monkeypatch.setenv("LMCACHE_REMOTE_URL", "'redis://h:1'")

    config = LMCacheEngineConfig.from_env()

    assert (config.store_location, config.remote_url) == ("Local\tCPU", "redis://h:1")


def test_an_empty_text_means_not_set(monkeypatch):
    monkeypatch.setenv("LMCACHE_REMOTE_URL", "")

    assert LMCacheEngineConfig.from_env().remote_url is None
