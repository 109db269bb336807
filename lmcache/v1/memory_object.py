"""Memory objects: one chunk's bytes, who refers to them, and what they hold.

    state    meaning                                        who may leave it
    live     a reference or a pin is left                   ref_count_down, unpin
    cached   live, and a hot cache lists it                 eviction, remove, clear
    held     cached, with a pin or a reader's reference     the last unpin or ref_count_down
    freed    the bytes went back to their pool; no tensor   nobody

The counts are native and guarded by the pool's own lock, which is taken last and never held while
Python code runs: every method here may be called from anywhere, a finaliser included.
"""

import ctypes
from typing import Any, Protocol

import torch

from lmcache.v1.memory_format import MemoryFormat
from lmcache.v1.memory_metadata import MemoryObjMetadata, MemorySpec, size_of
from lmcache.v1.native import Block, Pool, call_each

# Home of the counts of objects whose bytes belong to no pool of ours.
FOREIGN_POOL = Pool(0)


class FreesMemory(Protocol):
    """An allocator that wants to hear when an object of its own is freed."""

    def free(self, memory_obj: Any, allocator_type: str | None = None) -> None:
        """Take the bytes back."""
        ...


class MemoryObj(Block):
    """The contract of memory objects, and what needs only counts and metadata.

    `allocate` hands out one reference, owned by the caller. When the last reference and the last
    pin are gone the bytes are free. `can_evict` means that the only reference is a cache's.
    """

    __slots__ = ()

    def __init__(self, metadata: MemoryObjMetadata) -> None:
        super().__init__(
            FOREIGN_POOL,
            metadata.phy_size,
            None,
            None,
            None,
            metadata.ref_count,
            metadata.pin_count,
        )
        self._metadata = metadata
        self._logical_bytes = metadata.get_size()

    @property
    def metadata(self) -> MemoryObjMetadata:
        """The object's metadata, with its present counts."""
        metadata: MemoryObjMetadata | None = self._metadata
        if metadata is None:
            metadata = self._metadata = self._make_metadata()
        metadata.ref_count = self.get_ref_count()
        metadata.pin_count = self.pin_count
        return metadata

    @property
    def meta(self) -> MemoryObjMetadata:
        """Another name of `metadata`."""
        return self.metadata

    def _make_metadata(self) -> MemoryObjMetadata:
        spec: MemorySpec = self._spec
        return MemoryObjMetadata(
            shape=spec.shapes[0],
            dtype=spec.dtypes[0],
            address=self._offset // spec.address_unit_bytes,
            phy_size=self._size_bytes,
            ref_count=1,
            fmt=spec.fmt,
            shapes=list(spec.shapes) if len(spec.shapes) > 1 else None,
            dtypes=list(spec.dtypes) if len(spec.dtypes) > 1 else None,
        )

    def is_valid(self) -> bool:
        """Whether the bytes are still the object's own."""
        return not self._freed

    def get_size(self) -> int:
        """Return the logical size in bytes."""
        metadata: MemoryObjMetadata | None = self._metadata
        if metadata is not None:
            return metadata.get_size()
        spec: MemorySpec = self._spec
        return spec.size_bytes

    def get_physical_size(self) -> int:
        """Return the bytes taken from the pool."""
        return self._size_bytes

    def get_shape(self) -> torch.Size:
        """Return the shape of the first group."""
        return self.metadata.shape

    def get_dtype(self) -> torch.dtype | None:
        """Return the dtype of the first group."""
        return self.metadata.dtype

    def get_shapes(self) -> list[torch.Size]:
        """Return the shape of each group."""
        metadata = self.metadata
        return [metadata.shape] if metadata.shapes is None else metadata.shapes

    def get_dtypes(self) -> list[torch.dtype]:
        """Return the dtype of each group."""
        metadata = self.metadata
        if metadata.dtypes is not None:
            return metadata.dtypes
        return [] if metadata.dtype is None else [metadata.dtype]

    def get_memory_format(self) -> MemoryFormat:
        """Return the layout."""
        metadata: MemoryObjMetadata | None = self._metadata
        if metadata is not None:
            return metadata.fmt
        spec: MemorySpec = self._spec
        return spec.fmt

    def get_layout(
        self,
    ) -> tuple[tuple[torch.Size, ...], tuple[torch.dtype, ...], MemoryFormat]:
        """Return the shape and dtype of each group, and the format; makes no metadata."""
        if self._metadata is None:
            spec: MemorySpec = self._spec
            return spec.shapes, spec.dtypes, spec.fmt
        return tuple(self.get_shapes()), tuple(self.get_dtypes()), self.get_memory_format()

    def is_laid_out_as(self, shape: torch.Size, dtype: torch.dtype, fmt: MemoryFormat) -> bool:
        """Whether the contents are one group of this shape, dtype and format."""
        if self._metadata is None:
            spec: MemorySpec = self._spec
            return spec.fmt is fmt and spec.dtypes == (dtype,) and spec.shapes == (shape,)
        return (
            self.get_memory_format() is fmt
            and self.get_dtypes() == [dtype]
            and self.get_shapes() == [shape]
        )

    @property
    def tensor(self) -> torch.Tensor | None:
        """The first group in its shape and dtype; None when freed."""
        raise NotImplementedError

    @property
    def data_ptr(self) -> int:
        """Address of the first byte; an object without memory of its own has none."""
        raise NotImplementedError

    @property
    def is_on_host(self) -> bool:
        """Whether the bytes are in host memory."""
        raise NotImplementedError

    def get_num_tokens(self) -> int:
        """Return the length of the token axis (bytes for binary formats)."""
        shape = self.get_shape()
        axis = self.get_memory_format().token_axis
        return shape[axis] if axis < len(shape) else shape[-1] if shape else 0

    def set_used_size(self, n: int) -> None:
        """Declare that only the first `n` bytes are used: a flat uint8 object from now on.

        Raises:
            ValueError: `n` is negative or more than the physical size.
        """
        if not 0 <= n <= self._size_bytes:
            raise ValueError(f"used size {n} must be between 0 and {self._size_bytes}")
        metadata = self.metadata
        metadata.shape = torch.Size([n])
        metadata.dtype = torch.uint8
        metadata.shapes = metadata.dtypes = None
        self._logical_bytes = n

    def pool(self) -> Pool:
        """Return the pool that guards the object's counts."""
        home: Pool = self._pool
        return home

    def is_cached(self) -> bool:
        """Whether a hot cache lists the object."""
        cached: bool = self._cached
        return cached

    def parent(self) -> Any:
        """Return the allocator the object came from, or None."""
        return self._parent


