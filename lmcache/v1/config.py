"""`LMCacheEngineConfig`: the settings of one engine, loaded, converted and checked."""

import json
import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from lmcache.logging import init_logger
from lmcache.v1.config_checks import check_together, check_value, find_ignored
from lmcache.v1.config_knob import ENV_PREFIX
from lmcache.v1.config_legacy import legacy_settings
from lmcache.v1.config_names import (
    CONFIG_FILE_VARIABLE,
    collect_from_env,
    near_match,
    resolve_names,
)
from lmcache.v1.config_schema import ALIASES, FIELDS, Settings
from lmcache.v1.config_values import hide_secrets, parse_value
from lmcache.v1.errors import ConfigError

logger = init_logger(__name__)

_GENERATED_ID_PREFIX = "lmcacheengineconfig_"
_GENERATED_ID = re.compile(_GENERATED_ID_PREFIX + "[0-9a-f]{32}")


@dataclass(eq=False, kw_only=True)
class LMCacheEngineConfig(Settings):
    """All settings of an engine, as plain attributes that may be reassigned.

    The constructors convert and check every value; assigning an attribute does not, `validate`
    does. Two configurations are equal when all settings are; instance ids made up by us for want
    of one count as the same. The names a user set are in `_user_set_keys`.

    Threads: not synchronised; build it, then share it.
    """

    def __post_init__(self) -> None:
        self._user_set_keys: set[str] = set()
        if not self.lmcache_instance_id:
            self.lmcache_instance_id = _GENERATED_ID_PREFIX + uuid.uuid4().hex

    @classmethod
    def from_defaults(cls, **settings: object) -> "LMCacheEngineConfig":
        """Build from the defaults and the given settings.

        Raises:
            ConfigError: An unknown name, or a value that cannot be used.
        """
        for name in settings:
            if name not in FIELDS and name not in ALIASES:
                raise ConfigError(f"{name} is not a setting{near_match(name, FIELDS)}")
        return cls._from_named(resolve_names(settings, "keyword arguments"))

    @classmethod
    def from_env(cls) -> "LMCacheEngineConfig":
        """Build from the `LMCACHE_*` environment variables over the defaults, and validate.

        Raises:
            ConfigError: A value cannot be used; names the variable.
        """
        return cls().update_config_from_env()

    @classmethod
    def from_file(cls, file_path: str | os.PathLike[str]) -> "LMCacheEngineConfig":
        """Build from a YAML mapping over the defaults, and validate.

        Raises:
            OSError: The file cannot be read.
            ConfigError: It is no mapping, or a value cannot be used; names the setting.
        """
        return cls._read_file(file_path).validate()

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, object]) -> "LMCacheEngineConfig":
        """Build from a mapping; unknown names are dropped with a warning.

        Raises:
            ConfigError: A value cannot be used.
        """
        return cls._from_named(resolve_names(config_dict, "dictionary"))

    @classmethod
    def from_json(cls, json_str: str) -> "LMCacheEngineConfig":
        """Build from the JSON text of an object, as `from_dict` does.

        Raises:
            ConfigError: It is no JSON object, or a value cannot be used.
        """
        try:
            loaded = json.loads(json_str)
        except json.JSONDecodeError as error:
            raise ConfigError(f"The configuration is not JSON: {error}") from None
        if not isinstance(loaded, dict):
            raise ConfigError("The JSON text of a configuration must be an object")
        return cls.from_dict(loaded)

    @classmethod
    def from_legacy(cls, backend: str = "cpu", **settings: object) -> "LMCacheEngineConfig":
        """Build from a named set of tiers plus settings, and validate.

        The tiers a name stands for win over `settings`, as in 0.5.6; a loser is warned about.

        Raises:
            ConfigError: An unknown backend or setting, or a value that cannot be used.
        """
        return cls.from_defaults(**legacy_settings(backend, settings)).validate()

    @classmethod
    def _from_named(cls, given: Mapping[str, object], source: str = "") -> "LMCacheEngineConfig":
        config = cls()
        for name, raw in given.items():
            config._set_from_user(name, raw, f"{name} ({source})" if source else name)
        return config

    @classmethod
    def _read_file(cls, file_path: str | os.PathLike[str]) -> "LMCacheEngineConfig":
        with open(file_path, encoding="utf-8") as file:
            loaded = yaml.safe_load(file)
        if loaded is None:
            loaded = {}
        source = f"file {os.fspath(file_path)}"
        if not isinstance(loaded, dict):
            raise ConfigError(f"The {source} must hold a mapping of settings to values")
        return cls._from_named(resolve_names(loaded, source), source)

    def _set_from_user(self, name: str, raw: object, label: str) -> None:
        spec = FIELDS[name]
        value = parse_value(spec, raw, label)
        check_value(spec, value, label)
        setattr(self, name, value)
        self._user_set_keys.add(name)
        if name == "lmcache_instance_id" and not value:
            self.lmcache_instance_id = _GENERATED_ID_PREFIX + uuid.uuid4().hex

    def update_config_from_env(self) -> "LMCacheEngineConfig":
        """Set what the `LMCACHE_*` variables set, validate, and return this object.

        Raises:
            ConfigError: A value cannot be used; names the variable.
        """
        self._apply_env()
        return self.validate()

    def validate(self) -> "LMCacheEngineConfig":
        """Check every setting and their combination, and return this object.

        Values of another but convertible type (a number as text) become the declared type.

        Raises:
            ConfigError: Names the setting, its value and the remedy.
        """
        for spec in FIELDS.values():
            value = parse_value(spec, vars(self)[spec.name], spec.name)
            check_value(spec, value, spec.name)
            setattr(self, spec.name, value)
        check_together(self)
        for name, value, reason in find_ignored(self):
            logger.warning("%s=%r is ignored: %s", name, value, reason)
        return self

    def log_config(self) -> "LMCacheEngineConfig":
        """Log every setting with its unit at INFO, without passwords, and return this object."""
        shown = {
            name: f"{hide_secrets(vars(self)[name])} {spec.rules.unit}".rstrip()
            for name, spec in FIELDS.items()
        }
        logger.info("LMCache configuration: %s", shown)
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return name → value for every setting."""
        return {name: vars(self)[name] for name in FIELDS}

    def to_json(self) -> str:
        """Return the JSON text of `to_dict`."""
        return json.dumps(self.to_dict(), indent=2)

    def get_extra_config_value(self, key: str, default_value: Any = None) -> Any:
        """Return `extra_config[key]`, or `default_value` where it is not set."""
        return (self.extra_config or {}).get(key, default_value)

    def get_lmcache_worker_ids(self, use_mla: bool, world_size: int) -> list[int]:
        """Return the ranks that report to a controller: as set, else rank 0 for MLA, else all."""
        return _worker_ids("lmcache_worker_ids", self.lmcache_worker_ids, use_mla, world_size)

    def get_lookup_server_worker_ids(self, use_mla: bool, world_size: int) -> list[int]:
        """Return the ranks that run a lookup server: as set, else rank 0 for MLA, else all.

        Raises:
            ConfigError: A rank that is set does not exist in this world size.
        """
        return _worker_ids(
            "lookup_server_worker_ids", self.lookup_server_worker_ids, use_mla, world_size
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LMCacheEngineConfig):
            return NotImplemented
        return self._comparable() == other._comparable()

    def __str__(self) -> str:
        return str(self.to_dict())

    def _apply_env(self) -> None:
        texts = collect_from_env(os.environ)
        variables = {ALIASES.get(name, name): ENV_PREFIX + name.upper() for name in texts}
        for name, text in resolve_names(texts, "environment").items():
            self._set_from_user(name, text, variables[name])

    def _apply_overrides(self, overrides: Mapping[str, object]) -> None:
        for name, raw in resolve_names(overrides, "overrides").items():
            before = vars(self)[name]
            self._set_from_user(name, raw, f"{name} (override)")
            if vars(self)[name] != before:
                logger.info("%s=%r overrides %r", name, vars(self)[name], before)

    def _comparable(self) -> dict[str, Any]:
        settings = self.to_dict()
        if _GENERATED_ID.fullmatch(str(self.lmcache_instance_id)):
            settings["lmcache_instance_id"] = None
        return settings


def _worker_ids(name: str, chosen: list[int] | None, use_mla: bool, world_size: int) -> list[int]:
    if not chosen:
        return [0] if use_mla else list(range(world_size))
    for worker_id in chosen:
        if not 0 <= worker_id < world_size:
            raise ConfigError(
                f"{name}={chosen} names rank {worker_id}, but the world size is {world_size}"
            )
    return chosen


def load_engine_config_with_overrides(
    config_file_path: str | None = None,
    overrides: Mapping[str, object] | None = None,
) -> LMCacheEngineConfig:
    """Load the configuration of an engine: file, then environment, then overrides; then validate.

    Args:
        config_file_path: YAML file; else `LMCACHE_CONFIG_FILE`; else the environment alone.
        overrides: Settings that win over both; unknown names are dropped with a warning.

    Raises:
        OSError: The file cannot be read.
        ConfigError: A value cannot be used.
    """
    path = config_file_path or os.environ.get(CONFIG_FILE_VARIABLE)
    config = LMCacheEngineConfig._read_file(path) if path else LMCacheEngineConfig()
    config._apply_env()
    config._apply_overrides(overrides or {})
    return config.validate().log_config()
