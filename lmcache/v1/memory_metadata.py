"""What a memory object says of itself: shapes, dtypes, layout, sizes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lmcache.v1.memory_format import MemoryFormat


@dataclass(frozen=True, slots=True)
class MemorySpec:
    """What all objects of one shape share: shapes and dtypes per group, format, where they live."""

    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    fmt: MemoryFormat
    size_bytes: int
    buffer: torch.Tensor | None = None  # [pool bytes], uint8; None: each object has its own
    address_unit_bytes: int = 1

    def same_contents_shape(self, other: "MemorySpec") -> bool:
        """Whether both describe equally many bytes of the same dtypes."""
        return self.size_bytes == other.size_bytes and self.dtypes == other.dtypes


def as_groups(
    shapes: torch.Size | Sequence[torch.Size], dtypes: torch.dtype | Sequence[torch.dtype]
) -> tuple[tuple[torch.Size, ...], tuple[torch.dtype, ...]]:
    """Return shapes and dtypes as equally long tuples, one item per layer group.

    Raises:
        TypeError: A shape or dtype of the wrong type.
        ValueError: Unequal numbers, no group at all, or a negative size.
    """
    shape_list = [shapes] if isinstance(shapes, torch.Size) else list(shapes)
    if shape_list and isinstance(shape_list[0], int):
        shape_list = [shape_list]
    dtype_list = [dtypes] if isinstance(dtypes, torch.dtype) else list(dtypes)
    if not shape_list or len(shape_list) != len(dtype_list):
        raise ValueError(f"{len(shape_list)} shapes do not go with {len(dtype_list)} dtypes")
    for dtype in dtype_list:
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, not {dtype!r}")
    for shape in shape_list:
        if any(size < 0 for size in shape):
            raise ValueError(f"shape {tuple(shape)} has a negative size")
    return tuple(torch.Size(shape) for shape in shape_list), tuple(dtype_list)


def size_of(shapes: Sequence[torch.Size], dtypes: Sequence[torch.dtype]) -> int:
    """Return the bytes that consecutive groups take."""
    return sum(
        math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)
    )


@dataclass(slots=True)
class MemoryObjMetadata:
    """What a memory object says of itself.

    The two counts are those at the time the object was asked for its metadata.
    """

    shape: torch.Size
    dtype: torch.dtype | None
    address: int
    phy_size: int
    ref_count: int
    pin_count: int = 0
    fmt: MemoryFormat = MemoryFormat.UNDEFINED
    cached_positions: torch.Tensor | None = None
    shapes: list[torch.Size] | None = None
    dtypes: list[torch.dtype] | None = None

    def get_size(self) -> int:
        """Return the logical size in bytes; 0 without a dtype."""
        if self.shapes is not None and self.dtypes is not None:
            return size_of(self.shapes, self.dtypes)
        return size_of([self.shape], [self.dtype]) if self.dtype is not None else 0

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able form; pins and positions are not kept."""
        return {
            "__type__": "MemoryObjMetadata",
            "shape": list(self.shape),
            "dtype": str(self.dtype) if self.dtype is not None else None,
            "address": self.address,
            "phy_size": self.phy_size,
            "ref_count": self.ref_count,
            "fmt": self.fmt.value,
            "shapes": [list(shape) for shape in self.shapes] if self.shapes else None,
            "dtypes": [str(dtype) for dtype in self.dtypes] if self.dtypes else None,
        }

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> "MemoryObjMetadata":
        """Rebuild from `to_dict`'s form; ValueError for a dtype that torch lacks."""
        shapes, dtypes = fields.get("shapes"), fields.get("dtypes")
        return MemoryObjMetadata(
            torch.Size(fields["shape"]),
            _dtype_from(fields["dtype"]) if fields["dtype"] else None,
            fields["address"],
            fields["phy_size"],
            fields["ref_count"],
            fmt=MemoryFormat(fields["fmt"]),
            shapes=[torch.Size(shape) for shape in shapes] if shapes else None,
            dtypes=[_dtype_from(name) for name in dtypes] if dtypes else None,
        )


def _dtype_from(name: str) -> torch.dtype:
    dtype = vars(torch).get(name.removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not the name of a torch dtype")
    return dtype
