"""Measure this fork beside PyPI's lmcache 0.5.6, both on this machine's CPU, in alternating runs.

`python -m benchmarks.compare [FIGURE ...]` prints a table with medians, spread and ratios, and
writes JSON with `--json FILE`. Every run is a process of its own.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.baseline import baseline_python
from benchmarks.machine import machine_facts, machine_line

SIDES = Path(__file__).parent / "sides"
RUN_TIMEOUT_SECONDS = 900
QUIET = "--quiet"  # not the script's option: logs errors only; otherwise logging is as shipped


@dataclass(frozen=True)
class Figure:
    """One line of the table.

    Attributes:
        script, options: What to run.
        value: Which of the script's values.
        unit: Its unit.
        floor, goal: What should be reached, in words: the ratio fork / upstream, or the fork's own
            value where the unit says so or there is none.
        fork_only: There is nothing to measure upstream.
    """

    name: str
    script: str
    value: str
    unit: str
    floor: str
    goal: str
    options: tuple[str, ...] = ()
    fork_only: bool = False


def disk_shares() -> list[Figure]:
    """Return what the disk tier makes of plain file I/O, by size, way and step."""
    sizes = {"880 KiB": ("880", "64"), "40 MiB": ("40960", "8")}
    ways = {"page cache": "0", "O_DIRECT": "1"}
    steps = {"write": "write", "write, full tier": "write_again", "read": "read"}
    return [
        Figure(
            f"disk {step}, {size}, {way}",
            "disk_throughput",
            f"tier_{value}_share",
            "of plain",
            "",
            ">= 0.9",
            ("--chunk-kib", chunk_kib, "--chunks", chunks, "--direct", direct),
            fork_only=True,
        )
        for size, (chunk_kib, chunks) in sizes.items()
        for way, direct in ways.items()
        for step, value in steps.items()
    ]


FIGURES = [
    Figure("touch", "touch", "touch_us_per_key", "us/key", "<= 0.25", "<= 0.125"),
    Figure(
        "touch, 10 k resident",
        "touch",
        "touch_us_per_key",
        "us/key",
        "",
        "",
        ("--resident", "10000"),
    ),
    Figure("touch: building keys", "touch", "build_us_per_key", "us/key", "", ""),
    Figure("evicting put", "evict", "evicting_puts_per_s", "/s", ">= 5", ">= 8"),
    Figure(
        "evicting put, logs off",
        "evict",
        "evicting_puts_per_s",
        "/s",
        "",
        "",
        (QUIET,),
    ),
    Figure("evicting put, 10 k held", "evict", "held_evicting_puts_per_s", "/s", "", ""),
    Figure("refresh p99", "contention", "refresh_p99_us", "us", "<= 0.25", "<= 0.1"),
    Figure(
        "refresh p99, 5 k held",
        "contention",
        "refresh_p99_us",
        "us",
        "<= 0.25",
        "<= 0.1",
        ("--held", "5000"),
    ),
    Figure("interpreter wait p99", "contention", "interpreter_wait_p99_us", "us", "", ""),
    Figure("mixed: mean fill", "mixed_sizes", "mean_fill", "", "0.96", ">= 0.98"),
    Figure("mixed: p99 evicted/asked", "mixed_sizes", "evicted_per_byte_p99", "", "2", "<= 1.5"),
    Figure("lookup of 32 k tokens", "lookup", "lookup_ms", "ms", "<= 0.333", "<= 0.25"),
    Figure("lookup of 32 k tokens, a list", "lookup", "lookup_list_ms", "ms", "", ""),
    Figure("store again, 32 k tokens", "store", "store_again_ms", "ms", "<= 0.1", "<= 0.05"),
    Figure("store into a full pool, 32 k tokens", "store", "store_new_ms", "ms", "", ""),
    Figure(
        "retrieve of 32 MiB, share of memcpy",
        "retrieve",
        "retrieve_memcpy_share",
        "",
        ">= 0.8",
        ">= 0.9",
    ),
    Figure("import beyond torch", "import_time", "import_s", "s", "<= 0.6 s", "<= 0.4 s"),
    Figure(
        "events: no subscriber",
        "events",
        "no_subscriber_share",
        "share",
        "<= 0.01",
        "0",
        fork_only=True,
    ),
    Figure(
        "events: one, per event",
        "events",
        "one_subscriber_us_per_event",
        "us",
        "<= 1",
        "",
        fork_only=True,
    ),
    Figure(
        "events: one, share of a put",
        "events",
        "one_subscriber_share",
        "share",
        "",
        "<= 0.1",
        fork_only=True,
    ),
    Figure(
        "events: step of a snapshot, 260 k keys",
        "events",
        "snapshot_step_ms",
        "ms",
        "",
        "a few",
        fork_only=True,
    ),
    Figure("put into a full disk tier", "disk", "readable_puts_per_s", "/s", ">= 10", ">= 20"),
    Figure("put into a full disk tier, the caller", "disk", "caller_puts_per_s", "/s", "", ""),
    Figure("same files, plain loop, new files", "disk", "plain_new_puts_per_s", "/s", "", ""),
    Figure("same files, plain loop, reused", "disk", "plain_reused_puts_per_s", "/s", "", ""),
    *disk_shares(),
]


def run_side(python: Path, script: str, options: Sequence[str]) -> dict[str, Any]:
    """Run one side's script in a process of its own and return what it reports."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("LMCACHE_", "PYTHON"))}
    environment["LMCACHE_TRACK_USAGE"] = "false"
    if QUIET in options:
        environment["LMCACHE_LOG_LEVEL"] = "ERROR"
    with tempfile.TemporaryDirectory() as elsewhere:  # so that no source tree is on the path
        ran = subprocess.run(
            [
                str(python),
                str(SIDES / f"{script}.py"),
                *(option for option in options if option != QUIET),
            ],
            env=environment,
            cwd=elsewhere,
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_SECONDS,
        )
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    if ran.returncode != 0 or not lines:
        raise RuntimeError(f"{script} failed under {python}:\n{ran.stderr[-3000:]}")
    reported: dict[str, Any] = json.loads(lines[-1])
    return reported


