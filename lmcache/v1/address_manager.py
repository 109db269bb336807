"""Address arithmetic for callers that keep their own memory."""

from lmcache.v1.native import AddressRanges


class AddressManager:
    """Hands out ranges of an address space that starts at 0.

    Args:
        size: Bytes of the space.
        align_bytes: Sizes and addresses are multiples of it.

    Raises:
        ValueError: A size or alignment that is not positive.

    Threads: safe from any thread (each call is one native step).
    """

    def __init__(self, size: int, align_bytes: int = 4096) -> None:
        if size <= 0 or align_bytes <= 0:
            raise ValueError(f"size {size} and align_bytes {align_bytes} must be positive")
        self.align_bytes = align_bytes
        self._ranges = AddressRanges(size, align_bytes)

    def compute_aligned_size(self, raw_size: int) -> int:
        """Return `raw_size` rounded up to the alignment."""
        aligned: int = self._ranges.aligned(raw_size)
        return aligned

    def allocate(self, size: int) -> tuple[int, int]:
        """Return (address, aligned size).

        Raises:
            ValueError: `size` is not positive.
            RuntimeError: No free range is large enough.
        """
        if size <= 0:
            raise ValueError(f"cannot allocate {size} bytes: the size must be positive")
        found: tuple[int, int] | None = self._ranges.allocate(size)
        if found is None:
            raise RuntimeError(
                f"no free range of {size} bytes; {self.get_free_size()} of {self.get_heap_size()} "
                "bytes are free"
            )
        return found

    def batched_allocate(self, size: int, batch_size: int) -> list[tuple[int, int]]:
        """Return `batch_size` ranges; all or nothing, raising as `allocate` does."""
        made: list[tuple[int, int]] = []
        try:
            for _ in range(batch_size):
                made.append(self.allocate(size))
        except RuntimeError:
            for address, nbytes in made:
                self.free(address, nbytes)
            raise
        return made

    def free(self, address: int, size: int) -> None:
        """Give a range back.

        Raises:
            ValueError: No range of that address and size was handed out.
        """
        if self._ranges.size_at(address) != self.compute_aligned_size(size):
            raise ValueError(f"no range of {size} bytes at address {address} was handed out")
        self._ranges.free(address)

    def sbrk(self, size: int) -> None:
        """Add `size` bytes at the end of the space."""
        self._ranges.grow(size)

    def get_heap_size(self) -> int:
        """Return the bytes of the whole space."""
        capacity: int = self._ranges.capacity_bytes
        return capacity

    def get_free_size(self) -> int:
        """Return the bytes not handed out."""
        free: int = self._ranges.free_bytes
        return free

    def check_consistency(self) -> bool:
        """Whether every invariant holds."""
        return not self._ranges.check_integrity()
