"""Generated sessions: reproducible, valid as a trace, and shaped like agents' traffic."""

from pathlib import Path

import pytest

from benchmarks.replay.generator import SessionGenerator, Shape
from benchmarks.replay.requests import TraceRow, requests_of
from benchmarks.replay.settings import TOKENS_PER_BLOCK
from benchmarks.replay.trace import read_trace, write_trace


@pytest.fixture(scope="module")
def rows() -> list[TraceRow]:
    return SessionGenerator(42).rows(40)


def test_same_seed_gives_the_same_sessions(rows: list[TraceRow]) -> None:
    assert SessionGenerator(42).rows(40) == rows


def test_other_seed_gives_other_sessions(rows: list[TraceRow]) -> None:
    assert SessionGenerator(43).rows(40) != rows


def test_rows_are_a_valid_trace_in_order_of_time(rows: list[TraceRow], tmp_path: Path) -> None:
    path = tmp_path / "generated.jsonl"
    write_trace(path, rows)
    assert read_trace(path) == rows


def test_every_row_has_one_id_for_each_block_the_partial_one_included(rows: list[TraceRow]) -> None:
    for row in rows:
        assert len(row.hash_ids) == -(-row.input_tokens // TOKENS_PER_BLOCK)


def test_sessions_start_from_one_of_five_system_prompts(rows: list[TraceRow]) -> None:
    assert len({row.hash_ids[:11] for row in rows}) == 5


def test_most_blocks_of_a_session_were_sent_before(rows: list[TraceRow]) -> None:
    prefixes = [prefix for request in requests_of(rows) for prefix in request.prefix_ids]
    assert len(set(prefixes)) < 0.15 * len(prefixes)


def test_contexts_are_compacted_at_their_limit() -> None:
    shape = Shape(compaction_tokens=40_000, mean_user_turns=12.0)
    assert max(row.input_tokens for row in SessionGenerator(42, shape).rows(20)) <= 40_000


def test_forked_sub_agents_carry_their_parents_context() -> None:
    def mean_blocks(fork_share: float) -> float:
        shape = Shape(sub_agent_share=0.9, fork_share=fork_share)
        rows = SessionGenerator(42, shape).rows(20)
        return sum(len(row.hash_ids) for row in rows) / len(rows)

    assert mean_blocks(1.0) > 1.1 * mean_blocks(0.0)


def test_edited_turns_leave_a_second_lineage_at_the_point_of_the_edit() -> None:
    def num_branches(edit_share: float) -> int:
        shape = Shape(
            sub_agent_share=1e-9, edit_share=edit_share, num_apps=1, mean_tool_calls=1.001
        )
        children: dict[int, set[int]] = {}
        for request in requests_of(SessionGenerator(42, shape).rows(5)):
            for parent, child in zip(request.prefix_ids, request.prefix_ids[1:], strict=False):
                children.setdefault(parent, set()).add(child)
        return sum(len(several) > 1 for several in children.values())

    assert num_branches(0.9) > num_branches(0.0)
