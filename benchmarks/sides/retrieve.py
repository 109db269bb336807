"""A retrieve of 32 MiB into a paged KV cache in host memory, beside one memcpy of as many bytes."""

import ctypes
import statistics

import torch
from common import parse, report
from engines import TOKEN_BYTES, Bench, median_seconds

options = parse(__doc__, tokens=8192, rounds=60)
torch.set_num_threads(1)  # memcpy is measured on one core, so is the copy beside it
bench = Bench(options.tokens, 2 * options.tokens)
bench.store()
assert bench.retrieve() == options.tokens
num_bytes = options.tokens * TOKEN_BYTES
source = torch.full((num_bytes,), 1, dtype=torch.uint8)
target = torch.full((num_bytes,), 2, dtype=torch.uint8)


def copy() -> None:
    """Copy the same number of bytes, contiguous on both sides."""
    ctypes.memmove(target.data_ptr(), source.data_ptr(), num_bytes)


shares, seconds = [], []
for _ in range(5):  # taking turns: the machine's speed drifts
    copy_s = median_seconds(copy, options.rounds // 5)
    seconds.append(median_seconds(bench.retrieve, options.rounds // 5))
    shares.append(copy_s / seconds[-1])
report(
    {
        "retrieve_memcpy_share": statistics.median(shares),
        "retrieve_ms": statistics.median(seconds) * 1e3,
    }
)
