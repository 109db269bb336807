"""The replay on the real engine: equal to the model, count for count, and never a wrong byte."""

import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from replay_builders import crowded_requests

from benchmarks.replay.cli import main
from benchmarks.replay.engine import ReplayEngine
from benchmarks.replay.generator import SessionGenerator
from benchmarks.replay.kv_service import LoadOutcome
from benchmarks.replay.model import run_model
from benchmarks.replay.naming import image_key
from benchmarks.replay.pool import ReplayPool
from benchmarks.replay.requests import Request, requests_of
from benchmarks.replay.runner import ArmResult, run_arm
from benchmarks.replay.settings import Arm, Settings
from lmcache.v1.storage_backend.placement import Placement

EQUAL_SIZES = Settings(pool_blocks=300, image_blocks=1, interval_blocks=8)
TWO_SIZES = Settings(pool_blocks=1500, image_blocks=31, interval_blocks=8)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return requests_of(SessionGenerator(42).rows(12))


@pytest.fixture
def pool() -> Iterator[ReplayPool]:
    pool = ReplayPool(EQUAL_SIZES)
    yield pool
    pool.close()


def replayed(requests: list[Request], settings: Settings, arm: Arm) -> ArmResult:
    return run_arm(requests, settings, arm, with_model=True)


@pytest.mark.parametrize("arm", list(Arm))
def test_every_count_equals_the_models(requests: list[Request], arm: Arm) -> None:
    result = replayed(requests, EQUAL_SIZES, arm)
    assert result.differences() == {}
    assert result.counts["evicted_image"] > 0 and result.counts["evicted_kv"] > 0


def test_every_count_equals_the_models_where_images_leave_between_touches(
    requests: list[Request],
) -> None:
    trusting = Settings(pool_blocks=150, image_blocks=1, interval_blocks=8, verified_for_ms=10**9)
    result = replayed(requests, trusting, Arm.TOUCH)
    assert result.differences() == {}
    assert result.counts["failed_left_between_touches"] == result.counts["loads_failed"] > 0


@pytest.mark.parametrize("arm", list(Arm))
@pytest.mark.parametrize(
    "changes",
    [{"prefill_blocks": 5}, {"pool_blocks": 60}, {"pool_blocks": 60, "prefill_blocks": 7}],
)
def test_every_count_equals_the_models_for_long_and_chunked_prompts(
    requests: list[Request], arm: Arm, changes: dict[str, int]
) -> None:
    result = replayed(requests, dataclasses.replace(EQUAL_SIZES, **changes), arm)
    assert result.differences() == {}
    assert (result.counts.get("kv_no_room", 0) > 0) == ("pool_blocks" in changes)
    assert (result.counts.get("holds", 0) > 0) == (arm is Arm.TOUCH)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("arm", list(Arm))
def test_every_count_equals_the_models_for_crowded_random_prompts(arm: Arm, seed: int) -> None:
    numbers = random.Random(seed)
    crowd = crowded_requests(numbers)
    crowded = Settings(
        pool_blocks=numbers.randint(3, 12),
        image_blocks=1,
        interval_blocks=numbers.randint(1, 4),
        prefill_blocks=(None, 1, 2, 3)[seed],
    )
    result = replayed(crowd, crowded, arm)
    assert result.differences() == {}
    assert result.counts["loads_succeeded"] > 0 and result.counts["evicted_kv"] > 0


def test_without_touch_state_loads_fail_and_with_events_none_does(requests: list[Request]) -> None:
    untold = replayed(requests, EQUAL_SIZES, Arm.NONE).counts
    told = replayed(requests, EQUAL_SIZES, Arm.EVENTS).counts
    assert untold["failed_evicted_untold"] == untold["loads_failed"] > 0
    assert "loads_failed" not in told
    assert told["recomputed_blocks"] < untold["recomputed_blocks"]


@pytest.mark.parametrize("arm", list(Arm))
def test_no_byte_differs_with_two_sizes(requests: list[Request], arm: Arm) -> None:
    counts = replayed(requests, TWO_SIZES, arm).counts
    assert counts["loads_succeeded"] > 0
    for cause in ("wrong_bytes", "kv_missing", "never_stored", "unexplained"):
        assert f"failed_{cause}" not in counts


def test_lost_events_are_made_good_from_a_snapshot(requests: list[Request]) -> None:
    engine = ReplayEngine(EQUAL_SIZES, Arm.EVENTS, events_capacity=2)
    for request in requests:
        engine.serve(request)
    assert engine.finish() == run_model(requests, EQUAL_SIZES, Arm.EVENTS)


def test_admission_recomputes_less_where_images_are_large(requests: list[Request]) -> None:
    with_events = replayed(requests, TWO_SIZES, Arm.EVENTS).counts
    with_admission = replayed(requests, TWO_SIZES, Arm.ADMISSION).counts
    assert with_admission["images_refused"] > 0
    assert with_admission["recomputed_blocks"] < with_events["recomputed_blocks"]


def test_reading_an_image_without_use_moves_nothing(pool: ReplayPool) -> None:
    keys = [image_key(image) for image in (1, 2)]
    for key in keys:
        assert pool.store_image(key, Placement.YOUNG)
    assert pool.load_image(keys[0], is_use=False) is LoadOutcome.LOADED
    pool.kv.store(range(EQUAL_SIZES.pool_blocks - 1), 0)
    assert pool.tier_of(keys[0]) is None and pool.tier_of(keys[1]) is not None


def test_spare_image_displaces_nothing(pool: ReplayPool) -> None:
    pool.kv.store(range(EQUAL_SIZES.pool_blocks), 0)
    assert not pool.has_spare_room()
    assert not pool.store_image(image_key(1), Placement.SPARE)
    assert pool.kv.match(range(EQUAL_SIZES.pool_blocks), "r") == EQUAL_SIZES.pool_blocks


def test_absent_image_is_missing(pool: ReplayPool) -> None:
    assert pool.load_image(image_key(1), is_use=True) is LoadOutcome.MISSING
    assert pool.load_image(image_key(1), is_use=False) is LoadOutcome.MISSING


def test_command_prints_a_table_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, result = tmp_path / "trace.jsonl", tmp_path / "result.json"
    common = ["--image-blocks=1", "--pool-blocks=200", "--no-progress", f"--json={result}"]
    assert main(["--sessions=3", f"--write-trace={trace}", *common]) == 0
    generated = json.loads(result.read_text())
    assert main([f"--trace={trace}", *common]) == 0
    from_trace = json.loads(result.read_text())
    printed = capsys.readouterr().out
    assert "recomputed share" in printed and "touch+events+admission: equal in all" in printed
    for arm in Arm:
        assert from_trace["arms"][arm.value]["counts"] == generated["arms"][arm.value]["counts"]
        assert from_trace["arms"][arm.value]["model_differences"] == {}
    assert from_trace["machine"]["num_cores"] >= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--pool-blocks=30"],
            "the pool of 30 blocks is smaller than one state image of 31 blocks",
        ),
        (["--trace={missing}"], "No such file"),
        (["--trace={broken}"], "line 1: not JSON"),
    ],
)
def test_bad_input_ends_with_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{\n")
    filled = [text.format(missing=tmp_path / "absent.jsonl", broken=broken) for text in arguments]
    assert main(filled) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err and len(captured.err.splitlines()) == 1
