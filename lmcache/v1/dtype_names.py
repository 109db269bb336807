"""The names that dtypes have in key strings."""

from types import MappingProxyType

import torch

DTYPE_TO_NAME = MappingProxyType(
    {
        torch.half: "half",
        torch.bfloat16: "bfloat16",
        torch.float: "float",
        torch.double: "double",
        torch.int8: "int8",
        torch.uint8: "uint8",
        torch.int16: "int16",
        torch.int32: "int32",
        torch.int64: "int64",
        torch.bool: "bool",
        torch.float8_e4m3fn: "fp8_e4m3fn",
        torch.float8_e4m3fnuz: "fp8_e4m3fnuz",
        torch.float8_e5m2: "fp8_e5m2",
        torch.float8_e5m2fnuz: "fp8_e5m2fnuz",
    }
)
NAME_TO_DTYPE = MappingProxyType({name: dtype for dtype, name in DTYPE_TO_NAME.items()})


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of `dtype` in key strings; ValueError when it has none."""
    try:
        return DTYPE_TO_NAME[dtype]
    except (KeyError, TypeError):
        raise ValueError(
            f"dtype {dtype!r} has no name in cache keys; use one of "
            + ", ".join(str(known) for known in DTYPE_TO_NAME)
        ) from None
