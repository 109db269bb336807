"""Every exception this package defines, with when it is raised."""

from typing import NoReturn


class ConfigError(ValueError):
    """A setting cannot be used: the message names the setting, its value and the remedy."""


class UnsupportedFeatureError(ConfigError):
    """A setting asks for something that upstream LMCache has and this package does not."""


def refuse_call(call: str, feature: str) -> NoReturn:
    """Raise the error of a call that upstream has and this package has not.

    Raises:
        UnsupportedFeatureError: Always.
    """
    raise UnsupportedFeatureError(
        f"{call} belongs to {feature}, which this fork does not have; use upstream LMCache for it"
    )


class HostMemoryError(ConfigError):
    """The CPU pools of this host's ranks do not fit into the memory the host allows."""


class EventStateError(KeyError, AssertionError):
    """An asynchronous event is unknown, or not in the state the call needs.

    It is an `AssertionError` as well because callers of 0.5.6 catch that for an event that is
    not done.
    """

    def __str__(self) -> str:
        return str(self.args[0])
