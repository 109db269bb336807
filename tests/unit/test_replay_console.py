"""Plain-text tables and progress, for output that is no terminal."""

import pytest

from benchmarks.replay.console import plain_table, with_progress


def test_columns_line_up() -> None:
    table = plain_table("title", ["name", "a", "bb"], [["x", "10", "2"], ["longer", "3", "400"]])
    assert table.splitlines() == [
        "title",
        "name     a   bb",
        "------  --  ---",
        "x       10    2",
        "longer   3  400",
    ]


def test_progress_yields_everything_and_says_how_far_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert list(with_progress("arm", range(8))) == list(range(8))
    assert capsys.readouterr().err.splitlines() == [f"arm: {done}/8" for done in (2, 4, 6, 8)]


def test_hidden_progress_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(with_progress("arm", range(8), is_shown=False)) == list(range(8))
    assert capsys.readouterr().err == ""
