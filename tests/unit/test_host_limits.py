"""Pools are sized per rank; together they must fit into the host (H29)."""

import pytest

from lmcache.v1.errors import HostMemoryError
from lmcache.v1.host_limits import (
    GIB,
    HostLimit,
    check_pool_fits,
    read_cgroup_limits,
    read_host_limit,
)


def host_of(num_gib):
    return lambda: HostLimit(num_gib * GIB, "physical memory")


def test_a_pool_per_rank_that_fits_only_once_is_refused_with_all_figures():
    with pytest.raises(HostMemoryError) as caught:
        check_pool_fits(50, local_world_size=8, read_limit=host_of(256))

    message = str(caught.value)
    assert "max_local_cpu_size=50 GiB per rank x 8 ranks = 400 GiB" in message
    assert "256.0 GiB (physical memory)" in message
    assert "below 32.0 GiB" in message


def test_pools_that_fill_the_host_exactly_are_accepted():
    check_pool_fits(32, local_world_size=8, read_limit=host_of(256))


def test_a_reserve_is_left_to_the_host():
    with pytest.raises(HostMemoryError, match="reserve_local_cpu_size=1 GiB"):
        check_pool_fits(32, local_world_size=8, reserve_gib=1, read_limit=host_of(256))


def test_the_limit_read_from_this_machine_is_positive_and_says_its_source():
    limit = read_host_limit()

    assert limit.num_bytes > 0
    assert limit.source


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_limits_of_all_groups_above_count_in_version_2(tmp_path):
    own = tmp_path / "own"
    write(own, "0::/slice/pod\n")
    root = tmp_path / "cgroup"
    write(root / "slice/pod/memory.max", "max\n")
    write(root / "slice/memory.max", f"{3 * GIB}\n")
    write(root / "memory.max", f"{9 * GIB}\n")

    limits = read_cgroup_limits(own, root)

    assert [limit.num_bytes for limit in limits] == [3 * GIB, 9 * GIB]
    assert str(root / "slice/memory.max") in limits[0].source


def test_the_limit_of_the_memory_hierarchy_counts_in_version_1(tmp_path):
    own = tmp_path / "own"
    write(own, "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n1:name=systemd:/x\n")
    root = tmp_path / "cgroup"
    write(root / "memory/docker/abc/memory.limit_in_bytes", f"{2 * GIB}\n")

    assert [limit.num_bytes for limit in read_cgroup_limits(own, root)] == [2 * GIB]


def test_a_group_named_as_the_host_sees_it_falls_back_to_the_mount_point(tmp_path):
    own = tmp_path / "own"
    write(own, "0::/kubepods/not/mounted/here\n")
    root = tmp_path / "cgroup"
    write(root / "memory.max", f"{GIB}\n")

    assert [limit.num_bytes for limit in read_cgroup_limits(own, root)] == [GIB]


def test_a_machine_without_control_groups_has_no_such_limit(tmp_path):
    assert read_cgroup_limits(tmp_path / "absent", tmp_path) == []
