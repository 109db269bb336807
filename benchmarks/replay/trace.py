"""Reading and writing Mooncake-format traces: one JSON object a line."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.replay.requests import TraceRow
from benchmarks.replay.settings import TOKENS_PER_BLOCK

_FORMAT = (
    'each line is {"timestamp": milliseconds, "input_length": tokens, "output_length": tokens, '
    '"hash_ids": [one integer for each 512-token block of the input]}'
)


class TraceError(ValueError):
    """A trace cannot be used: names the file, the line, the problem and the remedy."""

    def __init__(self, path: Path, line_number: int, problem: str, remedy: str = _FORMAT) -> None:
        super().__init__(f"{path}, line {line_number}: {problem}; {remedy}")


def read_trace(path: Path, limit: int | None = None) -> list[TraceRow]:
    """Return the rows of a trace in file order, at most `limit` of them; blank lines are skipped.

    Raises: TraceError: A line is no JSON, misses a field, has a wrong type, or goes back in time;
        or the file holds no request. OSError: The file cannot be read.
    """
    rows: list[TraceRow] = []
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line_number, line in enumerate(lines, start=1):
            if limit is not None and len(rows) >= limit:
                break
            if not line.strip():
                continue
            row = _parse_line(path, line_number, line)
            if rows and row.timestamp_ms < rows[-1].timestamp_ms:
                raise TraceError(
                    path,
                    line_number,
                    f"timestamp {row.timestamp_ms} is before {rows[-1].timestamp_ms} above it",
                    "sort the trace by timestamp",
                )
            rows.append(row)
    if not rows:
        raise TraceError(path, 1, "the file holds no request")
    return rows


def write_trace(path: Path, rows: Iterable[TraceRow]) -> None:
    """Write rows in the format that `read_trace` reads."""
    with path.open("w", encoding="utf-8") as out:
        for row in rows:
            record = {
                "timestamp": row.timestamp_ms,
                "input_length": row.input_tokens,
                "output_length": row.output_tokens,
                "hash_ids": list(row.hash_ids),
            }
            out.write(json.dumps(record) + "\n")


def _parse_line(path: Path, line_number: int, line: str) -> TraceRow:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # not JSON, a number too long, nested too deep
        raise TraceError(path, line_number, f"not JSON ({error})") from error
    if not isinstance(record, dict):
        raise TraceError(path, line_number, f"a {type(record).__name__} instead of an object")
    row = TraceRow(
        timestamp_ms=_whole_number(path, line_number, record, "timestamp"),
        input_tokens=_whole_number(path, line_number, record, "input_length"),
        output_tokens=_whole_number(path, line_number, record, "output_length"),
        hash_ids=_hash_ids(path, line_number, record),
    )
    num_whole_blocks = row.input_tokens // TOKENS_PER_BLOCK
    if len(row.hash_ids) < num_whole_blocks:
        raise TraceError(
            path,
            line_number,
            f"input_length {row.input_tokens} has {num_whole_blocks} whole blocks of "
            f"{TOKENS_PER_BLOCK} tokens but hash_ids has {len(row.hash_ids)} entries",
        )
    return row


def _field(path: Path, line_number: int, record: Mapping[str, object], name: str) -> object:
    if name not in record:
        raise TraceError(path, line_number, f"field '{name}' is missing")
    return record[name]


def _whole_number(path: Path, line_number: int, record: Mapping[str, object], name: str) -> int:
    value = _field(path, line_number, record, name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TraceError(
            path, line_number, f"field '{name}' is {value!r}, not a whole number of 0 or more"
        )
    return value


def _hash_ids(path: Path, line_number: int, record: Mapping[str, object]) -> tuple[int, ...]:
    value = _field(path, line_number, record, "hash_ids")
    if not isinstance(value, list) or any(type(item) is not int for item in value):
        raise TraceError(path, line_number, "field 'hash_ids' is not a list of integers")
    return tuple(value)
