"""Settings of the disk tier, and processes that end or fork with it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from builders import allocate, keys, make_config, make_metadata
from disk_builders import (
    disk_of,
    disk_settings,
    small_file_system,
)

from lmcache.v1.errors import ConfigError
from lmcache.v1.storage_backend.storage_manager import StorageManager

TESTS = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"local_disk": "/tmp/x"}, "max_local_disk_size"),
        ({"max_local_disk_size": 1.0}, "local_disk"),
        ({"local_disk": " , ", "max_local_disk_size": 1.0}, "local_disk"),
        ({"local_disk": "/proc/nowhere", "max_local_disk_size": 1.0}, "/proc/nowhere"),
        ({"local_disk": __file__, "max_local_disk_size": 1.0}, "test_disk_settings"),
        (
            {"local_disk": "/tmp", "max_local_disk_size": 1.0, "max_local_cpu_size": 0},
            "max_local_cpu_size",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_setting_that_cannot_be_used_is_refused_at_start(settings, named):
    with pytest.raises(ConfigError, match=named):
        StorageManager(make_config(**settings), make_metadata())


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"use_odirect": "perhaps"}, "use_odirect"),
        ({"disk_io_threads": 0}, "disk_io_threads"),
        ({"disk_io_threads": True}, "disk_io_threads"),
        ({"disk_io_threads": 1000}, "disk_io_threads"),
    ],
    ids=str,
)
def test_an_extra_setting_that_cannot_be_used_is_refused_at_start(tmp_path, extra, named):
    with pytest.raises(ConfigError, match=named):
        StorageManager(make_config(**disk_settings(tmp_path, **extra)), make_metadata())


def test_a_directory_that_is_not_writable_names_it_and_the_remedy(tmp_path):
    with small_file_system(2**20) as directory:
        subprocess.run(["mount", "-o", "remount,ro", directory], check=True)

        with pytest.raises(ConfigError, match="may write") as refused:
            StorageManager(make_config(**disk_settings(directory)), make_metadata())

        assert directory in str(refused.value)


def test_an_object_that_is_not_on_the_host_is_refused(make_disk, monkeypatch):
    sm = make_disk()
    obj = allocate(sm)
    monkeypatch.setattr(type(obj), "is_on_host", False)

    with pytest.raises(ValueError, match="host memory"):
        disk_of(sm).batched_submit_put_task(keys(1), [obj])

    obj.ref_count_down()


def run_script(script, directory):
    """Run a script in a process of its own, with the tests' modules at hand."""
    return subprocess.run(
        [sys.executable, "-c", script, str(directory)],
        cwd=TESTS.parent,
        env={**os.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS}"},
        timeout=60,
        capture_output=True,
        text=True,
    )


UNCLOSED = """
import sys
from builders import keys, make_config, make_metadata, put
from disk_builders import DISK, disk_settings
from lmcache.v1.storage_backend.storage_manager import StorageManager
sm = StorageManager(make_config(**disk_settings(sys.argv[1])), make_metadata())
for key in keys(4):
    put(sm, key)
print("end", flush=True)
"""


def test_a_process_that_never_closed_its_tier_ends(tmp_path):
    ran = run_script(UNCLOSED, tmp_path)

    assert (ran.returncode, ran.stdout) == (0, "end\n"), ran.stderr


FORKED = """
import os, sys
from builders import keys, make_config, make_metadata, put
from disk_builders import DISK, disk_of, disk_settings, files_of, read
from lmcache.v1.storage_backend.storage_manager import StorageManager
sm = StorageManager(make_config(**disk_settings(sys.argv[1])), make_metadata())
put(sm, keys(1)[0], location=DISK)
sm.drain()
child = os.fork()
if child == 0:
    put(sm, keys(1, first=2)[0], location=DISK)
    sm.drain()
    good = read(sm, keys(1)[0]) and sm.contains(keys(1, first=2)[0]) is None
    sm.close()
    os._exit(0 if good else 1)
_, status = os.waitpid(child, 0)
put(sm, keys(1, first=3)[0], location=DISK)
sm.drain()
print(os.waitstatus_to_exitcode(status), len(files_of(sm)), flush=True)
"""


def test_the_child_of_a_fork_may_read_and_stores_nothing(tmp_path):
    ran = run_script(FORKED, tmp_path)

    assert (ran.returncode, ran.stdout) == (0, "0 2\n"), ran.stderr
