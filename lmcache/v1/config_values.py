"""From what a user wrote to a value of the declared type, or an error that names the setting."""

import json
import math
import os
import re
import types
from collections.abc import Callable
from typing import Any, get_args

from lmcache.v1.config_knob import FieldSpec
from lmcache.v1.errors import ConfigError

_TRUE_WORDS = ("true", "1", "yes", "on")
_FALSE_WORDS = ("false", "0", "no", "off")
_URL_CREDENTIALS = re.compile(r"://[^@/\s]*@")
_SECRET_NAME = re.compile(r"password|secret|token|credential|account_key", re.IGNORECASE)
# An empty text means "not set", but never for these.
_NUMBER_KINDS = (int, float, int | float, bool)


class _NotOfThisKind(ValueError):
    """A raw value is not of the kind wanted; the text says what would be."""


def parse_value(spec: FieldSpec, raw: object, label: str) -> Any:
    """Return `raw` as a value of the type `spec` declares.

    Args:
        spec: The setting.
        raw: Text, or a value as YAML, JSON or Python gives it.
        label: How the user knows the setting: its variable, or its name and file.

    Raises:
        ConfigError: `raw` is not such a value; names `label`, the value and what is allowed.
    """
    try:
        return _parse(spec, raw)
    except _NotOfThisKind as error:
        raise ConfigError(f"{label}={raw!r} is not {error}") from None


def hide_secrets(value: object) -> object:
    """Return `value` fit for a log: no password of a URL, no secret entry of a mapping."""
    if isinstance(value, str):
        return _URL_CREDENTIALS.sub("://***@", value)
    if isinstance(value, dict):
        return {
            key: "***" if _SECRET_NAME.search(str(key)) else hide_secrets(item)
            for key, item in value.items()
        }
    return value


def _parse(spec: FieldSpec, raw: object) -> Any:
    kind, is_optional = _split_optional(spec.annotation)
    if is_optional and (raw is None or (_is_blank(raw) and kind not in _NUMBER_KINDS)):
        return None
    if spec.rules.is_directory_list:
        return _parse_directories(raw)
    return _PARSERS[kind](raw)


def _is_blank(raw: object) -> bool:
    return isinstance(raw, str) and not raw.strip()


def _split_optional(annotation: Any) -> tuple[Any, bool]:
    members = get_args(annotation)
    if types.NoneType not in members:
        return annotation, False
    (kind,) = [member for member in members if member is not types.NoneType]
    return kind, True


def _parse_bool(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    word = str(raw).strip().lower() if isinstance(raw, (str, int)) else ""
    if word in _TRUE_WORDS:
        return True
    if word in _FALSE_WORDS:
        return False
    raise _NotOfThisKind(
        f"a boolean; use one of {', '.join(_TRUE_WORDS)} or {', '.join(_FALSE_WORDS)}"
    )


def _parse_int(raw: object) -> int:
    try:
        if isinstance(raw, int) and not isinstance(raw, bool):
            return raw
        if isinstance(raw, float) and raw.is_integer():
            return int(raw)
        if isinstance(raw, str):
            return int(raw)
    except ValueError:
        pass
    raise _NotOfThisKind("a whole number")


def _parse_float(raw: object) -> float:
    try:
        if isinstance(raw, (int, float, str)) and not isinstance(raw, bool):
            number = float(raw)
            if not math.isnan(number):
                return number
    except (ValueError, OverflowError):
        pass
    raise _NotOfThisKind("a number")


def _parse_number(raw: object) -> int | float:
    number = _parse_float(raw)
    return int(number) if number.is_integer() else number


def _parse_text(raw: object) -> str:
    if isinstance(raw, os.PathLike):
        raw = os.fspath(raw)
    if isinstance(raw, (str, int, float)) and not isinstance(raw, bool):
        return str(raw)
    raise _NotOfThisKind("a text")


def _parse_directories(raw: object) -> str | None:
    parts = _split_list(raw if isinstance(raw, list) else _parse_text(raw))
    return ",".join(_parse_text(part).removeprefix("file://") for part in parts) or None


def _split_list(raw: object) -> list[Any]:
    if isinstance(raw, str):
        return [part.strip() for part in raw.split(",") if part.strip()]
    if isinstance(raw, (list, tuple)):
        return list(raw)
    return [raw]


def _list_of(parse_item: Callable[[object], Any]) -> Callable[[object], list[Any]]:
    def parse_list(raw: object) -> list[Any]:
        try:
            return [parse_item(item) for item in _split_list(raw)]
        except _NotOfThisKind as error:
            raise _NotOfThisKind(f"a list (comma separated) whose every item is {error}") from None

    return parse_list


def _parse_table(raw: object) -> dict[str, Any]:
    if isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except json.JSONDecodeError as error:
            raise _NotOfThisKind(f"the JSON text of an object ({error})") from None
    if isinstance(raw, dict):
        return raw
    raise _NotOfThisKind("a mapping, or the JSON text of an object")


_PARSERS: dict[Any, Callable[[object], Any]] = {
    bool: _parse_bool,
    int: _parse_int,
    float: _parse_float,
    int | float: _parse_number,
    str: _parse_text,
    list[int]: _list_of(_parse_int),
    list[float]: _list_of(_parse_float),
    list[str]: _list_of(_parse_text),
    dict[str, Any]: _parse_table,
}
