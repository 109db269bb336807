"""Touch and demote: move keys in every local tier's order and say what is known of them."""

import threading
from collections.abc import Sequence

from lmcache.logging import init_logger
from lmcache.v1.cache_key import CacheEngineKey
from lmcache.v1.native import check_keys
from lmcache.v1.storage_backend.abstract_backend import Motion
from lmcache.v1.storage_backend.tier_set import Tier, TierSet
from lmcache.v1.storage_backend.touch import (
    CODE_GONE,
    CODE_PRESENT,
    CODE_REFRESHED,
    NO_TIER,
    TouchResult,
    TouchVerdict,
)

logger = init_logger(__name__)

_ABSENT, _MOVED, _FAILED = 0, 1, 3
# Where every answer comes from the first tier: absent -> no tier, else tier 0.
_FIRST_TIER_CODES = bytes([NO_TIER, 0, 0] + [NO_TIER] * 253)


class _Outcome:
    """What one batch found out, filled in under the locks."""

    __slots__ = ("answers", "codes", "seq", "tier_codes")

    def __init__(self) -> None:
        self.answers: list[bytes] = []
        self.codes = self.tier_codes = b""
        self.seq = 0


class ResidencyMoves:
    """Moves batches of keys in the orders of all searched tiers.

    One batch takes each tier's order lock once, in search order, and releases them together. Tiers
    report transitions under those locks, so that its verdicts and its `seq` belong to one moment.
    Nothing is pinned, read, promoted or waited for.

    Threads: safe from any thread; `_counts_lock` guards the counts.
    """

    _traceback_was_logged = False  # one traceback per process

    def __init__(self, tiers: TierSet, cpu_name: str) -> None:
        self._tiers = tiers
        self._cpu_name = cpu_name
        self._counts_lock = threading.Lock()
        self.num_errors = 0
        self._num_refreshed = self._num_present = self._num_gone = 0

    def move(self, keys: Sequence[CacheEngineKey], motion: Motion) -> TouchResult:
        """Move `keys` (head first) in every order that holds them.

        Raises:
            TypeError: `keys` is no sequence of CacheEngineKey. Nothing was moved.
        """
        checked = _checked_keys(keys)
        tiers = list(self._tiers.searched())
        outcome = _Outcome()
        self._move_from(tiers, outcome, checked, motion)
        if motion is Motion.USE:
            self._count(outcome.codes)
        names = [tier.name for tier in tiers]
        incarnation = self._tiers.ledger.incarnation
        return TouchResult(
            checked, outcome.codes, outcome.tier_codes, names, incarnation, outcome.seq
        )

    def touch_counts(self) -> dict[str, int]:
        """Return verdict to the keys that touches answered so; demotions are not counted."""
        with self._counts_lock:
            return {
                TouchVerdict.REFRESHED.value: self._num_refreshed,
                TouchVerdict.PRESENT.value: self._num_present,
                TouchVerdict.GONE.value: self._num_gone,
            }

    def _count(self, codes: bytes) -> None:
        num_refreshed, num_present = codes.count(CODE_REFRESHED), codes.count(CODE_PRESENT)
        with self._counts_lock:
            self._num_refreshed += num_refreshed
            self._num_present += num_present
            self._num_gone += len(codes) - num_refreshed - num_present

    def _move_from(
        self,
        tiers: Sequence[Tier],
        outcome: "_Outcome",
        keys: tuple[CacheEngineKey, ...],
        motion: Motion,
    ) -> None:
        # One `with` a tier, nested by recursion: a signal handler that raises cannot fall between
        # taking a lock and being sure to give it back, as with a stack of context managers.
        answers = outcome.answers
        if len(answers) == len(tiers):
            self._judge(tiers, outcome, keys)
            return
        tier = tiers[len(answers)]
        if tier.page is None:
            answers.append(bytes(len(keys)))
            self._move_from(tiers, outcome, keys, motion)
            return
        with tier.backend.order_lock:
            answers.append(self._ask(tier, keys, motion))
            self._move_from(tiers, outcome, keys, motion)

    def _judge(
        self, tiers: Sequence[Tier], outcome: "_Outcome", keys: tuple[CacheEngineKey, ...]
    ) -> None:
        # Tiers report transitions under the locks held here, so one moment has one number. With the
        # CPU tier alone nothing is made that could start a garbage collection under its lock.
        answers = outcome.answers
        outcome.seq = self._tiers.ledger.seq
        if len(tiers) == 1 and tiers[0].name == self._cpu_name and _FAILED not in answers[0]:
            outcome.codes = answers[0]
            outcome.tier_codes = answers[0].translate(_FIRST_TIER_CODES)
        else:
            outcome.codes, outcome.tier_codes = self._from_all_tiers(tiers, answers, keys)

    def _from_all_tiers(
        self, tiers: Sequence[Tier], answers: Sequence[bytes], keys: Sequence[CacheEngineKey]
    ) -> tuple[bytes, bytes]:
        codes = bytearray(len(keys))
        tier_codes = bytearray([NO_TIER]) * len(keys)
        for position, key in enumerate(keys):
            codes[position], tier_codes[position] = self._verdict(tiers, answers, position, key)
        return bytes(codes), bytes(tier_codes)

    def _verdict(
        self,
        tiers: Sequence[Tier],
        answers: Sequence[bytes],
        position: int,
        key: CacheEngineKey,
    ) -> tuple[int, int]:
        failed_tier = NO_TIER
        for index in range(len(tiers)):
            if answers[index][position] == _FAILED:
                failed_tier = index
                break
        for index, tier in enumerate(tiers):
            answer = answers[index][position]
            if answer == _FAILED:
                continue
            is_there = key in tier.hint if tier.page is None else answer != _ABSENT
            if not is_there and tier.page is not None:
                is_there = key in tier.page  # a put in flight, say
            if not is_there:
                continue
            is_moved = answer == _MOVED and tier.name == self._cpu_name
            if is_moved and failed_tier == NO_TIER:
                return CODE_REFRESHED, index
            return CODE_PRESENT, index
        return (CODE_GONE if failed_tier == NO_TIER else CODE_PRESENT), failed_tier

    def _ask(self, tier: Tier, keys: Sequence[CacheEngineKey], motion: Motion) -> bytes:
        try:
            return _answers_of(tier, keys, motion)
        except Exception:  # a tier's fault must not become the engine's: the keys count as present
            self._note_errors(0)
        answers = bytearray(len(keys))
        positions = range(len(keys))
        # Head last so that it ends youngest; a demotion ends with the tail, which leaves first.
        for position in positions if motion is Motion.DEMOTE else reversed(positions):
            try:
                answers[position] = _answers_of(tier, (keys[position],), motion)[0]
            except Exception:  # as above, for this key
                answers[position] = _FAILED
        self._note_errors(answers.count(_FAILED))
        return bytes(answers)

    def _note_errors(self, number: int) -> None:
        with self._counts_lock:
            self.num_errors += number
            must_log = not ResidencyMoves._traceback_was_logged
            ResidencyMoves._traceback_was_logged = True
        if must_log:
            logger.exception(
                "a tier raised while moving keys in its order; such keys are reported PRESENT and "
                "counted in touch_errors. This is logged once per process"
            )


def _answers_of(tier: Tier, keys: Sequence[CacheEngineKey], motion: Motion) -> bytes:
    answers = tier.backend.move_in_order(keys, motion)
    if len(answers) != len(keys):
        raise ValueError(f"{tier.name} gave {len(answers)} answers for {len(keys)} keys")
    return answers


def _checked_keys(keys: Sequence[CacheEngineKey]) -> tuple[CacheEngineKey, ...]:
    if isinstance(keys, (str, bytes)) or not isinstance(keys, Sequence):
        raise TypeError(f"keys must be a sequence of CacheEngineKey, not {type(keys).__name__}")
    checked = tuple(keys)
    check_keys(checked)
    return checked
