"""The named sets of tiers that `LMCacheEngineConfig.from_legacy` knows, as data."""

from collections.abc import Mapping

from lmcache.logging import init_logger
from lmcache.v1.errors import ConfigError

logger = init_logger(__name__)

_DISK_DIRECTORY = "local/disk_test/local_disk/"
_NO_DISK: dict[str, object] = {"local_disk": None}
_PRESETS: dict[str, dict[str, object]] = {
    "cpu": {
        "local_cpu": True,
        "max_local_cpu_size": 2.0,
        "local_disk": None,
        "max_local_disk_size": 0.0,
        "remote_url": None,
    },
    "local_disk": {
        "local_cpu": False,
        "max_local_cpu_size": 3.0,
        "local_disk": _DISK_DIRECTORY,
        "max_local_disk_size": 2.0,
        "remote_url": None,
    },
    "local_cpu_disk": {
        "local_cpu": True,
        "max_local_cpu_size": 2.0,
        "local_disk": _DISK_DIRECTORY,
        "max_local_disk_size": 5.0,
        "remote_url": None,
    },
    "remote": {"local_cpu": False, "max_local_cpu_size": 2.0, **_NO_DISK},
    "local_cpu_remote": {"local_cpu": True, "max_local_cpu_size": 2.0, **_NO_DISK},
    "local_disk_remote": {
        "local_cpu": False,
        "max_local_cpu_size": 2.0,
        "local_disk": _DISK_DIRECTORY,
        "max_local_disk_size": 5.0,
    },
    "local_cpu_disk_remote": {
        "local_cpu": True,
        "max_local_cpu_size": 2.0,
        "local_disk": _DISK_DIRECTORY,
        "max_local_disk_size": 5.0,
    },
}


def legacy_settings(backend: str, settings: Mapping[str, object]) -> dict[str, object]:
    """Return `settings` overlaid by what `backend` stands for.

    Raises:
        ConfigError: `backend` is none of the known names.
    """
    if backend not in _PRESETS:
        raise ConfigError(f"backend={backend!r} is unknown; use one of {', '.join(_PRESETS)}")
    preset = _PRESETS[backend]
    for name in settings.keys() & preset.keys():
        if settings[name] != preset[name]:
            logger.warning(
                "%s=%r is ignored: backend=%r sets it to %r",
                name,
                settings[name],
                backend,
                preset[name],
            )
    return {**settings, **preset}
