"""What one replay is run with: the arms, the sizes and the engine's timing rules."""

import enum
from dataclasses import dataclass

TOKENS_PER_BLOCK = 512
"""Tokens of one block of a trace; a KV block of the replay holds exactly these."""

ENGINE_TOKENS_PER_BLOCK = 4
"""Tokens, and the chunk size, that stand for one block towards the engine: enough to name it."""

POOL_ALIGNMENT_BYTES = 4096
"""The pool hands out whole multiples of this, so smaller blocks would not be what they say."""

DISK_HEAD_BYTES = 4096
"""Head of each file of the disk tier: a KV block takes so much more there than in the pool."""

DISK_BLOCKS_PER_POOL_BLOCK = 2
"""Default size of a disk tier; a run that stores several times its pool evicts there too."""

POOL_PARTS_IN_FLIGHT = 4
"""One put takes at most one such part of the pool: well within the half that may be in flight."""

REAL_BLOCK_MIB = 1.72
"""MiB of KV that 512 tokens take at full size; sizes the verification window only."""

TOUCH_INTERVAL_MS = 500
"""At most one touch for one hash in this many milliseconds of trace time."""

WINDOW_MS_PER_GIB = 250
WINDOW_MIN_MS = 5_000
WINDOW_MAX_MS = 60_000


class Arm(enum.Enum):
    """What the engine tells the cache, and what the cache tells the engine."""

    NONE = "none"
    TOUCH = "touch"
    EVENTS = "touch+events"
    ADMISSION = "touch+events+admission"

    @property
    def touches(self) -> bool:
        """Whether a hit of the state index is sent to the cache as a touch."""
        return self is not Arm.NONE

    @property
    def hears_events(self) -> bool:
        """Whether the state index follows the cache's event stream."""
        return self in (Arm.EVENTS, Arm.ADMISSION)

    @property
    def admits_by_class(self) -> bool:
        """Whether interval images are stored into spare room only."""
        return self is Arm.ADMISSION


class ImageClass(enum.Enum):
    """Why a state image is taken at a boundary."""

    INTERVAL = "interval"
    BRANCH = "branch"
    PROMPT_END = "prompt_end"


class SettingsError(ValueError):
    """A replay cannot run with these settings; the message names the remedy."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes and rules of a replay, the same for every arm.

    `pool_blocks` and `image_blocks` count KV blocks of `block_bytes` bytes; an image every
    `interval_blocks` blocks of a prompt and one at its end. `verified_for_ms` is how long the touch
    arm trusts the last evidence of an image before it holds a request for a fresh verdict. A prompt
    is computed and stored in steps of `prefill_blocks`; None: in one. The disk tier holds
    `disk_blocks` files of KV blocks, heads included; None: there is none.
    """

    pool_blocks: int
    image_blocks: int
    interval_blocks: int
    block_bytes: int = POOL_ALIGNMENT_BYTES
    policy: str = "LRU"
    verified_for_ms: int = WINDOW_MIN_MS
    prefill_blocks: int | None = None
    disk_blocks: int | None = None

    def __post_init__(self) -> None:
        sizes = {
            "pool_blocks": self.pool_blocks,
            "image_blocks": self.image_blocks,
            "interval_blocks": self.interval_blocks,
            "block_bytes": self.block_bytes,
            "prefill_blocks": 1 if self.prefill_blocks is None else self.prefill_blocks,
            "disk_blocks": 1 if self.disk_blocks is None else self.disk_blocks,
        }
        for name, value in sizes.items():
            if value < 1:
                raise SettingsError(f"{name} is {value}; give at least 1")
        if self.block_bytes % POOL_ALIGNMENT_BYTES:
            raise SettingsError(
                f"block_bytes is {self.block_bytes}, which the pool would round up; "
                f"give a multiple of {POOL_ALIGNMENT_BYTES}"
            )
        if self.pool_blocks < self.image_blocks:
            raise SettingsError(
                f"the pool of {self.pool_blocks} blocks is smaller than one state image of "
                f"{self.image_blocks} blocks; raise --pool-blocks or lower --image-blocks"
            )
        if self.verified_for_ms < TOUCH_INTERVAL_MS:
            raise SettingsError(
                f"verified_for_ms is {self.verified_for_ms}; a window under the touch interval of "
                f"{TOUCH_INTERVAL_MS} ms would hold requests whose touch may not be sent yet"
            )
        if self.disk_blocks is not None and self.disk_bytes < self.image_file_bytes:
            raise SettingsError(
                f"the disk tier of {self.disk_blocks} blocks ({self.disk_bytes} bytes) is smaller "
                f"than the file of one state image ({self.image_file_bytes} bytes); raise "
                "--disk-blocks or lower --image-blocks"
            )

    @property
    def image_bytes(self) -> int:
        """Bytes of one state image in the scaled pool."""
        return self.image_blocks * self.block_bytes

    @property
    def pool_bytes(self) -> int:
        """Bytes of the scaled pool."""
        return self.pool_blocks * self.block_bytes

    @property
    def block_file_bytes(self) -> int:
        """Bytes of a KV block's file, head included."""
        return DISK_HEAD_BYTES + self.block_bytes

    @property
    def image_file_bytes(self) -> int:
        """Bytes of a state image's file, head included."""
        return DISK_HEAD_BYTES + self.image_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of the scaled disk tier, of files; 0 where there is none."""
        return (self.disk_blocks or 0) * self.block_file_bytes

    @property
    def put_blocks(self) -> int | None:
        """Most KV blocks of one put, so that all may be on their way to disk; None: any number."""
        if self.disk_blocks is None:
            return None
        return max(1, self.pool_blocks // POOL_PARTS_IN_FLIGHT)

    @property
    def has_equal_sizes(self) -> bool:
        """Whether KV blocks and images have one size, so that every victim is determined."""
        return self.image_blocks == 1


def derived_window_ms(pool_blocks: int) -> int:
    """Return the verification window for a pool of this many full-size blocks, in milliseconds.

    A quarter second per GiB of pool, at least 5 s and at most 60 s: a quarter of the time a pool
    takes to turn over when it is filled at 1 GiB/s.
    """
    pool_gib = pool_blocks * REAL_BLOCK_MIB / 1024
    return min(WINDOW_MAX_MS, max(WINDOW_MIN_MS, round(pool_gib * WINDOW_MS_PER_GIB)))
