"""The host memory of a pool: page-aligned, pageable until a device backend pins it."""

import resource
from typing import Protocol

import torch

from lmcache.logging import init_logger
from lmcache.v1.native import HostPages

logger = init_logger(__name__)


class HostPinner(Protocol):
    """What a device backend offers for fast copies from and to host memory."""

    name: str

    def pin(self, address: int, size_bytes: int) -> None:
        """Page-lock the range; RuntimeError with the runtime's own text when it refuses."""
        ...

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        ...


class HostMemory:
    """Zeroed host pages as one flat tensor.

    Pages are faulted in on first use and no device is opened, so that making a large pool is quick.

        state     meaning                                  who may leave it
        pageable  copies go through the driver's staging    pin
        pinned    page-locked by `pinner`                   close

    Args:
        size_bytes: Positive.

    Raises:
        ValueError: `size_bytes` is not positive.
        MemoryError: The system does not give the address space.

    Threads: `pin` and `close` are for the owner; the tensor is as safe as any.
    """

    def __init__(self, size_bytes: int) -> None:
        if size_bytes <= 0:
            raise ValueError(f"a pool of {size_bytes} bytes: the size must be positive")
        self._pages = HostPages(size_bytes)
        self._pinner: HostPinner | None = None
        self.tensor = torch.frombuffer(self._pages, dtype=torch.uint8)

    @property
    def is_pinned(self) -> bool:
        """Whether a device backend has page-locked the memory."""
        return self._pinner is not None

    def pin(self, pinner: HostPinner) -> bool:
        """Page-lock the memory; False, with one line that says why, when that fails."""
        if self._pinner is not None:
            return True
        try:
            pinner.pin(self._pages.address, self._pages.size_bytes)
        except (RuntimeError, OSError) as error:
            logger.warning(
                "%s could not pin %.2f GiB of host memory (%s). The limit on locked memory is %s. "
                "The pool stays pageable and copies are slower: raise `ulimit -l`, or lower "
                "LMCACHE_MAX_LOCAL_CPU_SIZE.",
                pinner.name,
                self._pages.size_bytes / 2**30,
                error,
                _locked_memory_limit(),
            )
            return False
        self._pinner = pinner
        return True

    def close(self) -> None:
        """Unpin. The pages go when the last tensor over them does. Twice is a no-op."""
        if self._pinner is not None:
            self._pinner.unpin(self._pages.address)
            self._pinner = None


def _locked_memory_limit() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
