"""The plain-Python model against runs counted by hand (blocks and images of one size)."""

import pytest

from benchmarks.replay.model import run_model
from benchmarks.replay.requests import Request
from benchmarks.replay.settings import Arm, Settings, SettingsError, derived_window_ms


def settings(pool_blocks: int, interval_blocks: int = 100, **changes: int) -> Settings:
    return Settings(
        pool_blocks=pool_blocks, image_blocks=1, interval_blocks=interval_blocks, **changes
    )


def requests(*prompts: tuple[int, ...], gap_ms: int = 10_000) -> list[Request]:
    return [Request(number * gap_ms, prompt) for number, prompt in enumerate(prompts)]


A = (1, 2)
B = (11, 12)
C = (21, 22)


@pytest.mark.parametrize("arm", list(Arm))
def test_second_turn_resumes_at_the_first_ones_end(arm: Arm) -> None:
    counts = run_model(requests(A, (1, 2, 3)), settings(100), arm)
    assert counts["input_blocks"] == 5
    assert counts["recomputed_blocks"] == 2 + 1
    assert counts["loads_succeeded"] == 1
    assert counts["loaded_blocks"] == 2
    assert counts["kv_stored"] == 3
    assert counts["images_stored_prompt_end"] == 2
    assert "loads_failed" not in counts


def test_image_nobody_refreshes_leaves_before_its_kv_and_its_load_fails() -> None:
    # The pool holds two prompts (2 blocks and an image each) and one entry more. The load of A
    # refreshes A's blocks only, so its image is the coldest entry when prompt C needs two places.
    counts = run_model(requests(A, B, A, C, A), settings(7), Arm.NONE)
    assert counts["loads_attempted"] == 2
    assert counts["loads_succeeded"] == 1
    assert counts["failed_evicted_untold"] == 1
    assert counts["recomputed_blocks"] == 2 + 2 + 0 + 2 + 2


@pytest.mark.parametrize("arm", [Arm.TOUCH, Arm.EVENTS, Arm.ADMISSION])
def test_touched_image_stays_with_its_kv(arm: Arm) -> None:
    counts = run_model(requests(A, B, A, C, A), settings(7), arm)
    assert counts["loads_succeeded"] == 2
    assert "loads_failed" not in counts
    assert counts["touches_refreshed"] == 2


# Only prompt ends have images here. The pool of 5 after each prompt, coldest first (kN block, iN
# image):
#   (1,2)   k2 k1 i2
#   (1,)    k2 i2 k1 i1
#   (31,32) k1 i1 k32 k31 i32      k2 and i2 left
#   (1,2,3) k1 i1 k3 k2 i3         resumed at block 1; k2 is back, i2 is not and is still advertised
# so the last prompt matches two blocks of KV and finds i2 advertised but gone, and i1 resident.
ADVERTISED_BUT_GONE = ((1, 2), (1,), (31, 32), (1, 2, 3), (1, 2, 9))


def test_without_touch_the_image_that_is_gone_costs_the_whole_prompt() -> None:
    counts = run_model(requests(*ADVERTISED_BUT_GONE), settings(5), Arm.NONE)
    assert (counts["loads_attempted"], counts["loads_succeeded"]) == (2, 1)
    assert counts["failed_evicted_untold"] == 1
    assert counts["recomputed_blocks"] == 2 + 1 + 2 + 2 + 3


def test_gone_verdict_steps_down_to_a_lower_boundary_instead_of_failing() -> None:
    counts = run_model(requests(*ADVERTISED_BUT_GONE), settings(5), Arm.TOUCH)
    assert (counts["loads_attempted"], counts["loads_succeeded"]) == (2, 2)
    assert (counts["touches_gone"], counts["touches_refreshed"]) == (1, 2)
    assert (counts["holds"], counts["replans"]) == (3, 1)
    assert counts["recomputed_blocks"] == 2 + 1 + 2 + 2 + 2


def test_image_that_left_inside_the_trusted_window_fails_with_that_cause() -> None:
    trusting = settings(5, verified_for_ms=60_000)
    counts = run_model(requests(*ADVERTISED_BUT_GONE), trusting, Arm.TOUCH)
    assert (counts["loads_attempted"], counts["loads_succeeded"]) == (2, 1)
    assert counts["failed_left_between_touches"] == 1
    assert "holds" not in counts


def test_events_need_no_hold_and_no_verdict_to_step_down() -> None:
    counts = run_model(requests(*ADVERTISED_BUT_GONE), settings(5), Arm.EVENTS)
    assert (counts["loads_attempted"], counts["loads_succeeded"]) == (2, 2)
    assert "holds" not in counts and "touches_gone" not in counts
    assert counts["recomputed_blocks"] == 2 + 1 + 2 + 2 + 2


