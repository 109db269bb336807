"""What the config says of the disk tier."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache.v1.errors import ConfigError
from lmcache.v1.storage_backend.disk.chunk_directory import split_paths

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata

_DIRECT_SETTING = "use_odirect"
_THREADS_SETTING = "disk_io_threads"
_DEFAULT_THREADS = 4
_MAX_THREADS = 64


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """The disk tier's settings for one worker.

    Attributes:
        root: The directory of `local_disk` that this worker uses: one after the other by its number
            on the host.
        model_name, world_size, rank: Whose chunks they are.
        capacity_bytes: The budget, of files.
        is_direct: Whether to bypass the page cache.
        num_threads: Of one batch of reads or writes.
    """

    root: str
    model_name: str
    world_size: int
    rank: int
    capacity_bytes: int
    is_direct: bool
    num_threads: int

    def __str__(self) -> str:
        way = "with O_DIRECT" if self.is_direct else "through the page cache"
        return f"{self.capacity_bytes / 2**30:.4g} GiB {way}, {self.num_threads} threads"


def read_disk_settings(
    config: "LMCacheEngineConfig", metadata: "LMCacheMetadata | None"
) -> DiskSettings:
    """Return the settings.

    Raises:
        ConfigError: There is no directory or no budget, or an extra setting cannot be used.
    """
    if not config.local_disk or config.max_local_disk_size <= 0:
        raise ConfigError(
            f"local_disk={config.local_disk!r} with max_local_disk_size="
            f"{config.max_local_disk_size}: the disk tier needs a directory and a size in GiB"
        )
    is_direct = config.get_extra_config_value(_DIRECT_SETTING, False)
    if not isinstance(is_direct, bool):
        raise ConfigError(f"extra_config {_DIRECT_SETTING}={is_direct!r} must be true or false")
    num_threads = config.get_extra_config_value(_THREADS_SETTING, _DEFAULT_THREADS)
    if type(num_threads) is not int or not 1 <= num_threads <= _MAX_THREADS:
        raise ConfigError(
            f"extra_config {_THREADS_SETTING}={num_threads!r} must be 1 to {_MAX_THREADS}"
        )
    roots = split_paths(config.local_disk)
    return DiskSettings(
        root=roots[0 if metadata is None else metadata.local_worker_id % len(roots)],
        model_name="model" if metadata is None else metadata.model_name,
        world_size=1 if metadata is None else metadata.world_size,
        rank=0 if metadata is None else metadata.worker_id,
        capacity_bytes=int(config.max_local_disk_size * 2**30),
        is_direct=is_direct,
        num_threads=num_threads,
    )