def release_all(memory_objs: list[Any]) -> None:
    """Drop one reference of each object, None aside, and empty the list; in one native step."""
    call_each(memory_objs, "ref_count_down")


class TensorMemoryObj(MemoryObj):
    """A memory object over a flat uint8 tensor.

    Args:
        raw_data: [phy_size], uint8: the object's bytes.
        metadata: Its shape, dtype, format and initial counts.
        parent_allocator: Told through `free` when the object is freed, or None.

    Raises:
        ValueError: `raw_data` is not flat, contiguous uint8, or shorter than the metadata says.
    """

    __slots__ = ()

    def __init__(
        self,
        raw_data: torch.Tensor,
        metadata: MemoryObjMetadata,
        parent_allocator: FreesMemory | None,
    ) -> None:
        if raw_data.dtype != torch.uint8 or raw_data.dim() != 1 or not raw_data.is_contiguous():
            raise ValueError("raw_data must be flat, contiguous uint8")
        if raw_data.numel() < max(metadata.phy_size, metadata.get_size()):
            raise ValueError(
                f"raw_data has {raw_data.numel()} bytes, fewer than the metadata says: "
                f"{metadata.phy_size} physical, {metadata.get_size()} used"
            )
        Block.__init__(
            self,
            FOREIGN_POOL,
            metadata.phy_size,
            None,
            parent_allocator,
            raw_data,
            metadata.ref_count,
            metadata.pin_count,
        )
        self._metadata = metadata
        self._logical_bytes = metadata.get_size()

    @property
    def raw_data(self) -> torch.Tensor:
        """[phy_size], uint8, on the pool's device: all bytes taken from the pool."""
        raw: torch.Tensor | None = self._raw
        if raw is None:
            offset = self._offset
            raw = self._raw = self._spec.buffer[offset : offset + self._size_bytes]
        return raw

    @property
    def raw_tensor(self) -> torch.Tensor | None:
        """[size], uint8: the used bytes; None when freed."""
        return self.raw_data[: self.get_size()] if self.is_valid() else None

    @property
    def tensor(self) -> torch.Tensor | None:
        """The first group in its shape and dtype; None when freed."""
        return self.get_tensor(0)

    def get_tensor(self, index: int) -> torch.Tensor | None:
        """Return group `index` in its shape and dtype; None when freed.

        Raises:
            IndexError: There is no such group.
        """
        shapes, dtypes = self.get_shapes(), self.get_dtypes()
        if not 0 <= index < len(shapes):
            raise IndexError(f"group {index} of a memory object with {len(shapes)} groups")
        if not self.is_valid():
            return None
        start = size_of(shapes[:index], dtypes[:index])
        nbytes = size_of(shapes[index : index + 1], dtypes[index : index + 1])
        return self.raw_data[start : start + nbytes].view(dtypes[index]).view(shapes[index])

    @property
    def data_ptr(self) -> int:
        """Address of the first byte."""
        if self._raw is not None or self._spec is None:
            return self.raw_data.data_ptr()
        address: int = self._spec.buffer.data_ptr() + self._offset
        return address

    @property
    def is_on_host(self) -> bool:
        """Whether the bytes are in host memory."""
        home: torch.Tensor = self._spec.buffer if self._raw is None else self._raw
        return home.is_cpu

    @property
    def byte_array(self) -> memoryview:
        """The used bytes as a writable view; valid while a reference is held."""
        array = (ctypes.c_ubyte * self.get_size()).from_address(self.data_ptr)
        array.owner = self.raw_data  # type: ignore[attr-defined]  # keeps the pool's memory alive
        return memoryview(array)


