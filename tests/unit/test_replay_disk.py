"""The replay with a disk that evicts: equal to the model, and every failed load has a cause."""

import contextlib
import dataclasses
import json
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from builders import until
from replay_builders import crowded_requests

from benchmarks.replay.cli import main
from benchmarks.replay.engine import ReplayEngine
from benchmarks.replay.generator import SessionGenerator
from benchmarks.replay.kv_service import LoadOutcome
from benchmarks.replay.naming import image_key
from benchmarks.replay.pool import ReplayPool
from benchmarks.replay.requests import Request, requests_of
from benchmarks.replay.runner import ArmResult, run_arm
from benchmarks.replay.settings import Arm, Settings
from lmcache.v1.storage_backend.local_cpu_backend import NAME as CPU_TIER
from lmcache.v1.storage_backend.local_disk_backend import NAME as DISK_TIER
from lmcache.v1.storage_backend.placement import Placement

ROOT = Path(__file__).parent.parent.parent
EQUAL_SIZES = Settings(pool_blocks=150, image_blocks=1, interval_blocks=8, disk_blocks=300)
TWO_SIZES = Settings(pool_blocks=600, image_blocks=31, interval_blocks=8, disk_blocks=900)
TINY = Settings(pool_blocks=4, image_blocks=1, interval_blocks=8, disk_blocks=20)
EVENT_ARMS = [Arm.EVENTS, Arm.ADMISSION]
NEVER = ("wrong_bytes", "kv_missing", "never_stored", "unexplained", "no_room")


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return requests_of(SessionGenerator(42).rows(6))


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ReplayPool]:
    pool = ReplayPool(TINY, tmp_path)
    yield pool
    pool.manager.check_integrity()
    pool.close()


def replayed(requests: Sequence[Request], settings: Settings, arm: Arm) -> ArmResult:
    return run_arm(requests, settings, arm, with_model=True)


def prompts(*prefixes: tuple[int, ...]) -> list[Request]:
    return [Request(number * 10_000, prefix) for number, prefix in enumerate(prefixes)]


# ---- whole runs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", list(Arm))
def test_every_count_equals_the_models_with_a_disk_that_evicts(
    requests: list[Request], arm: Arm
) -> None:
    result = replayed(requests, EQUAL_SIZES, arm)
    assert result.differences() == {}
    counts = result.counts
    assert counts["disk_evicted_image"] > 0 and counts["disk_evicted_kv"] > 0
    assert counts["promoted_image"] > 0 and counts["promoted_kv"] > 0
    assert (counts.get("touches_present", 0) > 0) == arm.touches
    assert "disk_dropped_queue_full" not in counts


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("arm", list(Arm))
def test_every_count_equals_the_models_for_crowded_random_prompts(arm: Arm, seed: int) -> None:
    numbers = random.Random(seed)
    crowd = crowded_requests(numbers)
    crowded = Settings(
        pool_blocks=numbers.randint(3, 12),
        image_blocks=1,
        interval_blocks=numbers.randint(1, 4),
        prefill_blocks=(None, 1, 2, 3, None, 4)[seed],
        disk_blocks=numbers.randint(10, 30),
    )
    result = replayed(crowd, crowded, arm)
    assert result.differences() == {}
    assert result.counts["promoted_kv"] > 0 and result.counts["disk_evicted_kv"] > 0


@pytest.mark.parametrize("arm", EVENT_ARMS)
@pytest.mark.parametrize("settings", [EQUAL_SIZES, TWO_SIZES])
def test_with_touch_and_events_no_state_load_fails(
    requests: list[Request], settings: Settings, arm: Arm
) -> None:
    counts = run_arm(requests, settings, arm, with_model=False).counts
    assert counts["disk_evicted_image"] > 0
    assert counts["touches_present"] > 0
    assert "loads_failed" not in counts and "touches_gone" not in counts


def test_with_touch_only_every_failed_load_left_between_two_touches(
    requests: list[Request],
) -> None:
    trusting = dataclasses.replace(EQUAL_SIZES, disk_blocks=160, verified_for_ms=10**9)
    result = replayed(requests, trusting, Arm.TOUCH)
    assert result.differences() == {}
    assert result.counts["failed_left_between_touches"] == result.counts["loads_failed"] > 0


def test_without_touch_a_load_fails_only_where_the_last_copy_left_untold(
    requests: list[Request],
) -> None:
    counts = replayed(requests, EQUAL_SIZES, Arm.NONE).counts
    assert counts["failed_evicted_untold"] == counts["loads_failed"] > 0


