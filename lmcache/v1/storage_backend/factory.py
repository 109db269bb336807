"""Config -> tiers in search order: the one file that knows every backend."""

import asyncio
import importlib
from collections import OrderedDict
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from lmcache.logging import init_logger
from lmcache.v1.config_checks import check_together
from lmcache.v1.errors import ConfigError, UnsupportedFeatureError
from lmcache.v1.storage_backend.abstract_backend import (
    StorageBackendInterface,
    StoragePluginInterface,
)
from lmcache.v1.storage_backend.local_cpu_backend import NAME as LOCAL_CPU
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import NAME as LOCAL_DISK
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata

logger = init_logger(__name__)

Backends = OrderedDict[str, StorageBackendInterface]
_PLUGIN_PREFIX = "storage_plugin"


def CreateStorageBackends(  # noqa: N802 (the name that callers import)
    config: "LMCacheEngineConfig",
    metadata: "LMCacheMetadata",
    loop: asyncio.AbstractEventLoop | None,
    dst_device: str = "cpu",
    lmcache_worker: object = None,
    skip_backends: AbstractSet[str] | None = None,
    existing_backends: Backends | None = None,
) -> Backends:
    """Make the tiers that the config asks for, in search order.

    Args:
        config, metadata: The engine's. Role "scheduler" gets no CPU tier.
        loop: For plug-ins.
        dst_device: Device that `get` results are for.
        lmcache_worker: Accepted for callers of 0.5.6.
        skip_backends: Names to leave out.
        existing_backends: Tiers to keep as they are.

    Raises:
        ConfigError: A setting that cannot be used, or a plug-in that cannot be loaded.
    """
    _refuse_missing_tiers(config)
    if _wants_disk(config):
        check_together(config)
    skip = skip_backends or frozenset()
    kept = existing_backends or OrderedDict()
    backends: Backends = OrderedDict()
    if LOCAL_CPU in kept:
        backends[LOCAL_CPU] = kept[LOCAL_CPU]
    elif LOCAL_CPU not in skip and config.max_local_cpu_size > 0 and metadata.role != "scheduler":
        backends[LOCAL_CPU] = LocalCPUBackend(config, metadata, dst_device, lmcache_worker)
    cpu = backends.get(LOCAL_CPU)
    if LOCAL_DISK in kept:
        backends[LOCAL_DISK] = kept[LOCAL_DISK]
    elif LOCAL_DISK not in skip and _wants_disk(config) and isinstance(cpu, LocalCPUBackend):
        backends[LOCAL_DISK] = LocalDiskBackend(
            config, loop, cpu, dst_device, lmcache_worker, metadata
        )
    for name in config.storage_plugins or ():
        if name in kept:
            backends[name] = kept[name]
        elif name not in skip:
            backends[name] = _load_plugin(
                name,
                config,
                metadata,
                loop,
                dst_device,
                cpu if isinstance(cpu, LocalCPUBackend) else None,
            )
    return backends


def _wants_disk(config: "LMCacheEngineConfig") -> bool:
    return bool(config.local_disk) or config.max_local_disk_size > 0


def _refuse_missing_tiers(config: "LMCacheEngineConfig") -> None:
    wanted = {
        "remote_url": config.remote_url,
        "remote_storage_plugins": config.remote_storage_plugins or None,
    }
    for name, value in wanted.items():
        if value is not None:
            raise UnsupportedFeatureError(
                f"{name}={value!r}: this version has the CPU tier, the disk tier and storage "
                "plug-ins only; unset it, or use upstream LMCache"
            )


def _load_plugin(
    name: str,
    config: "LMCacheEngineConfig",
    metadata: "LMCacheMetadata",
    loop: asyncio.AbstractEventLoop | None,
    dst_device: str,
    local_cpu_backend: LocalCPUBackend | None,
) -> StorageBackendInterface:
    settings = {}
    for setting in ("module_path", "class_name"):
        full_name = f"{_PLUGIN_PREFIX}.{name}.{setting}"
        settings[setting] = config.get_extra_config_value(full_name, None)
        if not settings[setting]:
            raise ConfigError(f"storage plug-in {name!r} needs extra_config {full_name!r}")
    try:
        plugin_class = vars(importlib.import_module(settings["module_path"]))[
            settings["class_name"]
        ]
    except (ImportError, KeyError) as error:
        raise ConfigError(
            f"storage plug-in {name!r}: cannot load {settings['class_name']} from "
            f"{settings['module_path']}: {error!r}"
        ) from error
    if not issubclass(plugin_class, StoragePluginInterface):
        raise ConfigError(
            f"storage plug-in {name!r}: {plugin_class.__name__} is no StoragePluginInterface"
        )
    plugin: StoragePluginInterface = plugin_class(
        dst_device=dst_device,
        config=config,
        metadata=metadata,
        local_cpu_backend=local_cpu_backend,
        loop=loop,
    )
    return plugin
