"""Facts of the machine a figure was measured on, printed and written beside every figure."""

import os
import platform
from pathlib import Path

import psutil
import torch

_CPU_INFO = Path("/proc/cpuinfo")


def machine_facts() -> dict[str, str | int | float]:
    """Return what a reader needs to judge a figure: CPU, cores, memory, operating system, versions.

    `num_cores` counts the cores this process may run on; `memory_gib` is the machine's whole
    memory.
    """
    return {
        "cpu_model": _cpu_model(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def machine_line(facts: dict[str, str | int | float]) -> str:
    """Return the facts as one line for a header."""
    return (
        f"{facts['cpu_model']}, {facts['num_cores']} cores, {facts['memory_gib']} GiB, "
        f"{facts['system']}, Python {facts['python']}, torch {facts['torch']}"
    )


def _cpu_model() -> str:
    if _CPU_INFO.is_file():
        for line in _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or "unknown"