def test_interval_images_fill_spare_room_only_and_leave_first() -> None:
    # Images at 1, 2, 3 (interval) and 4 (end). In a pool of 7 the interval images fill the three
    # places that the KV left, and the end image evicts one of them; in a pool of 5 only one of them
    # finds room.
    counts = run_model(requests((1, 2, 3, 4)), settings(7, interval_blocks=1), Arm.ADMISSION)
    assert counts["images_stored_interval"] == 3
    assert counts["images_stored_prompt_end"] == 1
    assert counts["evicted_image"] == 1
    assert "evicted_kv" not in counts
    full = run_model(requests((1, 2, 3, 4)), settings(5, interval_blocks=1), Arm.ADMISSION)
    assert full["images_stored_interval"] == 1
    assert full["images_refused"] == 2


def test_branch_image_goes_where_a_second_lineage_leaves() -> None:
    # A pool of 4 is full of KV when the interval image at block 2 is offered, so it is refused; the
    # second prompt matches 3 blocks and finds no image, so the same boundary is a branch now and is
    # stored.
    first, second = (1, 2, 3, 4), (1, 2, 3, 5)
    counts = run_model(requests(first, second), settings(4, interval_blocks=2), Arm.ADMISSION)
    assert counts["images_refused"] == 1
    assert counts["images_stored_branch"] == 1
    assert counts["images_stored_prompt_end"] == 2
    assert "images_stored_interval" not in counts


def test_events_end_the_advertising_of_what_left_at_the_next_pass() -> None:
    prompts = [(10 * number + 1,) for number in range(6)]
    told = run_model(requests(*prompts), settings(2), Arm.EVENTS)
    untold = run_model(requests(*prompts), settings(2), Arm.NONE)
    assert told["index_size"] == 2 and untold["index_size"] == 6
    assert told["stale_max_ms"] == 10_000
    assert untold["stale_max_ms"] > 10_000


def test_prompt_larger_than_the_pool_keeps_its_head() -> None:
    counts = run_model(requests((1, 2, 3, 4, 5)), settings(3), Arm.NONE)
    assert counts["kv_stored"] == 3
    assert counts["kv_no_room"] == 2


def test_prompt_keeps_its_own_prefix_where_memory_ends() -> None:
    # A leaves k2 k1 i2 and one free place. Its continuation takes that for block 3 and i2's for
    # block 4; block 5 finds only blocks of its own prompt. Its image takes the place of block 4.
    counts = run_model(requests(A, (1, 2, 3, 4, 5)), settings(4), Arm.NONE)
    assert counts["loads_succeeded"] == 1
    assert (counts["kv_stored"], counts["kv_no_room"]) == (4, 1)
    assert (counts["evicted_image"], counts["evicted_kv"]) == (1, 1)


def test_image_does_not_displace_what_its_request_has_pinned() -> None:
    # (1,) leaves k1 i1 and one free place. The second prompt resumes at block 1: k1 is pinned and
    # used. Block 2 takes the free place, block 3 that of i1; then i2 takes the place of block 3 and
    # i3 that of block 2. Now k1 is the coldest, but pinned, so i4 takes the place of i2.
    counts = run_model(requests((1,), (1, 2, 3, 4)), settings(3, interval_blocks=1), Arm.NONE)
    assert (counts["kv_stored"], counts["kv_no_room"]) == (3, 1)
    assert (counts["evicted_kv"], counts["evicted_image"]) == (2, 2)


def test_chunked_prompt_stores_the_images_of_a_step_before_the_kv_of_the_next() -> None:
    # At once: 3 blocks fit, i2 takes the place of block 3, i4 that of block 2. In steps of two: i2
    # goes in after block 2 and makes way for block 3; i4 takes the place of block 3.
    prompt = requests((1, 2, 3, 4))
    at_once = run_model(prompt, settings(3, interval_blocks=2), Arm.NONE)
    assert (at_once["kv_stored"], at_once["kv_no_room"], at_once["evicted_kv"]) == (3, 1, 2)
    in_steps = run_model(prompt, settings(3, interval_blocks=2, prefill_blocks=2), Arm.NONE)
    assert (in_steps["kv_stored"], in_steps["kv_no_room"]) == (3, 1)
    assert (in_steps["evicted_kv"], in_steps["evicted_image"]) == (1, 1)


def test_held_request_looks_up_once_more() -> None:
    counts = run_model(requests(A, A), settings(7), Arm.TOUCH)
    assert (counts["holds"], counts["lookups"]) == (1, 3)


# With a disk tier, pool and disk after each prompt, coldest first. The pool of 3, the disk of 6:
#   (1,2)    k2 k1 i2            k2 k1 i2
#   (11,12)  k12 k11 i12         k2 k1 i2 k12 k11 i12
# so the last prompt finds everything on disk, and nothing in the pool.
RETURNS_FROM_DISK = ((1, 2), (11, 12), (1, 2))


