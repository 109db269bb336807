"""Facts of the machine a figure was measured on, printed and written beside every figure."""

import os
import platform
import tempfile
from pathlib import Path

import psutil
import torch

_CPU_INFO = Path("/proc/cpuinfo")


def machine_facts() -> dict[str, str | int | float]:
    """Return what a reader needs to judge a figure: CPU, cores, memory, operating system, versions.

    `num_cores` counts the cores this process may run on; `memory_gib` is the machine's whole
    memory; `file_system` is the one of temporary files, with what it was mounted with.
    """
    return {
        "cpu_model": _cpu_model(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "file_system": _file_system(Path(tempfile.gettempdir())),
    }


def machine_line(facts: dict[str, str | int | float]) -> str:
    """Return the facts as one line for a header."""
    return (
        f"{facts['cpu_model']}, {facts['num_cores']} cores, {facts['memory_gib']} GiB, "
        f"{facts['system']}, Python {facts['python']}, torch {facts['torch']}, "
        f"{facts['file_system']}"
    )


def _cpu_model() -> str:
    if _CPU_INFO.is_file():
        for line in _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or "unknown"


def _file_system(path: Path) -> str:
    """Return type and mount options of the file system that a directory is on."""
    mounts = {Path(part.mountpoint): part for part in psutil.disk_partitions(all=True)}
    for directory in (path.resolve(), *path.resolve().parents):
        if directory in mounts:
            return f"{mounts[directory].fstype} ({mounts[directory].opts})"
    return "unknown"
