"""How much memory this host allows, and whether the CPU pools of its ranks fit into it.

A pool is sized per rank, so "50 GB" means 50 GB times the ranks of the host; taken on trust, that
ends in an out-of-memory kill without a log line.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from lmcache.v1.errors import HostMemoryError

GIB = 1024**3
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class HostLimit:
    """The most memory that the processes of this host may use.

    Attributes:
        num_bytes: The limit.
        source: What sets it, for messages.
    """

    num_bytes: int
    source: str


def read_host_limit() -> HostLimit:
    """Return the smaller of physical memory and the memory limits of our control groups."""
    physical = HostLimit(psutil.virtual_memory().total, "physical memory")
    return min(
        [physical, *read_cgroup_limits(_OWN_CGROUPS, _CGROUP_ROOT)],
        key=lambda limit: limit.num_bytes,
    )


def read_cgroup_limits(own_cgroups: Path, root: Path) -> list[HostLimit]:
    """Return the memory limits of a process's control group and of every group above it.

    Args:
        own_cgroups: Lists the groups of the process, as /proc/self/cgroup does.
        root: Where the hierarchies are mounted, as /sys/fs/cgroup.

    Returns:
        Empty where no limit is set or no control group is mounted.
    """
    try:
        lines = own_cgroups.read_text().splitlines()
    except OSError:
        return []
    limits: list[HostLimit] = []
    for line in lines:
        _, _, controllers_and_path = line.partition(":")
        controllers, _, group = controllers_and_path.partition(":")
        if controllers == "":
            limits += _limits_upwards(root, group, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits_upwards(root / "memory", group, "memory.limit_in_bytes")
    return limits


def check_pool_fits(
    pool_gib_per_rank: float,
    local_world_size: int,
    reserve_gib: float = 0.0,
    read_limit: Callable[[], HostLimit] = read_host_limit,
) -> None:
    """Refuse a CPU pool that the ranks of this host cannot all have.

    Args:
        pool_gib_per_rank: Size of one rank's pool (`max_local_cpu_size`), GiB.
        local_world_size: Ranks on this host, each with a pool of its own.
        reserve_gib: Memory to leave to the rest of the host (`reserve_local_cpu_size`), GiB.
        read_limit: Gives the host's limit.

    Raises:
        HostMemoryError: Names the size per rank, the total, the host's limit and the remedy.
    """
    limit = read_limit()
    total_gib = pool_gib_per_rank * local_world_size
    limit_gib = limit.num_bytes / GIB
    if total_gib + reserve_gib <= limit_gib:
        return
    fitting_gib = max(0.0, (limit_gib - reserve_gib) / local_world_size)
    reserve = f" and reserve_local_cpu_size={reserve_gib:g} GiB" if reserve_gib else ""
    raise HostMemoryError(
        f"max_local_cpu_size={pool_gib_per_rank:g} GiB per rank x {local_world_size} ranks = "
        f"{total_gib:g} GiB{reserve} do not fit into this host's {limit_gib:.1f} GiB "
        f"({limit.source}); set max_local_cpu_size below {fitting_gib:.1f} GiB"
    )


def _limits_upwards(hierarchy: Path, group: str, file_name: str) -> Iterator[HostLimit]:
    # Inside a container the group may be named as the host sees it, which is not mounted here;
    # the walk then finds only the mount point, which is the container's own group.
    directory = hierarchy / group.lstrip("/")
    for candidate in [directory, *directory.parents]:
        if not candidate.is_relative_to(hierarchy):
            break
        try:
            text = (candidate / file_name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            yield HostLimit(int(text), f"control group limit {candidate / file_name}")
