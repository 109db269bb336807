"""Workloads for tests of the replay."""

import random

from benchmarks.replay.requests import Request, TraceRow, requests_of
from benchmarks.replay.settings import TOKENS_PER_BLOCK


def crowded_requests(numbers: random.Random) -> list[Request]:
    """Sixty short prompts over two blocks: nearly every prefix is asked for again."""
    rows, now_ms = [], 0
    for _ in range(60):
        now_ms += numbers.choice((0, 10, 300, 4_000, 9_000))
        blocks = tuple(numbers.randint(0, 1) for _ in range(numbers.randint(0, 9)))
        rows.append(TraceRow(now_ms, len(blocks) * TOKENS_PER_BLOCK, 1, blocks))
    return requests_of(rows)