@pytest.mark.parametrize("arm", list(Arm))
def test_what_left_the_pool_is_loaded_from_disk_and_back_in_the_pool(arm: Arm) -> None:
    counts = run_model(requests(*RETURNS_FROM_DISK), settings(3, disk_blocks=6), arm)
    assert (counts["loads_attempted"], counts["loads_succeeded"]) == (1, 1)
    assert (counts["promoted_kv"], counts["promoted_image"]) == (2, 1)
    assert counts["recomputed_blocks"] == 2 + 2 + 0
    assert (counts["evicted_kv"], counts["evicted_image"]) == (2 + 2, 1 + 1)
    assert (counts["disk_written_kv"], counts["disk_written_image"]) == (4, 2)
    assert "disk_evicted_kv" not in counts and "disk_evicted_image" not in counts
    assert counts.get("touches_present", 0) == arm.touches
    assert counts["index_size"] == 2


def test_image_left_only_when_its_last_copy_did() -> None:
    # The disk of 5: i12 takes the place of k2, so the third prompt matches block 1 only, stores
    # block 2 in the place of i2 (block 1 was used), and i2 in that of k12.
    counts = run_model(requests(*RETURNS_FROM_DISK), settings(3, disk_blocks=5), Arm.EVENTS)
    assert "loads_attempted" not in counts
    assert (counts["disk_evicted_kv"], counts["disk_evicted_image"]) == (1 + 1, 1)
    assert counts["stale_images"] == 1 and "stale_max_ms" not in counts  # it is stored at once
    assert "images_stored_back" not in counts


# The pool of 5, the disk of 8. The third prompt is a hit: its touch moves i2 in both orders, its
# lookup k2 k1 in the pool's only.
#   (1,2)    k2 k1 i2                k2 k1 i2
#   (21,)    k2 k1 i2 k21 i21        the same
#   (1,2)    k21 i21 k2 k1 i2        k2 k1 k21 i21 i2
#   (11,12)  k1 i2 k12 k11 i12       k2 k1 k21 i21 i2 k12 k11 i12
#   (31,)    k12 k11 i12 k31 i31     k21 i21 i2 k12 k11 i12 k31 i31
# so the last prompt matches nothing, and finds its image on disk only when it stores it.
STORED_BACK = ((1, 2), (21,), (1, 2), (11, 12), (31,), (1, 2))


@pytest.mark.parametrize("arm", [Arm.TOUCH, Arm.EVENTS, Arm.ADMISSION])
def test_image_that_is_on_disk_only_is_stored_again(arm: Arm) -> None:
    counts = run_model(requests(*STORED_BACK), settings(5, disk_blocks=8), arm)
    assert counts["images_stored_back"] == 1
    assert counts["images_stored_prompt_end"] == 5
    assert counts["disk_written_image"] == 4
    assert (counts["disk_evicted_kv"], counts["disk_evicted_image"]) == (2 + 1, 1)
    assert counts["touches_refreshed"] == 1


def test_spare_image_evicts_nothing_on_disk_either() -> None:
    # In the pool of 6 the images at 1 and 2 are spare, the one at 3 is the end's. The disk of 4 has
    # room for one of the spare ones.
    spare = settings(6, interval_blocks=1, disk_blocks=4)
    counts = run_model(requests((1, 2, 3)), spare, Arm.ADMISSION)
    assert (counts["images_stored_interval"], counts["disk_dropped_no_room"]) == (2, 1)
    assert (counts["disk_written_image"], counts["disk_evicted_image"]) == (2, 1)


def test_load_that_the_pool_cannot_carry_fails_with_that_cause() -> None:
    # The image takes the place of block 2 in the pool of 2. The second prompt finds block 1 there,
    # which is pinned, and block 2 on disk, for which there is no room beside block 1 and the image.
    counts = run_model(requests(A, A), settings(2, disk_blocks=6), Arm.EVENTS)
    assert counts["failed_no_room"] == counts["loads_failed"] == 1
    assert counts["recomputed_blocks"] == 2 + 2
    assert "promoted_kv" not in counts


@pytest.mark.parametrize(
    ("pool_blocks", "window_ms"),
    [(1_000, 5_000), (62_000, 26_035), (124_000, 52_070), (10**6, 60_000)],
)
def test_window_follows_the_pool_within_its_clamp(pool_blocks: int, window_ms: int) -> None:
    assert derived_window_ms(pool_blocks) == window_ms


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        (
            {"pool_blocks": 30, "image_blocks": 31},
            "smaller than one state image of 31 blocks; raise --pool",
        ),
        ({"block_bytes": 5000}, "give a multiple of 4096"),
        ({"interval_blocks": 0}, "give at least 1"),
        ({"verified_for_ms": 100}, "touch interval of 500 ms"),
        ({"disk_blocks": 0}, "disk_blocks is 0; give at least 1"),
        (
            {"pool_blocks": 100, "image_blocks": 31, "disk_blocks": 15},
            r"15 blocks \(122880 bytes\) .* one state image \(131072 bytes\); raise --disk-blocks",
        ),
    ],
)
def test_settings_that_cannot_run_are_refused(changes: dict[str, int], remedy: str) -> None:
    with pytest.raises(SettingsError, match=remedy):
        Settings(**{"pool_blocks": 100, "image_blocks": 1, "interval_blocks": 8} | changes)
