"""Runs the arms over one workload, with the model beside them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.replay.console import with_progress
from benchmarks.replay.engine import ReplayEngine
from benchmarks.replay.model import run_model
from benchmarks.replay.requests import Request
from benchmarks.replay.settings import Arm, Settings


@dataclass(frozen=True, slots=True)
class ArmResult:
    """What one arm counted; `model_counts` is None where no model ran beside it."""

    arm: Arm
    counts: dict[str, int]
    wall_seconds: float
    model_counts: dict[str, int] | None

    def differences(self) -> dict[str, tuple[int, int]]:
        """Return (engine, model) of every count in which they differ."""
        if self.model_counts is None:
            return {}
        names = sorted(self.counts.keys() | self.model_counts.keys())
        pairs = {name: (self.counts.get(name, 0), self.model_counts.get(name, 0)) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def run_arm(
    requests: Sequence[Request],
    settings: Settings,
    arm: Arm,
    *,
    with_model: bool,
    shows_progress: bool = False,
    disk_dir: Path | None = None,
) -> ArmResult:
    """Replay the requests through a fresh engine and pool in the manner of one arm.

    Its disk tier, if there is one, has a directory of its own in `disk_dir` (None: where temporary
    files go), which is removed at the end.
    """
    engine = ReplayEngine(settings, arm, disk_dir=disk_dir)
    start_s = time.monotonic()
    try:
        for request in with_progress(arm.value, requests, is_shown=shows_progress):
            engine.serve(request)
        counts = engine.finish()
    finally:
        engine.close()
    wall_seconds = time.monotonic() - start_s
    model_counts = run_model(requests, settings, arm) if with_model else None
    return ArmResult(arm, counts, wall_seconds, model_counts)
