"""The state index: what it advertises, and which evidence beats which."""

import pytest

from benchmarks.replay.state_index import StateIndex, TouchTicket, VerdictEffect

IMAGE = 7


@pytest.fixture
def index() -> StateIndex:
    index = StateIndex()
    index.note_stored(IMAGE, 0, as_of_seq=1)
    return index


def touched(index: StateIndex, now_ms: int) -> TouchTicket:
    ticket = index.want_touch(IMAGE, now_ms)
    assert ticket is not None
    return ticket


def test_deepest_boundary_within_the_match_is_found() -> None:
    index = StateIndex()
    for image in (11, 13):
        index.note_stored(image, 0, as_of_seq=1)
    prompt = [10, 11, 12, 13, 14]
    assert index.deepest_boundary(prompt, 5) == 4
    assert index.deepest_boundary(prompt, 3) == 2
    assert index.deepest_boundary(prompt, 1) == 0


def test_asking_changes_nothing(index: StateIndex) -> None:
    index.deepest_boundary([IMAGE], 1)
    index.is_verified(IMAGE, 10**9, 1)
    assert len(index) == 1 and IMAGE in index


def test_second_touch_within_half_a_second_is_not_sent(index: StateIndex) -> None:
    touched(index, 1_000)
    assert index.want_touch(IMAGE, 1_499) is None
    assert index.want_touch(IMAGE, 1_500) is not None


def test_gone_verdict_makes_the_index_forget(index: StateIndex) -> None:
    assert index.apply_verdict(touched(index, 5), False, 6) is VerdictEffect.FORGOTTEN
    assert IMAGE not in index


def test_gone_verdict_older_than_a_store_of_the_same_millisecond_is_stale(
    index: StateIndex,
) -> None:
    ticket = touched(index, 5)
    index.note_stored(IMAGE, 5, as_of_seq=2)
    assert index.apply_verdict(ticket, False, 5) is VerdictEffect.STALE
    assert IMAGE in index


def test_gone_verdict_for_a_touch_after_the_store_applies(index: StateIndex) -> None:
    index.note_stored(IMAGE, 5, as_of_seq=2)
    assert index.apply_verdict(touched(index, 5), False, 5) is VerdictEffect.FORGOTTEN


def test_verdict_on_a_forgotten_image_changes_nothing(index: StateIndex) -> None:
    ticket = touched(index, 5)
    index.forget(IMAGE)
    assert index.apply_verdict(ticket, True, 6) is VerdictEffect.UNKNOWN
    assert IMAGE not in index


def test_evidence_is_trusted_for_the_window_and_renewed_by_a_verdict(index: StateIndex) -> None:
    assert index.is_verified(IMAGE, 100, 100)
    assert not index.is_verified(IMAGE, 101, 100)
    index.apply_verdict(touched(index, 101), True, 102)
    assert index.is_verified(IMAGE, 202, 100)


def test_load_is_evidence(index: StateIndex) -> None:
    index.note_loaded(IMAGE, 150)
    assert index.is_verified(IMAGE, 250, 100)


def test_image_whose_last_copy_left_is_forgotten(index: StateIndex) -> None:
    assert index.hear_gone(IMAGE, 2)
    assert IMAGE not in index


def test_last_copy_that_left_before_a_newer_store_does_not_erase_it(index: StateIndex) -> None:
    index.note_stored(IMAGE, 2, as_of_seq=5)
    assert not index.hear_gone(IMAGE, 4)
    index.hear_stored(IMAGE, 5, 3)
    assert IMAGE in index
    assert index.hear_gone(IMAGE, 6)


def test_copy_that_was_stored_and_left_before_anyone_heard_is_forgotten(index: StateIndex) -> None:
    index.note_stored(IMAGE, 2, as_of_seq=5)
    assert not index.hear_gone(IMAGE, 4)
    index.hear_stored(IMAGE, 5, 3)
    assert index.hear_gone(IMAGE, 6)


def test_older_copy_is_heard_to_be_stored_and_the_newer_store_still_counts(
    index: StateIndex,
) -> None:
    index.note_stored(IMAGE, 2, as_of_seq=9)
    index.hear_stored(IMAGE, 3, 3)  # of the copy that left at 7
    assert not index.hear_gone(IMAGE, 7)


def test_image_found_resident_is_true_as_of_then(index: StateIndex) -> None:
    index.note_stored(IMAGE, 2, as_of_seq=8)
    assert not index.hear_gone(IMAGE, 7)
    assert index.hear_gone(IMAGE, 9)


def test_copy_in_whichever_tier_advertises_an_image_that_was_forgotten(index: StateIndex) -> None:
    index.hear_gone(IMAGE, 2)
    index.hear_stored(IMAGE, 3, 1)
    assert IMAGE in index
    assert index.hear_gone(IMAGE, 4)


def test_resync_forgets_what_is_not_resident(index: StateIndex) -> None:
    index.note_stored(8, 1, as_of_seq=2)
    assert index.resync({IMAGE}) == [8]
    assert 8 not in index
    assert index.hear_gone(IMAGE, 12)
