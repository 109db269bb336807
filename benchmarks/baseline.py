"""PyPI's `lmcache==0.5.6` in a virtual environment of its own, to be measured beside this fork."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
VENV = Path(os.environ.get("BASELINE_VENV", ROOT / ".venv-lmcache-0.5.6"))
# What 0.5.6 imports in process on a CPU; its own metadata names CUDA-only packages.
PACKAGES = """
    numpy<=2.2.6 numba requests transformers>=5.4 cryptography msgspec blake3 pyyaml pyzmq
    sortedcontainers psutil aiofiles aiofile prometheus_client<=0.24.1 nvtx safetensors cachetools
    redis py-cpuinfo httpx aiohttp fastapi opentelemetry-api<=1.40.0 opentelemetry-sdk
""".split()  # noqa: SIM905 (a list of one line a word would be longer than the file)


def baseline_python() -> Path:
    """Return the interpreter of the baseline, installing it on the first call."""
    python = VENV / "bin" / "python"
    marker = VENV / ".complete"
    if marker.exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "torch==2.13.0"], check=True)
    subprocess.run([*pip, "--no-deps", "lmcache==0.5.6"], check=True)
    subprocess.run([*pip, *PACKAGES], check=True)
    marker.touch()
    return python