def measure(figures: Sequence[Figure], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return figure name -> side -> values, one per round, the sides taking turns."""
    sides = {"fork": Path(sys.executable)}
    if not all(figure.fork_only for figure in figures):
        sides["upstream"] = baseline_python()
    values: dict[str, dict[str, list[float]]] = {f.name: {} for f in figures}
    runs = dict.fromkeys((f.script, f.options, f.fork_only) for f in figures)
    for round_number in range(rounds):
        for script, options, fork_only in runs:
            for side, python in sides.items():
                if fork_only and side != "fork":
                    continue
                print(
                    f"round {round_number + 1}/{rounds}: {script} {' '.join(options)} ({side})",
                    file=sys.stderr,
                )
                reported = run_side(python, script, options)
                for figure in figures:
                    if (figure.script, figure.options) == (script, options):
                        values[figure.name].setdefault(side, []).append(reported[figure.value])
    return values


def table(figures: Sequence[Figure], values: dict[str, dict[str, list[float]]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = ["| figure | upstream 0.5.6 | fork | fork / upstream | floor | goal |"]
    lines.append("|---|---|---|---|---|---|")
    for figure in figures:
        sides = values[figure.name]
        fork = statistics.median(sides["fork"])
        ratio = ""
        if "upstream" in sides:
            ratio = f"{fork / statistics.median(sides['upstream']):.3g}"
        lines.append(
            f"| {figure.name} | {spread(sides.get('upstream'), figure.unit)} "
            f"| {spread(sides['fork'], figure.unit)} | {ratio} | {figure.floor} | {figure.goal} |"
        )
    return lines


def spread(values: list[float] | None, unit: str) -> str:
    """Return median and range."""
    if not values:
        return "–"
    text = f"{statistics.median(values):.4g} ({min(values):.3g}–{max(values):.3g})"
    return f"{text} {unit}".rstrip()


def main() -> int:
    """Measure the figures named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("figures", nargs="*", help="names or parts of names; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    wanted = [
        figure
        for figure in FIGURES
        if not options.figures or any(part in figure.name for part in options.figures)
    ]
    if not wanted:
        parser.error("no figure has such a name; there are " + ", ".join(f.name for f in FIGURES))
    facts = machine_facts()
    print(machine_line(facts))
    values = measure(wanted, options.rounds)
    print("\n".join(table(wanted, values)))
    if options.json:
        options.json.write_text(json.dumps({"machine": facts, "values": values}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
