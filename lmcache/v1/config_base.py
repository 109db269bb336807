"""Setting one configuration value at run time, from a source that must not raise."""

from lmcache.logging import init_logger
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.config_checks import check_value
from lmcache.v1.config_names import near_match
from lmcache.v1.config_schema import FIELDS
from lmcache.v1.config_values import parse_value
from lmcache.v1.errors import ConfigError

logger = init_logger(__name__)

_EXTRA_CONFIG = "extra_config"


def validate_and_set_config_value(
    config: LMCacheEngineConfig, config_key: str, value: object, override: bool = True
) -> bool:
    """Set one setting of `config` if the value can be used.

    Args:
        config: Changed in place.
        config_key: Name of the setting.
        value: Converted to the declared type.
        override: Replace what is there. If False, a setting that the user set is kept, and a new
            `extra_config` is merged over the present one, key by key.

    Returns:
        False, with an error or warning logged, if the name is unknown or the value cannot be
        used; True otherwise, also when a value of the user was kept.
    """
    if config_key not in FIELDS:
        logger.warning("%s is not a setting%s", config_key, near_match(str(config_key), FIELDS))
        return False
    try:
        parsed = parse_value(FIELDS[config_key], value, config_key)
        check_value(FIELDS[config_key], parsed, config_key)
    except ConfigError as error:
        logger.error("%s", error)
        return False
    if not override and config_key == _EXTRA_CONFIG:
        parsed = _merge_extra_config(config.extra_config, parsed)
    elif not override and config_key in config._user_set_keys:
        logger.info("%s keeps the value its user set", config_key)
        return True
    setattr(config, config_key, parsed)
    logger.info("%s is set", config_key)
    return True


def _merge_extra_config(
    present: dict[str, object] | None, added: dict[str, object] | None
) -> dict[str, object] | None:
    if not added:
        return present
    return {**(present or {}), **added}