@pytest.mark.parametrize("arm", list(Arm))
def test_no_byte_differs_with_two_sizes(requests: list[Request], arm: Arm) -> None:
    counts = run_arm(requests, TWO_SIZES, arm, with_model=False).counts
    assert counts["promoted_image"] > 0 and counts["promoted_kv"] > 0
    assert not [cause for cause in NEVER if f"failed_{cause}" in counts]
    assert "disk_faults" not in counts


def test_lost_events_are_made_good_from_a_snapshot_of_both_tiers(
    requests: list[Request],
) -> None:
    whole = replayed(requests, EQUAL_SIZES, Arm.EVENTS)
    with contextlib.closing(ReplayEngine(EQUAL_SIZES, Arm.EVENTS, events_capacity=2)) as engine:
        for request in requests:
            engine.serve(request)
        assert engine.finish() == whole.model_counts


# ---- single images ------------------------------------------------------------------------------

# What stands where after each prompt is in test_replay_model.py.
RETURNS_FROM_DISK = prompts((1, 2), (11, 12), (1, 2))
STORED_BACK = prompts((1, 2), (21,), (1, 2), (11, 12), (31,), (1, 2))


@pytest.mark.parametrize("arm", list(Arm))
def test_image_that_left_the_pool_is_advertised_and_loaded_from_disk(arm: Arm) -> None:
    small = Settings(pool_blocks=3, image_blocks=1, interval_blocks=100, disk_blocks=6)
    result = replayed(RETURNS_FROM_DISK, small, arm)
    assert result.differences() == {}
    assert result.counts["loads_succeeded"] == result.counts["promoted_image"] == 1
    assert result.counts.get("touches_present", 0) == arm.touches


@pytest.mark.parametrize("arm", [Arm.TOUCH, *EVENT_ARMS])
def test_image_that_is_on_disk_only_is_stored_again(arm: Arm) -> None:
    small = Settings(pool_blocks=5, image_blocks=1, interval_blocks=100, disk_blocks=8)
    result = replayed(STORED_BACK, small, arm)
    assert result.differences() == {}
    assert result.counts["images_stored_back"] == 1
    assert result.counts["images_stored_prompt_end"] == 5
    assert result.counts["disk_written_image"] == 4


def test_image_read_from_disk_is_back_in_the_pool_whether_it_is_a_use_or_not(
    pool: ReplayPool,
) -> None:
    keys = [image_key(image) for image in (1, 2)]
    for key in keys:
        assert pool.store_image(key, Placement.YOUNG)
    pool.kv.store(range(4), 0)
    assert [pool.tier_of(key) for key in keys] == [DISK_TIER, DISK_TIER]
    assert pool.load_image(keys[0], is_use=True) is LoadOutcome.LOADED
    assert pool.load_image(keys[1], is_use=False) is LoadOutcome.LOADED
    assert [pool.tier_of(key) for key in keys] == [CPU_TIER, CPU_TIER]


def test_image_that_is_kept_stays_in_the_pool_while_kv_comes_in(pool: ReplayPool) -> None:
    assert pool.store_image(image_key(1), Placement.YOUNG)
    with pool.kept(image_key(1)):
        pool.kv.store(range(4), 0)
        assert pool.tier_of(image_key(1)) == CPU_TIER
    pool.kv.store(range(10, 14), 0)
    assert pool.tier_of(image_key(1)) == DISK_TIER


def test_load_that_finds_no_room_in_the_pool_says_so(pool: ReplayPool) -> None:
    assert pool.store_image(image_key(1), Placement.YOUNG)
    pool.kv.store((1, 2), 0)
    pool.kv.store((11, 12, 13, 14), 0)
    assert pool.kv.match((11, 12, 13, 14), "a") == 4
    assert pool.load_image(image_key(1), is_use=True) is LoadOutcome.NO_ROOM
    assert pool.kv.load((1, 2)) is LoadOutcome.NO_ROOM
    pool.kv.release("a")
    assert pool.kv.load((1, 2)) is LoadOutcome.LOADED
    assert pool.load_image(image_key(9), is_use=True) is LoadOutcome.MISSING


@pytest.mark.parametrize("arm", list(Arm))
def test_load_that_the_pool_cannot_carry_fails_with_that_cause(arm: Arm) -> None:
    small = Settings(pool_blocks=2, image_blocks=1, interval_blocks=100, disk_blocks=6)
    result = replayed(prompts((1, 2), (1, 2)), small, arm)
    assert result.differences() == {}
    assert result.counts["failed_no_room"] == result.counts["loads_failed"] == 1


# ---- the disk itself ----------------------------------------------------------------------------


def test_nothing_is_on_its_way_to_disk_between_two_calls(pool: ReplayPool) -> None:
    pool.kv.store(range(4), 0)
    assert pool.manager.gauges().disk.num_queued == 0
    assert pool.store_image(image_key(1), Placement.YOUNG)
    assert pool.manager.gauges().disk.num_queued == 0


