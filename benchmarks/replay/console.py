"""Progress and tables on a terminal (with rich, where installed) or as plain text."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO, TypeVar

try:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    _HAS_RICH = True
except ImportError:  # the extra [replay] is not installed: plain text serves
    _HAS_RICH = False

_Item = TypeVar("_Item")
_PLAIN_STEPS = 4


def with_progress(label: str, items: Sequence[_Item], *, is_shown: bool = True) -> Iterator[_Item]:
    """Yield `items`, reporting on standard error how far the caller is."""
    if not is_shown:
        yield from items
    elif _HAS_RICH and sys.stderr.isatty():
        with Progress(console=Console(stderr=True)) as progress:
            yield from progress.track(items, description=label)
    else:
        yield from _plain_progress(label, items, sys.stderr)


def print_table(
    title: str, header: Sequence[str], rows: Iterable[Sequence[str]], out: TextIO
) -> None:
    """Print a table whose first column is text and whose other columns are figures."""
    if _HAS_RICH and out.isatty():
        table = Table(title=title, title_justify="left")
        for position, name in enumerate(header):
            table.add_column(
                name.replace("+", "\n+"), justify="right" if position else "left", no_wrap=True
            )
        for row in rows:
            table.add_row(*row)
        Console(file=out).print(table)
    else:
        out.write(plain_table(title, header, list(rows)) + "\n")


def plain_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the table as aligned text."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [title]
    for row in [header, ["-" * width for width in widths], *rows]:
        first, *rest = [
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join([first, *rest]).rstrip())
    return "\n".join(lines)


def _plain_progress(label: str, items: Sequence[_Item], out: TextIO) -> Iterator[_Item]:
    step = max(1, len(items) // _PLAIN_STEPS)
    for number, item in enumerate(items, start=1):
        yield item
        if number % step == 0 or number == len(items):
            out.write(f"{label}: {number}/{len(items)}\n")
            out.flush()
