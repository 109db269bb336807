"""Where a put enters the eviction order."""

import enum


class Placement(enum.Enum):
    """How far from eviction a new entry starts. FIFO and MRU ignore it.

    A touch or a get makes a cold entry an ordinary one.
    """

    YOUNG = "young"  # the last to leave
    COLD = "cold"  # the first to leave; the newest of them first, tails before heads (LFU: no uses)
    SPARE = "spare"  # cold, and only into room that is free: its caller allocates without eviction

    @property
    def is_cold(self) -> bool:
        """Whether the entry enters at the end where victims are taken."""
        return self is not Placement.YOUNG
