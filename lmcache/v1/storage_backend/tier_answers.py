"""Answers of tiers, which may be plug-ins, taken for what they are."""

from lmcache.v1.memory_object import MemoryObj, release_all


def checked_answers(answers: object, count: int) -> list[MemoryObj | None]:
    """Return what a tier answered to `count` keys.

    Raises:
        TypeError, ValueError: It is no list of `count` memory objects or Nones; the objects among
            it were released.
    """
    if not isinstance(answers, (list, tuple)):
        raise TypeError(f"a tier answered {answers!r} instead of a list")
    objects = [answer for answer in answers if isinstance(answer, MemoryObj)]
    strangers = [a for a in answers if a is not None and not isinstance(a, MemoryObj)]
    if strangers:
        release_all(objects)
        raise TypeError(f"a tier answered with {strangers[0]!r} instead of a memory object")
    if len(answers) != count:
        release_all(objects)
        raise ValueError(f"a tier gave {len(answers)} answers for {count} keys")
    return list(answers)


def checked_length(length: object, count: int) -> int:
    """Return the length of a prefix of `count` keys that a tier found.

    Raises:
        ValueError: It is no such length.
    """
    if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= count:
        raise ValueError(f"a tier found a prefix of {length!r} of {count} keys")
    return length


def whole_prefix(answers: list[MemoryObj | None]) -> list[MemoryObj]:
    """Return the objects before the first None; those behind it are released, and forgotten."""
    end = answers.index(None) if None in answers else len(answers)
    behind = answers[end:]
    del answers[end:]
    release_all(behind)
    return [answer for answer in answers if answer is not None]
