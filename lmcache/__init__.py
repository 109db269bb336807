"""In-process KV-cache engine, interface-compatible with LMCache 0.5.6.

Importing this package opens no device, starts no thread and reads no setting. `torch_dev` (the
`torch.cuda` module where a GPU is usable, ROCm included, else `torch.cpu`) and
`torch_device_type` ("cuda" or "cpu") are looked up when they are first asked for.
"""

import importlib
from types import ModuleType

__version__ = "0.5.6+touch.1"

# Not listed: the lazy attributes, because a star import would look them up and so import torch.
__all__ = ["__version__"]

torch_dev: ModuleType
torch_device_type: str


def __getattr__(name: str) -> object:
    if name not in ("torch_dev", "torch_device_type"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    torch = importlib.import_module("torch")
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device_attributes = {
        "torch_dev": torch.cuda if kind == "cuda" else torch.cpu,
        "torch_device_type": kind,
    }
    globals().update(device_attributes)
    return device_attributes[name]
