"""The result of a replay as a table and as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from benchmarks.machine import machine_line
from benchmarks.replay.console import print_table
from benchmarks.replay.runner import ArmResult
from benchmarks.replay.settings import TOKENS_PER_BLOCK, Settings

_ROWS = (
    ("requests", "requests", ",d"),
    ("input blocks", "input_blocks", ",d"),
    ("recomputed share", "recomputed_share", ".4f"),
    ("KV lookups", "lookups", ",d"),
    ("state loads attempted", "loads_attempted", ",d"),
    ("state loads succeeded", "loads_succeeded", ",d"),
    ("state loads failed", "loads_failed", ",d"),
    ("  evicted, index untold", "failed_evicted_untold", ",d"),
    ("  left between two touches", "failed_left_between_touches", ",d"),
    ("  never stored", "failed_never_stored", ",d"),
    ("  wrong bytes", "failed_wrong_bytes", ",d"),
    ("  no room in the pool to read it", "failed_no_room", ",d"),
    ("  KV missing", "failed_kv_missing", ",d"),
    ("  unexplained", "failed_unexplained", ",d"),
    ("touches refreshed", "touches_refreshed", ",d"),
    ("touches present", "touches_present", ",d"),
    ("touches gone", "touches_gone", ",d"),
    ("stale verdicts dropped", "verdicts_stale", ",d"),
    ("held passes", "holds", ",d"),
    ("plans stepped down", "replans", ",d"),
    ("index size at the end", "index_size", ",d"),
    ("images stored: prompt end", "images_stored_prompt_end", ",d"),
    ("images stored: branch", "images_stored_branch", ",d"),
    ("images stored: interval", "images_stored_interval", ",d"),
    ("images refused, no spare room", "images_refused", ",d"),
    ("images not stored, no room", "images_no_room", ",d"),
    ("images resident already", "images_already_resident", ",d"),
    ("KV blocks not stored, no room", "kv_no_room", ",d"),
    ("MiB stored: images", "image_mib_stored", ",.0f"),
    ("MiB stored: KV", "kv_mib_stored", ",.0f"),
    ("evictions: images", "evicted_image", ",d"),
    ("evictions: KV blocks", "evicted_kv", ",d"),
    ("removed otherwise: images", "removed_image", ",d"),
    ("removed otherwise: KV blocks", "removed_kv", ",d"),
    ("images from disk", "promoted_image", ",d"),
    ("KV blocks from disk", "promoted_kv", ",d"),
    ("images stored again, on disk only", "images_stored_back", ",d"),
    ("disk writes: images", "disk_written_image", ",d"),
    ("disk writes: KV blocks", "disk_written_kv", ",d"),
    ("disk evictions: images", "disk_evicted_image", ",d"),
    ("disk evictions: KV blocks", "disk_evicted_kv", ",d"),
    ("disk puts dropped, too much in flight", "disk_dropped_queue_full", ",d"),
    ("disk puts not taken, no room", "disk_dropped_no_room", ",d"),
    ("disk entries at the end", "disk_entries", ",d"),
    ("disk MiB at the end", "disk_mib", ",.0f"),
    ("disk faults", "disk_faults", ",d"),
    ("disk removed otherwise: images", "disk_removed_image", ",d"),
    ("disk removed otherwise: KV blocks", "disk_removed_kv", ",d"),
    ("gone but advertised, mean s", "stale_mean_seconds", ".1f"),
    ("gone but advertised, max s", "stale_max_seconds", ".1f"),
    ("wall seconds", "wall_seconds", ".1f"),
)
"""Label, count or derived figure, format."""

_SHOWN_IF_ANY = frozenset(
    {
        "failed_evicted_untold",
        "failed_left_between_touches",
        "failed_never_stored",
        "failed_wrong_bytes",
        "failed_no_room",
        "failed_kv_missing",
        "failed_unexplained",
        "verdicts_stale",
        "images_no_room",
        "kv_no_room",
        "removed_image",
        "removed_kv",
        "disk_faults",
        "disk_removed_image",
        "disk_removed_kv",
    }
)
_SHOWN_WITH_DISK = frozenset(
    {
        "promoted_image",
        "promoted_kv",
        "images_stored_back",
        "disk_written_image",
        "disk_written_kv",
        "disk_evicted_image",
        "disk_evicted_kv",
        "disk_dropped_queue_full",
        "disk_dropped_no_room",
        "disk_entries",
        "disk_mib",
    }
)
_MIB = 2**20
_Facts = Mapping[str, str | int | float]


def derived(result: ArmResult, settings: Settings) -> dict[str, float]:
    """Return what follows from the counts: shares, bytes, times."""
    counts = result.counts
    num_images = sum(
        counts.get(f"images_stored_{name}", 0) for name in ("interval", "branch", "prompt_end")
    )
    return {
        "recomputed_share": _ratio(
            counts.get("recomputed_blocks", 0), counts.get("input_blocks", 0)
        ),
        "failed_load_share": _ratio(
            counts.get("loads_failed", 0), counts.get("loads_attempted", 0)
        ),
        "input_tokens": counts.get("input_blocks", 0) * TOKENS_PER_BLOCK,
        "recomputed_tokens": counts.get("recomputed_blocks", 0) * TOKENS_PER_BLOCK,
        "images_stored": num_images,
        "kv_mib_stored": counts.get("kv_stored", 0) * settings.block_bytes / _MIB,
        "image_mib_stored": num_images * settings.image_bytes / _MIB,
        "disk_mib": counts.get("disk_used_bytes", 0) / _MIB,
        "stale_mean_seconds": _ratio(counts.get("stale_total_ms", 0), counts.get("stale_images", 0))
        / 1000,
        "stale_max_seconds": counts.get("stale_max_ms", 0) / 1000,
        "wall_seconds": result.wall_seconds,
    }


def print_report(
    out: TextIO,
    workload: _Facts,
    machine: _Facts,
    settings: Settings,
    results: Sequence[ArmResult],
) -> None:
    """Print the header, the table of all arms, and how the model compares."""
    out.write(f"machine: {machine_line(dict(machine))}\n")
    out.write(
        "workload: " + ", ".join(f"{name} {value}" for name, value in workload.items()) + "\n"
    )
    out.write(
        "settings: "
        + ", ".join(f"{name} {value}" for name, value in asdict(settings).items())
        + "\n"
    )
    header = ["per arm", *(result.arm.value for result in results)]
    print_table("", header, _table_rows(results, settings), out)
    if all(result.model_counts is None for result in results):
        out.write("model: not run (exact where --image-blocks is 1; --verify-model runs it)\n")
        return
    for result in results:
        out.write(_model_line(result, settings) + "\n")


def write_json(
    path: Path, workload: _Facts, machine: _Facts, settings: Settings, results: Sequence[ArmResult]
) -> None:
    """Write everything the table shows, and every count, as one JSON object."""
    arms = {
        result.arm.value: {
            "counts": result.counts,
            "derived": derived(result, settings),
            "model_ran": result.model_counts is not None,
            "model_differences": {
                name: {"engine": pair[0], "model": pair[1]}
                for name, pair in result.differences().items()
            },
        }
        for result in results
    }
    document = {
        "benchmark": "replay",
        "machine": dict(machine),
        "workload": dict(workload),
        "settings": asdict(settings),
        "arms": arms,
    }
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _table_rows(results: Sequence[ArmResult], settings: Settings) -> list[list[str]]:
    figures = [{**result.counts, **derived(result, settings)} for result in results]
    rows = []
    for label, name, format_spec in _ROWS:
        if name in _SHOWN_WITH_DISK and settings.disk_blocks is None:
            continue
        cells = [arm_figures.get(name, 0) for arm_figures in figures]
        if any(cells) or name not in _SHOWN_IF_ANY:
            rows.append([label, *(format(cell, format_spec) for cell in cells)])
    return rows


def _model_line(result: ArmResult, settings: Settings) -> str:
    if result.model_counts is None:
        return f"model, {result.arm.value}: not run"
    differences = result.differences()
    if not differences:
        return f"model, {result.arm.value}: equal in all {len(result.counts)} counts"
    listed = ", ".join(f"{name} {ours}/{theirs}" for name, (ours, theirs) in differences.items())
    note = "" if settings.has_equal_sizes else " (two sizes: the model ignores fragmentation)"
    return f"model, {result.arm.value}: differs (engine/model){note}: {listed}"


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
