"""Stores of a prompt: a new one into a full pool, and the same one again while it is resident."""

import itertools

from common import parse, report
from engines import Bench, median_seconds

options = parse(__doc__, tokens=32_768, rounds=20)
bench = Bench(options.tokens, 2 * options.tokens)
salts = itertools.count(1)


def store_new() -> None:
    """Store a prompt that differs from all others from its first token on."""
    bench.store(bench.tokens + next(salts))


new_s = median_seconds(store_new, options.rounds)
bench.store()
assert bench.engine.lookup(bench.tokens) == options.tokens
again_s = median_seconds(bench.store, options.rounds)
report({"store_new_ms": new_s * 1e3, "store_again_ms": again_s * 1e3})