def test_long_prompt_is_put_in_parts_that_the_disk_tier_takes_whole(tmp_path: Path) -> None:
    larger = dataclasses.replace(TINY, pool_blocks=40, disk_blocks=60)
    with contextlib.closing(ReplayPool(larger, tmp_path)) as pool:
        pool.kv.store(range(40), 0)
        disk = pool.manager.gauges().disk
    assert (disk.num_entries, disk.dropped_queue_full) == (40, 0)


def test_files_are_of_the_size_that_the_settings_count(pool: ReplayPool) -> None:
    pool.kv.store((1,), 0)
    assert pool.manager.gauges().disk.used_bytes == TINY.block_file_bytes
    assert pool.store_image(image_key(1), Placement.YOUNG)
    assert pool.manager.gauges().disk.used_bytes == TINY.block_file_bytes + TINY.image_file_bytes


def test_directory_of_an_arm_is_its_own_and_goes_with_it(tmp_path: Path) -> None:
    with contextlib.ExitStack() as engines:
        first, second = (
            engines.enter_context(
                contextlib.closing(ReplayEngine(TINY, Arm.EVENTS, disk_dir=tmp_path))
            )
            for _ in range(2)
        )
        assert len(list(tmp_path.iterdir())) == 2
        first.serve(Request(0, (1, 2)))
        assert len(list(tmp_path.rglob("*.pt"))) == 3
        first.close()
        second.serve(Request(0, (1, 2)))
        assert second.finish()["recomputed_blocks"] == 2
        assert list(tmp_path.iterdir()) == []


def test_run_that_fails_leaves_no_file_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    broken = [Request(0, (1, 2)), Request(1, (1 << 70,))]  # too large for a token
    with pytest.raises(ValueError, match="Overflow"):
        run_arm(broken, TINY, Arm.EVENTS, with_model=False)
    assert list(tmp_path.iterdir()) == []


# ---- the command --------------------------------------------------------------------------------

SMALL_RUN = ["--image-blocks=1", "--pool-blocks=80", "--sessions=3", "--no-progress"]


def test_command_counts_the_disk_and_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result, directory = tmp_path / "result.json", tmp_path / "files"
    directory.mkdir()
    arguments = [*SMALL_RUN, "--disk", f"--disk-dir={directory}", f"--json={result}"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "disk evictions: images" in printed and "touch+events+admission: equal in all" in printed
    document = json.loads(result.read_text())
    assert document["settings"]["disk_blocks"] == 160
    for arm in Arm:
        counts = document["arms"][arm.value]["counts"]
        assert counts["disk_used_bytes"] == 160 * 8192
        assert counts["disk_evicted_kv"] > 0
    assert list(directory.iterdir()) == []


def test_size_of_the_disk_can_be_given_without_the_switch(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    common = ["--arms=touch+events", "--disk-blocks=120", f"--json={result}"]
    assert main([*SMALL_RUN, *common]) == 0
    alone = json.loads(result.read_text())
    assert main([*SMALL_RUN, *common, "--disk"]) == 0
    assert alone["settings"]["disk_blocks"] == 120
    assert (
        json.loads(result.read_text())["arms"]["touch+events"]["counts"]
        == (alone["arms"]["touch+events"]["counts"])
    )


def test_run_that_is_ended_from_outside_removes_its_files(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.replay", "--disk", f"--disk-dir={tmp_path}"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as run:
        try:
            until(lambda: any(tmp_path.rglob("*.pt")))
            run.send_signal(signal.SIGTERM)
            assert run.wait(60) == 128 + signal.SIGTERM
        finally:
            run.kill()
    assert list(tmp_path.iterdir()) == []


def test_table_without_a_disk_has_no_row_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL_RUN, "--arms=touch"]) == 0
    rows = capsys.readouterr().out.partition("per arm")[2]
    assert "touches present" in rows and "disk" not in rows


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--disk-blocks=0"], "disk_blocks is 0; give at least 1"),
        (["--disk-blocks=15", "--image-blocks=31"], "is smaller than the file of one state image"),
        (["--disk-dir={here}"], "has no use without --disk"),
        (["--disk", "--disk-dir={here}/absent"], "is not a directory; make it first"),
        (["--disk", "--disk-dir={here}/a,b"], "takes a comma for a list"),
        (["--disk-blocks=100000000000"], "are free in"),
    ],
)
def test_disk_that_cannot_be_is_refused_with_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (tmp_path / "a,b").mkdir()
    filled = [text.format(here=tmp_path) for text in arguments]
    assert main([*SMALL_RUN, *filled]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err and len(captured.err.splitlines()) == 1
