"""One request as the replay sees it: a chain of whole blocks at a moment of trace time."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.replay.settings import TOKENS_PER_BLOCK


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One line of a Mooncake-format trace.

    `hash_ids` has one id for each 512-token block of the input, the last one may cover a partial
    block; equal ids at equal positions mean an equal prefix.
    """

    timestamp_ms: int
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """A request cut to whole blocks.

    `prefix_ids[i]` names the whole prefix up to and including block i: two requests share an id
    exactly when they share everything before it too.
    """

    timestamp_ms: int
    prefix_ids: tuple[int, ...]


class PrefixNamer:
    """Gives every distinct prefix one small id, in order of first appearance.

    Chaining over the parent makes a request independent of how a trace numbers its blocks: an id
    that appears under two different prefixes names two different contents.
    """

    def __init__(self) -> None:
        self._ids: dict[tuple[int, int], int] = {}

    def name(self, row: TraceRow) -> Request:
        """Return the request of a row; the partial last block is left out."""
        parent = -1
        named: list[int] = []
        for block_id in row.hash_ids[: row.input_tokens // TOKENS_PER_BLOCK]:
            parent = self._ids.setdefault((parent, block_id), len(self._ids))
            named.append(parent)
        return Request(row.timestamp_ms, tuple(named))


def requests_of(rows: Sequence[TraceRow]) -> list[Request]:
    """Return the requests of a trace, in its order."""
    namer = PrefixNamer()
    return [namer.name(row) for row in rows]
