"""A lookup of a resident prompt with pin and unpin, tokens as a tensor and as a list."""

from common import parse, report
from engines import Bench, median_seconds

options = parse(__doc__, tokens=32_768, rounds=200)
bench = Bench(options.tokens, options.tokens + 1024)
bench.store()
as_list = bench.tokens.tolist()
number = 0


def look_up(tokens: object) -> None:
    """Look up, pin and unpin under a new id."""
    global number
    number += 1
    lookup_id = str(number)
    found = bench.engine.lookup(tokens, lookup_id=lookup_id, pin=True)
    assert found == options.tokens, found
    bench.engine.lookup_unpin(lookup_id)


report(
    {
        "lookup_ms": median_seconds(lambda: look_up(bench.tokens), options.rounds) * 1e3,
        "lookup_list_ms": median_seconds(lambda: look_up(as_list), options.rounds) * 1e3,
    }
)
