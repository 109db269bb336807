"""What is known about one setting beside its name, type and default."""

import dataclasses
from dataclasses import dataclass
from typing import Any

ENV_PREFIX = "LMCACHE_"
_METADATA_KEY = "knob"


@dataclass(frozen=True, slots=True)
class Knob:
    """Rules of one setting.

    Attributes:
        unit: What a number counts ("GiB", "seconds", "tokens", ...).
        aliases: Older names that still set it.
        minimum: Smallest number allowed, or None.
        is_above_zero: Zero itself is not allowed.
        is_unbounded: Infinity is allowed.
        choices: Texts allowed in any case when `ignores_case`; empty means any text.
        ignores_case: `choices` are compared without regard to case.
        is_directory_list: A comma list of directories, each perhaps with a `file://` prefix.
        feature: A feature this package lacks; a value outside `inert` is refused.
        inert: Values of such a setting that ask for nothing.
        part_of: A feature this package lacks, without which the setting has no effect.
        ignored_because: Accepted without effect; a value that asks for something warns.
    """

    unit: str = ""
    aliases: tuple[str, ...] = ()
    minimum: float | None = None
    is_above_zero: bool = False
    is_unbounded: bool = False
    choices: tuple[str, ...] = ()
    ignores_case: bool = False
    is_directory_list: bool = False
    feature: str = ""
    inert: tuple[object, ...] = ()
    part_of: str = ""
    ignored_because: str = ""


def knob(default: object, **rules: Any) -> Any:
    """Declare a setting as a dataclass field with an immutable default and the rules of `Knob`."""
    return dataclasses.field(default=default, metadata={_METADATA_KEY: Knob(**rules)})


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One setting as data: its name, declared type, default and rules."""

    name: str
    annotation: Any
    default: Any
    rules: Knob

    @property
    def env_name(self) -> str:
        """Environment variable that sets it."""
        return ENV_PREFIX + self.name.upper()


def describe_fields(settings_class: type[Any]) -> dict[str, FieldSpec]:
    """Return name → `FieldSpec` for every field that `settings_class` declares with `knob`."""
    specs = {}
    for field in dataclasses.fields(settings_class):
        rules = field.metadata[_METADATA_KEY]
        specs[field.name] = FieldSpec(field.name, field.type, field.default, rules)
    return specs
