"""Command line of the replay."""

import argparse
import math
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.machine import machine_facts
from benchmarks.replay.generator import SessionGenerator
from benchmarks.replay.report import print_report, write_json
from benchmarks.replay.requests import TraceRow, requests_of
from benchmarks.replay.runner import ArmResult, run_arm
from benchmarks.replay.settings import (
    DISK_BLOCKS_PER_POOL_BLOCK,
    DISK_HEAD_BYTES,
    POOL_ALIGNMENT_BYTES,
    TOUCH_INTERVAL_MS,
    Arm,
    Settings,
    SettingsError,
    derived_window_ms,
)
from benchmarks.replay.trace import TraceError, read_trace, write_trace

EXIT_OK = 0
EXIT_WRONG = 1
EXIT_BAD_INPUT = 2

_NEVER = ("failed_wrong_bytes", "failed_unexplained", "failed_kv_missing", "disk_faults")
"""Counts that no run may have, whatever its settings."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the replay; returns 0, 1 for a run that went wrong or off its model, 2 for bad input."""
    options = _parser().parse_args(arguments)
    try:
        settings = _settings(options)
        _check_disk_dir(options.disk_dir, settings)
        rows = _rows(options)
        if options.json is not None:  # found out now, not after the whole run
            options.json.touch()
    except (SettingsError, TraceError, OSError) as error:
        print(f"replay: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    if options.write_trace is not None:
        write_trace(options.write_trace, rows)
    requests = requests_of(rows)
    with_model = options.verify_model
    if with_model is None:
        with_model = settings.has_equal_sizes and settings.policy.upper() == "LRU"
    results = [
        run_arm(
            requests,
            settings,
            arm,
            with_model=with_model,
            shows_progress=options.progress,
            disk_dir=options.disk_dir,
        )
        for arm in options.arms
    ]
    workload = _workload(options, rows)
    facts = machine_facts()
    print_report(sys.stdout, workload, facts, settings, results)
    if options.json is not None:
        write_json(options.json, workload, facts, settings, results)
    return EXIT_WRONG if any(_is_wrong(result, settings) for result in results) else EXIT_OK


def _is_wrong(result: ArmResult, settings: Settings) -> bool:
    if any(result.counts.get(name, 0) for name in _NEVER):
        return True
    return settings.has_equal_sizes and bool(result.differences())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replay",
        description="Replay KV blocks and state images through the real pool, arm beside arm.",
    )
    _add_workload(parser)
    _add_sizes(parser)
    _add_disk(parser)
    _add_rules(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, help="write the result as JSON")
    output.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, default=True, help="show progress"
    )
    return parser


def _add_workload(parser: argparse.ArgumentParser) -> None:
    source = parser.add_argument_group("workload")
    source.add_argument(
        "--trace", type=Path, help="Mooncake-format trace; without it, sessions are generated"
    )
    source.add_argument(
        "--sessions", type=_positive, default=200, help="generated sessions (%(default)s)"
    )
    source.add_argument(
        "--seed", type=int, default=42, help="seed of the generated sessions (%(default)s)"
    )
    source.add_argument("--limit", type=_positive, help="replay only the first requests")
    source.add_argument("--write-trace", type=Path, help="also write the workload as a trace")


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument(
        "--pool-blocks", type=int, default=8_000, help="pool, in KV blocks (%(default)s)"
    )
    sizes.add_argument(
        "--image-blocks", type=int, default=31, help="one state image, in KV blocks (%(default)s)"
    )
    sizes.add_argument(
        "--interval-blocks", type=int, default=8, help="an image every so many blocks (%(default)s)"
    )
    sizes.add_argument(
        "--block-bytes",
        type=int,
        default=POOL_ALIGNMENT_BYTES,
        help=f"scaled bytes of a KV block of 512 tokens, a multiple of {POOL_ALIGNMENT_BYTES} "
        "(%(default)s)",
    )


def _add_disk(parser: argparse.ArgumentParser) -> None:
    disk = parser.add_argument_group("disk tier")
    disk.add_argument(
        "--disk",
        action="store_true",
        help=f"put a disk tier below the pool, of {DISK_BLOCKS_PER_POOL_BLOCK} blocks for each of "
        "the pool's unless --disk-blocks says how many",
    )
    disk.add_argument(
        "--disk-blocks",
        type=int,
        help="a disk tier of so many KV blocks, counted as files: a KV block's file takes "
        f"{DISK_HEAD_BYTES} bytes of head and --block-bytes, a state image's the same head and "
        "--image-blocks times --block-bytes",
    )
    disk.add_argument(
        "--disk-dir",
        type=Path,
        help="where each arm makes a directory for its files, which goes when the arm ends "
        "(default: where temporary files go)",
    )