class BytesBufferMemoryObj(MemoryObj):
    """A memory object over bytes of its own. Its reference count is 1 for as long as it lives.

    Args:
        raw_bytes: The bytes; a bytearray is kept, not copied.
        metadata: Its shape and format; by default flat uint8 in BINARY_BUFFER.
    """

    __slots__ = ()

    def __init__(
        self, raw_bytes: bytes | bytearray, metadata: MemoryObjMetadata | None = None
    ) -> None:
        metadata = metadata or MemoryObjMetadata(
            shape=torch.Size([len(raw_bytes)]),
            dtype=torch.uint8,
            address=0,
            phy_size=len(raw_bytes),
            ref_count=1,
            fmt=MemoryFormat.BINARY_BUFFER,
        )
        super().__init__(metadata)
        self._raw = raw_bytes

    def ref_count_up(self) -> None:
        """Do nothing: the bytes live as long as the object."""

    def ref_count_down(self) -> None:
        """Do nothing: the bytes live as long as the object."""

    def get_ref_count(self) -> int:
        """Return 1."""
        return 1

    @property
    def raw_data(self) -> bytes | bytearray:
        """The bytes themselves, as given."""
        raw: bytes | bytearray = self._raw
        return raw

    @property
    def byte_array(self) -> memoryview:
        """The bytes."""
        return memoryview(self._raw)

    @property
    def raw_tensor(self) -> torch.Tensor:
        """[size], uint8."""
        return torch.frombuffer(self._raw, dtype=torch.uint8)

    @property
    def tensor(self) -> torch.Tensor | None:
        """The bytes in the metadata's shape and dtype."""
        return self.get_tensor(0)

    def get_tensor(self, index: int) -> torch.Tensor | None:
        """Return the bytes in their shape; there is only group 0."""
        if index != 0:
            raise IndexError(f"group {index} of a memory object with 1 group")
        dtype = self.get_dtype()
        return None if dtype is None else self.raw_tensor.view(dtype).view(self.get_shape())

    @property
    def data_ptr(self) -> int:
        """Address of the first byte."""
        return self.raw_tensor.data_ptr()

    @property
    def is_on_host(self) -> bool:
        """Return True: the bytes are Python's."""
        return True
