"""What makes a value unusable: its range, its name, another setting, or a feature we lack."""

import math
from collections.abc import Mapping
from typing import Any

from lmcache.v1.config_knob import FieldSpec, Knob
from lmcache.v1.config_schema import (
    FIELDS,
    UNSUPPORTED_EXTRA_KEYS,
    UNSUPPORTED_REMOTE_SCHEMES,
    UNSUPPORTED_SERDES,
    Settings,
)
from lmcache.v1.errors import ConfigError, UnsupportedFeatureError

_UPSTREAM_HAS_IT = "this package does not have it; upstream LMCache does"


def check_value(spec: FieldSpec, value: Any, label: str) -> None:
    """Refuse a value that is out of range, unknown, or asks for a feature this package lacks.

    Args:
        spec: The setting.
        value: A value of its declared type.
        label: How the user knows the setting.

    Raises:
        UnsupportedFeatureError: The value would change behaviour, through a lacking feature.
        ConfigError: The value itself is out of range or unknown.
    """
    if value is None:
        return
    rules = spec.rules
    if rules.feature and value not in rules.inert:
        raise _lacking(label, value, rules.feature)
    if not rules.part_of:
        _check_numbers(rules, value, label)
    _check_choice(rules, value, label)
    if spec.name == "remote_serde" and value in UNSUPPORTED_SERDES:
        raise _lacking(label, value, f"the {value} serializer")
    if spec.name == "remote_url":
        _check_remote_scheme(value, label)
    if spec.name == "extra_config":
        _check_extra_config(value, label)


def find_ignored(settings: Settings) -> list[tuple[str, object, str]]:
    """Return (name, value, why) for settings that ask for something and are ignored."""
    ignored = []
    for spec in FIELDS.values():
        value = vars(settings)[spec.name]
        if spec.rules.ignored_because and value not in spec.rules.inert:
            ignored.append((spec.name, value, spec.rules.ignored_because))
    return ignored


def check_together(settings: Settings) -> None:
    """Refuse settings that contradict one another.

    Raises:
        ConfigError: Names both settings, their values and the remedy.
    """
    if settings.local_disk and settings.max_local_disk_size <= 0:
        raise ConfigError(
            f"local_disk={settings.local_disk!r} has no budget: max_local_disk_size="
            f"{settings.max_local_disk_size}; set max_local_disk_size (GiB) above 0 or unset "
            "local_disk"
        )
    if settings.max_local_disk_size > 0 and not settings.local_disk:
        raise ConfigError(
            f"max_local_disk_size={settings.max_local_disk_size} GiB has no directory: set "
            "local_disk or max_local_disk_size=0"
        )
    has_lower_tier = settings.local_disk or settings.remote_url or settings.remote_storage_plugins
    if has_lower_tier and settings.max_local_cpu_size <= 0:
        raise ConfigError(
            f"max_local_cpu_size={settings.max_local_cpu_size}, but the disk and remote tiers "
            "read and write through the CPU pool; set max_local_cpu_size (GiB) above 0"
        )


def _check_numbers(rules: Knob, value: Any, label: str) -> None:
    numbers = value if isinstance(value, list) else [value]
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            return
        if not rules.is_unbounded and not math.isfinite(number):
            raise ConfigError(f"{label}={value!r} must be finite")
        if rules.is_above_zero and number <= 0:
            raise ConfigError(f"{label}={value!r} must be above 0{_unit_hint(rules)}")
        if rules.minimum is not None and number < rules.minimum:
            raise ConfigError(
                f"{label}={value!r} must be at least {rules.minimum:g}{_unit_hint(rules)}"
            )


def _unit_hint(rules: Knob) -> str:
    return f" ({rules.unit})" if rules.unit else ""


def _check_choice(rules: Knob, value: Any, label: str) -> None:
    if not rules.choices:
        return
    wanted = value.upper() if rules.ignores_case else value
    if wanted not in rules.choices:
        raise ConfigError(f"{label}={value!r} is unknown; use one of {', '.join(rules.choices)}")


def _check_remote_scheme(url: str, label: str) -> None:
    scheme, separator, _ = url.partition("://")
    if not separator:
        raise ConfigError(f"{label}={url!r} has no scheme; write scheme://host:port[/path]")
    if scheme.lower() in UNSUPPORTED_REMOTE_SCHEMES:
        raise _lacking(label, url, f"the remote store {scheme}://")


def _check_extra_config(extra: Mapping[str, Any], label: str) -> None:
    for key, feature in UNSUPPORTED_EXTRA_KEYS.items():
        if extra.get(key):
            raise _lacking(f"{label}[{key!r}]", extra[key], feature)


def _lacking(label: str, value: object, feature: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(
        f"{label}={value!r} asks for {feature}: {_UPSTREAM_HAS_IT}. Unset it to go on without."
    )