def _add_rules(parser: argparse.ArgumentParser) -> None:
    rules = parser.add_argument_group("rules")
    rules.add_argument(
        "--arms",
        type=_arms,
        default=",".join(arm.value for arm in Arm),
        help="comma-separated (%(default)s)",
    )
    rules.add_argument(
        "--policy",
        default="LRU",
        choices=("LRU", "LFU", "FIFO", "MRU"),
        help="eviction order (%(default)s)",
    )
    rules.add_argument(
        "--prefill-blocks",
        type=int,
        help="compute and store a prompt in steps of so many blocks (default: in one)",
    )
    rules.add_argument(
        "--verified-for-s",
        type=float,
        help="seconds the touch arm trusts an image's last evidence (default: from the pool's full "
        f"size, 5 to 60; at least {TOUCH_INTERVAL_MS / 1000})",
    )
    rules.add_argument(
        "--verify-model",
        action=argparse.BooleanOptionalAction,
        help="compare every count with the plain-Python model (default: with equal sizes and LRU)",
    )


def _settings(options: argparse.Namespace) -> Settings:
    window_ms = derived_window_ms(options.pool_blocks)
    if options.verified_for_s is not None:
        if not math.isfinite(options.verified_for_s):
            raise SettingsError(f"--verified-for-s must be finite, not {options.verified_for_s}")
        window_ms = round(options.verified_for_s * 1000)
    return Settings(
        pool_blocks=options.pool_blocks,
        image_blocks=options.image_blocks,
        interval_blocks=options.interval_blocks,
        block_bytes=options.block_bytes,
        policy=options.policy,
        verified_for_ms=window_ms,
        prefill_blocks=options.prefill_blocks,
        disk_blocks=_disk_blocks(options),
    )


def _disk_blocks(options: argparse.Namespace) -> int | None:
    if options.disk and options.disk_blocks is None:
        return DISK_BLOCKS_PER_POOL_BLOCK * int(options.pool_blocks)
    blocks: int | None = options.disk_blocks
    return blocks


def _check_disk_dir(disk_dir: Path | None, settings: Settings) -> None:
    """Find out now whether the files of the disk tier can be written, not in the middle of a run.

    Raises: SettingsError: They cannot, as far as can be told. OSError: The directory is not
        writable.
    """
    if settings.disk_blocks is None:
        if disk_dir is not None:
            raise SettingsError(f"--disk-dir {disk_dir} has no use without --disk")
        return
    parent = Path(tempfile.gettempdir()) if disk_dir is None else disk_dir
    if not parent.is_dir():
        raise SettingsError(f"--disk-dir {parent} is not a directory; make it first")
    if "," in str(parent):
        raise SettingsError(f"--disk-dir {parent}: the disk tier takes a comma for a list of paths")
    with tempfile.TemporaryFile(dir=parent):
        free_bytes = shutil.disk_usage(parent).free
    if free_bytes < settings.disk_bytes:
        raise SettingsError(
            f"the disk tier's {settings.disk_bytes} bytes do not fit into the {free_bytes} that "
            f"are free in {parent}; lower --disk-blocks or name another place with --disk-dir"
        )


def _rows(options: argparse.Namespace) -> list[TraceRow]:
    if options.trace is not None:
        return read_trace(options.trace, options.limit)
    return SessionGenerator(options.seed).rows(options.sessions)[: options.limit]


def _workload(
    options: argparse.Namespace, rows: Sequence[TraceRow]
) -> dict[str, str | int | float]:
    source: dict[str, str | int | float]
    if options.trace is not None:
        source = {"trace": options.trace.name}
    else:
        source = {"generated_sessions": options.sessions, "seed": options.seed}
    return source | {
        "requests": len(rows),
        "trace_seconds": (rows[-1].timestamp_ms - rows[0].timestamp_ms) / 1000,
    }


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _arms(text: str) -> list[Arm]:
    by_name = {arm.value: arm for arm in Arm}
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown arm {unknown[0]!r}; known: {', '.join(by_name)}")
    return [by_name[name] for name in names]
