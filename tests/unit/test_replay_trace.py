"""Reading traces: what is accepted, how blocks are cut, and what an error says."""

import json
from pathlib import Path

import pytest

from benchmarks.replay.requests import TraceRow, requests_of
from benchmarks.replay.trace import TraceError, read_trace, write_trace

GOOD = {"timestamp": 5, "input_length": 1100, "output_length": 7, "hash_ids": [3, 4, 9]}


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    return tmp_path / "some.jsonl"


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return path


def test_rows_come_back_as_they_were_written(trace_file: Path) -> None:
    rows = [TraceRow(0, 513, 1, (8, 9)), TraceRow(3000, 100, 2, (7,))]
    write_trace(trace_file, rows)
    assert read_trace(trace_file) == rows


def test_limit_reads_the_first_rows_only(trace_file: Path) -> None:
    write_lines(trace_file, GOOD, GOOD, "not reached")
    assert len(read_trace(trace_file, limit=2)) == 2


def test_blank_lines_are_skipped(trace_file: Path) -> None:
    write_lines(trace_file, GOOD, "", GOOD)
    assert len(read_trace(trace_file)) == 2


def test_partial_last_block_takes_no_part(trace_file: Path) -> None:
    write_lines(trace_file, GOOD)
    (request,) = requests_of(read_trace(trace_file))
    assert len(request.prefix_ids) == 2


def test_equal_prefixes_share_ids_and_equal_ids_after_different_prefixes_do_not() -> None:
    rows = [
        TraceRow(0, 1536, 1, (1, 2, 3)),
        TraceRow(0, 1536, 1, (1, 2, 4)),
        TraceRow(0, 1536, 1, (9, 2, 3)),
    ]
    first, second, third = (request.prefix_ids for request in requests_of(rows))
    assert first[:2] == second[:2] and first[2] != second[2]
    assert not set(first) & set(third)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not JSON"),
        ([1], "a list instead of an object"),
        ({key: GOOD[key] for key in GOOD if key != "hash_ids"}, "field 'hash_ids' is missing"),
        (GOOD | {"timestamp": "5"}, "field 'timestamp' is '5'"),
        (GOOD | {"timestamp": True}, "field 'timestamp' is True"),
        (GOOD | {"input_length": -1}, "field 'input_length' is -1"),
        (GOOD | {"output_length": 1.5}, "field 'output_length' is 1.5"),
        (GOOD | {"hash_ids": [1, "2", 3]}, "field 'hash_ids' is not a list of integers"),
        (GOOD | {"hash_ids": [1]}, "2 whole blocks of 512 tokens but hash_ids has 1 entries"),
    ],
)
def test_bad_line_is_named_with_its_problem_and_the_format(
    trace_file: Path, line: object, problem: str
) -> None:
    write_lines(trace_file, GOOD, line)
    with pytest.raises(TraceError) as error:
        read_trace(trace_file)
    message = str(error.value)
    assert message.startswith(f"{trace_file}, line 2: ")
    assert problem in message
    assert '"hash_ids": [one integer for each 512-token block' in message


def test_time_that_goes_back_is_an_error_with_its_remedy(trace_file: Path) -> None:
    write_lines(trace_file, GOOD, GOOD | {"timestamp": 4})
    with pytest.raises(
        TraceError, match="line 2: timestamp 4 is before .* sort the trace by timestamp"
    ):
        read_trace(trace_file)


def test_empty_file_is_an_error(trace_file: Path) -> None:
    trace_file.write_text("\n")
    with pytest.raises(TraceError, match="holds no request"):
        read_trace(trace_file)


@pytest.mark.parametrize("line", ["[" * 100_000, '{"timestamp": ' + "9" * 5000 + "}"])
def test_json_that_is_too_deep_or_a_number_too_long_is_an_error_with_its_line(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    path.write_text(line + "\n")

    with pytest.raises(TraceError, match=r"trace\.jsonl.*1"):
        list(read_trace(path))
